"""What every rank does, rank 0 too: its share of the groups, the updates, its share of each version and checkpoint.

Rank 0 decides and broadcasts an order, a few integers (rank_group.py); ids travel, never data. Each rank reads its own
groups from Redis, and one all-reduce tells whether all have read theirs, because a rank that leaves would let the
others hang in a collective.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path
from typing import Any

import torch

from streamrl.config import RunConfig, WeightsConfig
from streamrl.errors import DeadlineExceeded
from streamrl.learner.batch import TrainSample
from streamrl.learner.checkpoint import Checkpoints
from streamrl.learner.critic import make_critic
from streamrl.learner.lineage import TrainedDigest
from streamrl.learner.policy import Actor
from streamrl.learner.ranks import Ranks
from streamrl.learner.reference import make_reference
from streamrl.learner.reference_servers import NoReference
from streamrl.learner.results import StepStats
from streamrl.learner.shards import Part, RankState
from streamrl.learner.snapshot import Copies, Snapshot
from streamrl.learner.step import Models, collect, stream, update_collected, update_streamed
from streamrl.weight_sync.manifest import Pair
from streamrl.weight_sync.rank_writer import RankWriter

logger = logging.getLogger(__name__)
NO_BASE = -1
"""Numbers of the base of a version that every rank writes whole."""
NOBODY = -1
"""Owner of a group whose gradient is exactly zero: no rank reads it."""


class Command(IntEnum):
    """An order of rank 0; the integers that follow are its arguments."""

    IDLE = 0
    """Nothing to do; keeps the others from giving up."""
    LOAD = 1
    """epoch, step: load this checkpoint."""
    TRAIN = 2
    """A `MicrobatchOrder`."""
    APPLY = 3
    """tokens, responses: the updates of the step."""
    PUBLISH = 4
    """epoch, version, epoch and version of the base (`NO_BASE` twice: none): write this rank's share of a version."""
    DISCARD = 5
    """Forget the gradients of a step that will not be finished."""
    SAVE = 6
    """epoch, step: copy the state and begin to write this rank's shard of the checkpoint."""
    STOP = 8
    """Leave."""
    UNLOAD = 10
    """Move weights and moments to the host: engines come onto the devices."""
    RELOAD = 11
    """Bring them back."""
    SAVED = 12
    """Say whether the shard is written."""


@dataclass(frozen=True, slots=True)
class MicrobatchOrder:
    """The arguments of `Command.TRAIN`.

    Attributes:
        owners: rank that has each group, by id, or `NOBODY`.
        steps: step of every version that sampled tokens of these groups, so that all ranks know the ages of tokens.
    """

    owners: Mapping[int, int]
    steps: Mapping[int, int]

    def encode(self) -> list[int]:
        """As integers for a broadcast."""
        pairs = [*self.owners.items(), *self.steps.items()]
        return [len(self.owners), *(number for pair in pairs for number in pair)]

    @classmethod
    def decode(cls, numbers: Sequence[int]) -> MicrobatchOrder:
        """Undo `encode`."""
        pairs = list(zip(numbers[1::2], numbers[2::2], strict=True))
        return cls(dict(pairs[: numbers[0]]), dict(pairs[numbers[0] :]))

    def step_of(self, version: int) -> int:
        """Step of a version; a ValueError for one of which rank 0 has found no token."""
        if version not in self.steps:
            raise ValueError(f"rank 0 found no token of version {version} in this group")
        return self.steps[version]

    @property
    def idle(self) -> bool:
        """Whether no group has a gradient, so that no rank runs the model."""
        return max(self.owners.values()) < 0


class RankWorker:
    """One rank's models with what was trained into them.

    All methods but those that say otherwise are collective: every rank calls the same one in the same order, in its
    torch thread. A step goes one of two ways, as its recipe says: streamed or collected (step.py).

    Args:
        config: the run.
        ranks: the ranks of this learner.
        models: of this rank.
        run_dir: of the run.

    Attributes:
        step: steps applied so far.
        recipe: the algorithm.
        digest: groups whose gradients are in the weights.
        state: this rank's share of checkpoints.
    """

    def __init__(self, config: RunConfig, ranks: Ranks, models: Models, run_dir: Path) -> None:
        actor, weights = models.actor, config.weights
        self.step = 0
        self.digest = TrainedDigest()
        self.ranks, self.recipe = ranks, models.recipe
        self._models = models
        self._checkpoints = Checkpoints(run_dir / "checkpoints", make=False)
        parts: dict[str, Part] = {"actor": actor}
        if actor.lora is not None:
            parts["lora"] = actor.lora
        if models.critic is not None:
            parts["critic"] = models.critic
        if config.learner.kl.controller == "adaptive":
            parts["kl"] = models.kl
        self.state = RankState(ranks, parts)
        self._streams = self.recipe.streams
        self._gids: list[int] = []
        self._samples: list[TrainSample] = []  # of a step that does not stream
        # With deltas the version before is what the next one is compared with.
        sets = 2 if weights.delta.enabled else 1
        self._copies = Copies(actor.published, getattr(torch, weights.dtype), sets, actor.adapter)
        self._parts = PartWriter(weights, run_dir, ranks.rank) if ranks.rank else None

    def execute(  # noqa: PLR0911  (one line for each order)
        self, command: Command, arguments: Sequence[int] = (), samples: Sequence[TrainSample] | None = None
    ) -> Any:
        """Carry out an order of rank 0.

        Args:
            command: what to do.
            arguments: of the command.
            samples: this rank's share of a micro-batch; None when it could not be read, and for all other commands.
        """
        match command:
            case Command.LOAD:
                return self.load(*arguments)
            case Command.TRAIN:
                order = MicrobatchOrder.decode(arguments)
                return self.train(list(order.owners), samples, idle=order.idle)
            case Command.APPLY:
                return self.apply(*arguments)
            case Command.PUBLISH:
                return self.publish(*arguments)
            case Command.DISCARD:
                return self.discard()
            case Command.SAVE:
                return self.state.save(self._checkpoints.draft((arguments[0], arguments[1])))
            case Command.SAVED:
                return self.state.saved()
            case Command.UNLOAD:
                return self.unload()
            case Command.RELOAD:
                return self.reload()
            case Command.IDLE | Command.STOP:
                return None

    def train(self, gids: Sequence[int], samples: Sequence[TrainSample] | None, *, idle: bool = False) -> bool:
        """Take in one micro-batch. Returns False, without effect, if any rank lacks its samples or reference log-probs.

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
                    if self._streams:
                        stream(self._models, samples, self.step)
                    else:
                        self._samples += collect(self._models, samples)
        except NoReference as error:
            logger.warning("micro-batch not trained", extra={"error": error.message})
            return False
        self._gids.extend(gids)
        return True

    def apply(self, tokens: int, responses: int) -> StepStats:
        """Apply the updates of the step.

        Args:
            tokens: sampled tokens of the step on all ranks.
            responses: of the step on all ranks.
        """
        with self.ranks.computing("update"):
            if self._streams:
                stats = update_streamed(self._models, tokens=tokens, responses=responses)
            else:
                stats = update_collected(self._models, sorted(self._gids), self._samples, self.step)
        if not stats.skipped:
            self.digest.add(self._gids)
            self.step += 1
            if stats.updates:
                self._models.kl.update(stats.trained.mean("kl_reference"), responses)
        self._gids, self._samples = [], []
        return stats

    def discard(self) -> None:
        """Forget the gradients of a partial step."""
        self._models.discard()
        self._gids, self._samples = [], []

    def snapshot(self) -> Snapshot:
        """A copy of this rank's share of the weights as they are published.

        It is valid until the next one; with deltas until the one after that, which needs it no more.
        """
        return self._copies.take(self._models.actor.published_rows())

    def publish(self, epoch: int, version: int, base_epoch: int, base_version: int) -> Snapshot | None:
        """Copy this rank's share of a version. A rank above 0 writes it in the background; rank 0 publishes it.

        None when this rank still writes the version before and leaves this one out.
        """
        pair = epoch, version
        if self._parts is not None and self._parts.busy:
            self._models.actor.published_rows()  # the snapshots of the other ranks need it
            self._parts.refuse(pair)
            return None
        snapshot = self.snapshot()
        if self._parts is not None:
            base = base_epoch, base_version
            self._parts.start(pair, None if NO_BASE in base else base, snapshot)
        return snapshot

    def load(self, epoch: int, step: int) -> None:
        """Load this rank's share of a checkpoint.

        Raises:
            Refused: it is of another model or another algorithm.
        """
        folder = self._checkpoints.path((epoch, step))
        meta = self._checkpoints.read_meta(folder)
        self.state.load(folder, meta)
        self.step = meta.step
        self.digest = TrainedDigest(meta.count, meta.digest)

    def unload(self) -> None:
        """Move weights and moments to the host; not collective. A repeat does nothing."""
        for model in self._models.movable:
            model.to_host()

    def reload(self) -> None:
        """Bring them back to the device; not collective. A repeat does nothing."""
        for model in self._models.movable:
            model.to_device()

    def work(self, samples: Sequence[TrainSample]) -> int:
        """What the samples of one group cost, in arbitrary units; not collective."""
        return self._models.actor.work(samples)

    def misfit(self, samples: Sequence[TrainSample]) -> ValueError | None:
        """Why samples do not fit the model, None when they do; not collective."""
        return self._models.actor.misfit(samples)

    def close(self) -> None:
        """End the thread that writes versions; not collective."""
        if self._parts is not None:
            self._parts.close()


class PartWriter:
    """Writes this rank's files of one version after the other, in a thread of its own.

    Nobody waits for it but rank 0's thread that puts the version together, and that one has a deadline.

    Args:
        config: how versions are written.
        run_dir: of the run.
        rank: of the learner, above 0.
    """

    def __init__(self, config: WeightsConfig, run_dir: Path, rank: int) -> None:
        self._writer = RankWriter(config, run_dir, rank)
        self._executor = ThreadPoolExecutor(1, thread_name_prefix="publish")
        self._running: Future[None] | None = None

    @property
    def busy(self) -> bool:
        """Whether the version before is still being written."""
        return self._running is not None and not self._running.done()

    def start(self, pair: Pair, base: Pair | None, snapshot: Snapshot) -> None:
        """Begin to write this rank's files of a version; `busy` must be False."""
        self._running = self._executor.submit(self._write, pair, base, snapshot)

    def refuse(self, pair: Pair) -> None:
        """Tell rank 0 that this rank still writes the version before, and leave this one out."""
        error = DeadlineExceeded("still writes the version before", "raise weights.deadline, or look at the disk")
        logger.warning("version left out", extra={"version": pair[1], "error": error.message})
        self._writer.refuse(pair, error)

    def close(self) -> None:
        """End the thread; a write that hangs is left to itself."""
        self._writer.stop()
        self._executor.shutdown(wait=not self.busy, cancel_futures=True)

    def _write(self, pair: Pair, base: Pair | None, snapshot: Snapshot) -> None:
        try:
            self._writer.deliver(pair, base, snapshot.tensors, snapshot.shapes)
        except Exception as error:
            # The reader of the last exception: rank 0 leaves the version out, and this rank goes on training.
            logger.exception("part of a version not written", extra={"version": pair[1]})
            self._writer.refuse(pair, error)


def make_models(config: RunConfig, ranks: Ranks) -> Models:
    """Load actor, critic and reference as configured. Collective.

    Raises:
        ConfigError: a model is missing, cannot be trained, or cannot read what the policy reads; or the algorithm is
            none.
        Unreachable: no reference server answers.
    """
    actor = Actor(config, ranks)
    critic = make_critic(config, ranks, actor) if config.learner.critic.kind == "model" else None
    return Models(actor=actor, critic=critic, reference=make_reference(config, ranks, actor))
