"""A value head on the policy: one model and one pass for log-probabilities and values, one update that learns both."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import nn
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from streamrl.config import RunConfig
from streamrl.learner.actor import Actor
from streamrl.learner.algorithms.losses import VALUE_SUMS, ValueSums, clipped_value_loss
from streamrl.learner.batch import Microbatch, TrainSample
from streamrl.learner.model import LogProbModel
from streamrl.learner.ranks import Ranks
from streamrl.learner.results import CriticStats, UpdateStats
from streamrl.learner.sharding import SMALL
from streamrl.learner.value_model import LogProbValueModel
from streamrl.wire import Float32Array

_HEAD = "value_head."


class HeadedActor(Actor):
    """An actor whose model has a value head (`learner.critic.kind: head`).

    The objective of a sample has `coefficient x value loss` added to it, with the weights of `learner.loss.aggregate`,
    and its gradient flows into all of the model. The head learns at `critic.lr`, everything else at `learner.lr`. It is
    in checkpoints and in no version of the weights.

    Args:
        config: the run.
        ranks: the ranks of this learner.
        small: models with fewer parameters than this are one FSDP unit.

    Attributes:
        learnt: what the last update did to the values; None when the actor has made none since it was taken.
    """

    def __init__(self, config: RunConfig, ranks: Ranks, *, small: int = SMALL) -> None:
        self._critic = config.learner.critic
        self._value_sums = torch.zeros(len(VALUE_SUMS), dtype=torch.float64, device=ranks.device)
        self.learnt: CriticStats | None = None
        super().__init__(config, ranks, small=small)

    @property
    def parameters(self) -> dict[str, DTensor]:
        """See `Sharded.parameters`; those of the head are left out: no engine knows them."""
        return {name: value for name, value in super().parameters.items() if not name.startswith(_HEAD)}

    def compute_values(self, batch: Sequence[TrainSample]) -> list[Float32Array]:
        """See `Critic.compute_values`."""
        found = [np.zeros(0, dtype=np.float32) for _ in batch]
        for part in self._agree(batch):
            with torch.no_grad():
                _, _, values = self._forward(part, values="alone")
            part.deal_out(values.cpu().numpy(), found)
        return found

    def accumulate_values(self, batch: Sequence[TrainSample]) -> None:
        """Add the gradient of the value loss alone, which reaches the head and nothing else. Collective.

        Args:
            batch: this rank's samples, possibly none; all have `values` and `returns`.
        """

        def loss(part: Microbatch) -> torch.Tensor:
            _, _, values = self._forward(part, values="alone")
            return self._value_loss(part, values)

        self._backward(self._agree(batch), loss)

    def apply_values(self, tokens: int) -> CriticStats:
        """Update the head with what `accumulate_values` added; the policy stays bit for bit what it is. Collective.

        So do its moments, its average and its place in the schedule of the learning rate.

        Args:
            tokens: sampled tokens of the batch over all ranks, at least 1 and the same on all ranks.
        """
        self._optimizer.head_alone = True
        try:
            applied = self._update(tokens, self._value_sums)
        finally:
            self._optimizer.head_alone = False
        self._value_sums.zero_()
        sums = ValueSums.from_tensor(applied.sums)
        rate = self._head_rate(skipped=applied.skipped)
        return CriticStats(grad_norm=applied.grad_norm, lr=rate, skipped=applied.skipped, sums=sums)

    def apply_update(self, size: int) -> UpdateStats:
        """See `Actor.apply_update`; the values learn in the same update (`learnt`). One more all-reduce."""
        stats = super().apply_update(size)
        sums = ValueSums.from_tensor(self.ranks.all_sum(self._value_sums))
        self._value_sums.zero_()
        rate = self._head_rate(skipped=stats.skipped)
        self.learnt = CriticStats(grad_norm=stats.grad_norm, lr=rate, skipped=stats.skipped, sums=sums)
        return stats

    def discard(self) -> None:
        """See `Actor.discard`."""
        super().discard()
        self._value_sums.zero_()
        self.learnt = None

    def adopt(self, rows: Callable[[str], torch.Tensor]) -> None:
        """See `Sharded.adopt`; the head stays, since no version has one."""
        super().adopt(lambda name: self._parameters[name].to_local() if name.startswith(_HEAD) else rows(name))

    def _wrap(self, base: PreTrainedModel) -> tuple[LogProbModel, Sequence[nn.Module]]:
        sampling, learner = self.config.sampling, self.config.learner
        model = LogProbValueModel(base, temperature=sampling.temperature, chunk=learner.logprob_chunk)
        return model, (model.value_head,)

    def _lr_factors(self) -> dict[str, float]:
        return {name: self._head_factor for name in self._parameters if name.startswith(_HEAD)}

    @property
    def _head_factor(self) -> float:
        return self._critic.lr / self.config.learner.lr

    def _head_rate(self, *, skipped: bool) -> float:
        """Learning rate of the head in the update that was made or skipped."""
        return self._head_factor * (self._optimizer.head_lr if skipped else self._optimizer.head_rate)

    def _name_of(self, name: str) -> str:
        return name if name.startswith(_HEAD) else super()._name_of(name)

    def _loss(
        self, part: Microbatch, step: int, kl_coefficient: float, limits: Sequence[float | None] | None
    ) -> torch.Tensor:
        gradient = bool(self.recipe.entropy)
        logprobs, entropy, values = self._forward(part, entropy=True, entropy_gradient=gradient, values="too")
        value_loss = self._critic.coefficient * self._value_loss(part, values)
        if not len(part.samples):
            total: torch.Tensor = logprobs.sum() * 0 + value_loss
            return total
        policy_loss = self._objective(part, logprobs, entropy, step=step, kl_coefficient=kl_coefficient, limits=limits)
        return policy_loss + value_loss

    def _value_loss(self, part: Microbatch, values: torch.Tensor) -> torch.Tensor:
        if not len(part.samples):
            return values.sum() * 0
        assert part.values is not None
        assert part.returns is not None
        old, returns = self._to_device(part.values), self._to_device(part.returns)
        loss = clipped_value_loss(values, old, returns, clip=self._critic.clip)
        self._value_sums += loss.sums
        weights = self._weights(part)
        return (loss.per_token if weights is None else weights * loss.per_token).sum()


class Head:
    """The critic's side of a `HeadedActor`: what a `Critic` of its own does, where the actor has not done it already.

    Args:
        actor: the policy with the head.
    """

    def __init__(self, actor: HeadedActor) -> None:
        self._actor = actor

    def compute_values(self, batch: Sequence[TrainSample]) -> list[Float32Array]:
        """See `Critic.compute_values`."""
        return self._actor.compute_values(batch)

    def accumulate(self, batch: Sequence[TrainSample]) -> None:
        """See `Critic.accumulate`; nothing is left to do after an update of the actor with the same samples."""
        if self._actor.learnt is None:
            self._actor.accumulate_values(batch)

    def apply_update(self, tokens: int) -> CriticStats:
        """See `Critic.apply_update`; the head alone learns when the actor made no update (warm-up)."""
        learnt, self._actor.learnt = self._actor.learnt, None
        return learnt or self._actor.apply_values(tokens)

    def discard(self) -> None:
        """The actor forgets for both."""

    def to_host(self) -> None:
        """The actor moves for both."""

    def to_device(self) -> None:
        """The actor moves for both."""
