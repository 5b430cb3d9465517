"""What every rank does of a step: its share of the groups, the update, its shard of a checkpoint.

Rank 0 decides and broadcasts a command, a few integers (crew.py); ids travel, never data. Each rank reads its own
groups from Redis, and one all-reduce tells whether all have read theirs, because a rank that leaves would let the
others hang in a collective.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from streamrl.config import RunConfig
from streamrl.errors import WeightsError
from streamrl.learner.actor import Actor
from streamrl.learner.batch import TrainSample
from streamrl.learner.chain import TrainedDigest
from streamrl.learner.checkpoint import Meta
from streamrl.learner.ranks import Ranks
from streamrl.learner.results import UpdateStats
from streamrl.learner.snapshot import Copies, Snapshot, rows_reader
from streamrl.learner.state import Part, RankState

logger = logging.getLogger(__name__)


class Trainer:
    """One rank's actor with what was trained into it.

    All methods but those that say otherwise are collective: every rank calls the same one in the same order, in its
    torch thread.

    Attributes:
        step: updates applied so far.
        digest: groups whose gradients are in the weights.
        state: this rank's share of checkpoints.
    """

    def __init__(self, config: RunConfig, ranks: Ranks, actor: Actor) -> None:
        self.step = 0
        self.digest = TrainedDigest()
        self.ranks = ranks
        self._config, self._actor = config, actor
        adapter: dict[str, Part] = {} if actor.lora is None else {"lora": actor.lora}
        self.state = RankState(ranks, {"actor": actor, **adapter})
        self._accumulated: list[int] = []
        weights = config.weights
        # With deltas the version before is what the next one is compared with.
        sets = 2 if weights.delta.enabled else 1
        self._copies = Copies(actor.published, getattr(torch, weights.dtype), sets, actor.adapter)

    def train(self, gids: Sequence[int], samples: Sequence[TrainSample] | None, *, idle: bool) -> bool:
        """Accumulate the gradients of one micro-batch; False when some rank has not got its samples: nothing happened.

        Args:
            gids: all groups of the micro-batch, on all ranks.
            samples: this rank's share; None when it could not be read.
            idle: no group of the micro-batch has a gradient, so no rank runs the model.
        """
        if self.ranks.all_min(int(samples is not None)) != [1] or samples is None:
            return False
        if not idle:
            self._actor.accumulate(samples)
        self._accumulated.extend(gids)
        return True

    def misfit(self, samples: Sequence[TrainSample]) -> ValueError | None:
        """Why samples do not fit the model, None when they do; not collective."""
        return self._actor.misfit(samples)

    def apply(self, tokens: int) -> UpdateStats:
        """Apply the update of the step, normalised by `tokens` sampled tokens of all ranks."""
        stats = self._actor.apply_update(tokens)
        if not stats.skipped:
            self.digest.add(self._accumulated)
            self.step += 1
        self._accumulated.clear()
        return stats

    def discard(self) -> None:
        """Forget the gradients of a partial step."""
        self._actor.discard()
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

    def adopt(self, folder: Path) -> bool:
        """Take the weights of a pinned version, moments begin anew; False when some rank could not: nothing happened.

        The step goes on counting: what was trained stays trained. Call it between two steps.
        """
        rows: Callable[[str], torch.Tensor] | None = None
        try:
            rows = rows_reader(
                folder, self._actor.parameters, None if (lora := self._actor.lora) is None else lora.about
            )
        except (OSError, WeightsError) as error:
            logger.error("weights not taken", extra={"folder": str(folder), "error": str(error)})  # noqa: TRY400
        if self.ranks.all_min(int(rows is not None)) != [1] or rows is None:
            return False
        self._actor.adopt(rows)
        self._accumulated.clear()
        return True

    def export(self, folder: Path) -> None:
        """Write the Hugging Face directory of the trained model (rank 0)."""
        self._actor.export(folder)

    def unload(self) -> None:
        """Move weights and moments to the host; not collective. A repeat does nothing."""
        self._actor.to_host()

    def reload(self) -> None:
        """Bring them back to the device; not collective. A repeat does nothing."""
        self._actor.to_device()
