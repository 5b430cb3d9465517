"""What the verbs of the actor return."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from streamrl.learner.algorithms.losses import ValueSums
from streamrl.learner.algorithms.tokens import TokenSums
from streamrl.wire import Float32Array


@dataclass(frozen=True, kw_only=True, slots=True)
class MicroStats:
    """What one `accumulate` did on this rank.

    Attributes:
        samples: samples that went through the model.
        skipped: samples with a zero advantage, whose gradient is zero; they are not computed.
        tokens: sampled tokens with a gradient.
        computed: tokens that went through the model, prompts and padding included.
        passes: forward and backward passes, dummy ones included; the same on all ranks.
    """

    samples: int
    skipped: int
    tokens: int
    computed: int
    passes: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Applied:
    """One update of a sharded model; the same on all ranks.

    Attributes:
        update: updates applied so far, this one included unless it was skipped.
        grad_norm: norm of the gradient before clipping; may be infinite or nan when skipped.
        lr: learning rate of this update.
        skipped: the gradient norm was not finite, so weights and optimizer are as before.
        sums: what was added up over the ranks, float64, on the CPU.
    """

    update: int
    grad_norm: float
    lr: float
    skipped: bool
    sums: torch.Tensor


@dataclass(frozen=True, kw_only=True, slots=True)
class UpdateStats:
    """What one `apply_update` did; the same on all ranks.

    Attributes:
        update: updates applied so far, this one included unless it was skipped.
        loss: sum of the loss over the tokens of the step, divided by their global number.
        grad_norm: norm of the gradient of that loss before clipping; may be infinite or nan when skipped.
        lr: learning rate of this update.
        skipped: the gradient norm was not finite, so weights and optimizer are as before.
        trained: sums over the tokens that had a gradient, of all ranks.
    """

    update: int
    loss: float
    grad_norm: float
    lr: float
    skipped: bool
    trained: TokenSums


@dataclass(frozen=True, kw_only=True, slots=True)
class CriticStats:
    """One update of the critic; the same on all ranks.

    Attributes:
        grad_norm: norm of the gradient before clipping; may be infinite or nan when skipped.
        lr: learning rate of this update.
        skipped: the gradient norm was not finite, so weights and optimizer are as before.
        sums: over the tokens of the batch, of all ranks.
    """

    grad_norm: float
    lr: float
    skipped: bool
    sums: ValueSums


@dataclass(frozen=True, kw_only=True, slots=True)
class StepStats:
    """What all updates of a step did; the same on all ranks. Means are over the updates that were applied.

    Attributes:
        updates: updates of the actor that were applied.
        skipped_updates: of actor and critic, whose gradient was not finite.
        skipped: nothing of the step is in the weights.
        diverged: actor or critic had updates and none could be applied, or the step could not be computed.
        loss: mean loss.
        grad_norm: mean norm of the gradient before clipping.
        lr: mean learning rate.
        kl_coefficient: factor of the KL term in this step.
        trained: sums over all trained tokens; a token counts in each update that it had a part in.
        critic: updates of the critic that were applied.
    """

    updates: int
    skipped_updates: int
    skipped: bool
    diverged: bool
    loss: float
    grad_norm: float
    lr: float
    kl_coefficient: float
    trained: TokenSums
    critic: tuple[CriticStats, ...]

    @classmethod
    def of(
        cls,
        updates: Sequence[UpdateStats],
        *,
        kl_coefficient: float,
        critic: Sequence[CriticStats] = (),
        failed: bool = False,
    ) -> StepStats:
        """Put the updates of a step together.

        Args:
            updates: of the actor, applied or not; none while only the critic learns.
            kl_coefficient: factor of the KL term.
            critic: updates of the critic, applied or not.
            failed: the step could not be computed.
        """
        applied = [stats for stats in updates if not stats.skipped]
        learnt = tuple(stats for stats in critic if not stats.skipped)
        count = max(1, len(applied))
        return cls(
            updates=len(applied),
            skipped_updates=len(updates) - len(applied) + len(critic) - len(learnt),
            skipped=failed or not (applied or learnt),
            diverged=failed or (bool(updates) and not applied) or (bool(critic) and not learnt),
            loss=sum(stats.loss for stats in applied) / count,
            grad_norm=sum(stats.grad_norm for stats in applied) / count,
            lr=sum(stats.lr for stats in applied) / count,
            kl_coefficient=kl_coefficient,
            trained=sum((stats.trained for stats in applied), TokenSums()),
            critic=learnt,
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class LogProbs:
    """Log-probabilities of the sampled tokens, one array per sample in the order of the batch.

    Attributes:
        logprobs: float32, shape (completion tokens,) each.
        entropy: entropy in nats of the distribution each token was drawn from, same shapes; None when not asked for.
    """

    logprobs: list[Float32Array]
    entropy: list[Float32Array] | None
