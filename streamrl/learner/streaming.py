"""A step that is differentiated while its groups come in: one update, and nothing needs the whole step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Protocol

from streamrl.learner.actor import Actor
from streamrl.learner.algorithms.kl import KlController
from streamrl.learner.batch import TrainSample
from streamrl.learner.results import StepStats

if TYPE_CHECKING:
    from streamrl.learner.critic import Critic
    from streamrl.learner.reference import Reference


@dataclass(frozen=True, kw_only=True, slots=True)
class Models:
    """What one rank computes with.

    Attributes:
        actor: the policy.
        critic: the value function, None without one.
        reference: the reference policy, None without one.
        kl: coefficient of the KL term.
    """

    actor: Actor
    kl: KlController
    critic: Critic | None = None
    reference: Reference | None = None

    @property
    def kl_coefficient(self) -> float:
        """Present factor of the KL term; 0 where there is none."""
        return self.kl.coefficient if self.actor.recipe.kl.where != "none" else 0.0

    @property
    def movable(self) -> list[Actor | Critic | Reference]:
        """Those that can leave their device."""
        return [model for model in (self.actor, self.critic, self.reference) if model is not None]

    def with_reference(self, batch: Sequence[TrainSample]) -> list[TrainSample]:
        """The samples with the log-probabilities of the reference, where there is one. Collective."""
        if self.reference is None:
            return list(batch)
        found = self.reference.compute_ref_log_prob(batch)
        return [replace(sample, reference=logprobs) for sample, logprobs in zip(batch, found, strict=True)]


class Way(Protocol):
    """How a step goes from micro-batches to new weights; all methods are collective."""

    def add(self, gids: Sequence[int], samples: Sequence[TrainSample], step: int) -> None:
        """Take in a micro-batch.

        Args:
            gids: of all its groups on all ranks; the same order everywhere.
            samples: this rank's share.
            step: of the learner.
        """

    def apply(self, step: int, *, tokens: int, responses: int) -> StepStats:
        """Update the weights with all micro-batches since the last update, and forget these.

        Args:
            step: of the learner, before the update.
            tokens: sampled tokens of the step on all ranks, those of groups that no rank computes included.
            responses: of the step, likewise.
        """

    def discard(self) -> None:
        """Forget the micro-batches since the last update."""


class Streaming:
    """The way of a recipe that streams: theta is proximal in every pass, so u = 1.

    Args:
        models: of this rank.
    """

    def __init__(self, models: Models) -> None:
        self._models, self._actor = models, models.actor

    def add(self, gids: Sequence[int], samples: Sequence[TrainSample], step: int) -> None:
        """See `Way.add`: the gradient is accumulated at once."""
        del gids
        batch = self._models.with_reference(samples)
        self._actor.accumulate(batch, step=step, kl_coefficient=self._models.kl_coefficient)

    def apply(self, step: int, *, tokens: int, responses: int) -> StepStats:
        """See `Way.apply`."""
        del step
        size = self._actor.recipe.normaliser(tokens=tokens, responses=responses)
        return StepStats.of([self._actor.apply_update(size)], kl_coefficient=self._models.kl_coefficient)

    def discard(self) -> None:
        """See `Way.discard`."""
        self._actor.discard()
