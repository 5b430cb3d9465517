"""What every rank does of a step: its share of the groups, the update, its shard of a checkpoint.

Rank 0 decides and broadcasts a command, a few integers (crew.py); ids travel, never data. Each rank reads its own
groups from Redis, and one all-reduce tells whether all have read theirs, because a rank that leaves would let the
others hang in a collective.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from streamrl.config import RunConfig
from streamrl.learner.actor import Actor
from streamrl.learner.algorithms.kl import KlController
from streamrl.learner.batch import TrainSample
from streamrl.learner.chain import TrainedDigest
from streamrl.learner.checkpoint import Meta
from streamrl.learner.collected import Collected
from streamrl.learner.ranks import Ranks
from streamrl.learner.remote import NoReference
from streamrl.learner.results import StepStats
from streamrl.learner.snapshot import Copies, Snapshot
from streamrl.learner.state import Part, RankState
from streamrl.learner.streaming import Models, Streaming, Way

if TYPE_CHECKING:
    from streamrl.learner.critic import Critic
    from streamrl.learner.reference import Reference

logger = logging.getLogger(__name__)


class Trainer:
    """One rank's models with what was trained into them.

    A step goes one of two ways, as its recipe says: streaming (streaming.py) or collected (collected.py).

    All methods but those that say otherwise are collective: every rank calls the same one in the same order, in its
    torch thread.

    Attributes:
        step: steps applied so far.
        recipe: the algorithm.
        digest: groups whose gradients are in the weights.
        state: this rank's share of checkpoints.
    """

    def __init__(
        self,
        config: RunConfig,
        ranks: Ranks,
        actor: Actor,
        *,
        critic: Critic | None = None,
        reference: Reference | None = None,
    ) -> None:
        self.step = 0
        self.digest = TrainedDigest()
        self.ranks = ranks
        self.recipe = actor.recipe
        self._config, self._actor = config, actor
        self._models = Models(actor=actor, critic=critic, reference=reference, kl=KlController(config.learner.kl))
        self._way: Way = Streaming(self._models) if actor.recipe.streams else Collected(self._models, ranks)
        parts: dict[str, Part] = {"actor": actor}
        if actor.lora is not None:
            parts["lora"] = actor.lora
        if critic is not None:
            parts["critic"] = critic
        if config.learner.kl.controller == "adaptive":
            parts["kl"] = self._models.kl
        self.state = RankState(ranks, parts)
        self._accumulated: list[int] = []
        weights = config.weights
        # With deltas the version before is what the next one is compared with.
        sets = 2 if weights.delta.enabled else 1
        self._copies = Copies(actor.published, getattr(torch, weights.dtype), sets, actor.adapter)

    def train(self, gids: Sequence[int], samples: Sequence[TrainSample] | None, *, idle: bool) -> bool:
        """Take in one micro-batch; False when a rank lacks its samples or their reference: nothing happened.

        Args:
            gids: all groups of the micro-batch, on all ranks.
            samples: this rank's share; None when it could not be read.
            idle: no group of the micro-batch has a gradient, so no rank runs the model.
        """
        if self.ranks.all_min(int(samples is not None)) != [1] or samples is None:
            return False
        try:
            if not idle:
                with self.ranks.computing("micro-batch"):
                    self._way.add(gids, samples, self.step)
        except NoReference as error:
            logger.warning("micro-batch not trained", extra={"error": error.message})
            return False
        self._accumulated.extend(gids)
        return True

    def work(self, samples: Sequence[TrainSample]) -> int:
        """What the samples of one group cost, in arbitrary units; not collective."""
        return self._actor.work(samples)

    def misfit(self, samples: Sequence[TrainSample]) -> ValueError | None:
        """Why samples do not fit the model, None when they do; not collective."""
        return self._actor.misfit(samples)

    def apply(self, tokens: int, responses: int) -> StepStats:
        """Apply the updates of the step.

        Args:
            tokens: sampled tokens of the step on all ranks.
            responses: of the step on all ranks.
        """
        with self.ranks.computing("update"):
            stats = self._way.apply(self.step, tokens=tokens, responses=responses)
        if not stats.skipped:
            self.digest.add(self._accumulated)
            self.step += 1
            if stats.updates:
                self._models.kl.update(stats.trained.mean("kl_reference"), responses)
        self._accumulated.clear()
        return stats

    def discard(self) -> None:
        """Forget the gradients of a partial step."""
        self._way.discard()
        self._accumulated.clear()

    def snapshot(self) -> Snapshot:
        """A copy of this rank's share of the weights as they are published.

        It is valid until the next one; with deltas until the one after that, which needs it no more.
        """
        return self._copies.take(self._actor.published_rows())

    def skip_snapshot(self) -> None:
        """Give the other ranks what their snapshots need of this one, which takes none."""
        self._actor.published_rows()

    def load(self, folder: Path, meta: Meta) -> None:
        """Load this rank's share of a checkpoint.

        Raises:
            Refused: it is of another model or another algorithm.
        """
        self.state.load(folder, meta)
        self.step = meta.step
        self.digest = TrainedDigest(meta.count, meta.digest)

    def export(self, folder: Path) -> None:
        """Write the Hugging Face directory of the trained model (rank 0)."""
        self._actor.export(folder)

    def unload(self) -> None:
        """Move weights and moments to the host; not collective. A repeat does nothing."""
        for model in self._models.movable:
            model.to_host()

    def reload(self) -> None:
        """Bring them back to the device; not collective. A repeat does nothing."""
        for model in self._models.movable:
            model.to_device()
