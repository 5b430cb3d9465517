"""What every rank does of a step: its share of the groups, the update, its shard of a checkpoint.

Rank 0 decides and broadcasts a command, a few integers; ids travel, never data. Each rank reads its own groups from
Redis, and one all-reduce tells whether all have read theirs, because a rank that leaves would let the others hang in a
collective.
"""

from __future__ import annotations

import asyncio
import heapq
import logging
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from enum import IntEnum
from pathlib import Path
from typing import ParamSpec, TypeVar

import torch

from streamrl.config import RunConfig
from streamrl.errors import Refused, WeightsError
from streamrl.learner.batch import TrainSample
from streamrl.learner.chain import TrainedDigest
from streamrl.learner.checkpoint import InvalidCheckpoint, Meta, Position, read_shard, shard_name, write_shard
from streamrl.learner.groups import TrainGroup
from streamrl.learner.policy import Policy
from streamrl.learner.ranks import Ranks
from streamrl.learner.results import UpdateStats
from streamrl.learner.snapshot import Copies, Snapshot, rows_reader
from streamrl.queues.turn import LearnerSwitch

logger = logging.getLogger(__name__)
_P = ParamSpec("_P")
_T = TypeVar("_T")
NO_BASE = -1
"""Numbers of the base of a version that every rank writes whole."""
NOBODY = -1
"""Owner of a group whose gradient is exactly zero: no rank reads it."""


class Command(IntEnum):
    """What rank 0 tells the others; the integers that follow are the command's arguments."""

    IDLE = 0
    """Nothing to do; keeps the others from giving up."""
    LOAD = 1
    """epoch, step: load this checkpoint."""
    TRAIN = 2
    """gid, owner, gid, owner, ...: a micro-batch."""
    APPLY = 3
    """tokens: the update of the step."""
    PUBLISH = 4
    """epoch, version, epoch and version of the base (`NO_BASE` twice: none): write this rank's share of a version."""
    DISCARD = 5
    """Forget the gradients of a step that will not be finished."""
    SAVE = 6
    """epoch, step: write this rank's shard of the checkpoint."""
    EXPORT = 7
    """Gather the model for the final export."""
    ADOPT = 9
    """epoch, version: take this rank's rows of a pinned version as weights."""
    UNLOAD = 10
    """Move weights and moments to the host: engines come onto the devices."""
    RELOAD = 11
    """Bring them back."""
    STOP = 8
    """Leave."""


class TorchThread:
    """The one thread that runs torch; the event loop stays free for Redis meanwhile.

    `busy` collects the intervals of computing, as pairs of `time.monotonic()`.
    """

    def __init__(self) -> None:
        self.busy: list[tuple[float, float]] = []
        self._executor = ThreadPoolExecutor(1, thread_name_prefix="torch")

    async def run(self, function: Callable[_P, _T], *args: _P.args, **kwargs: _P.kwargs) -> _T:
        """Run in the thread and return its result. A cancelled caller leaves the thread to finish what it does."""
        return await asyncio.get_running_loop().run_in_executor(self._executor, lambda: function(*args, **kwargs))

    async def compute(self, function: Callable[_P, _T], *args: _P.args, **kwargs: _P.kwargs) -> _T:
        """As `run`, and count the time as busy."""
        return await self.run(self.timed, lambda: function(*args, **kwargs))

    def timed(self, function: Callable[[], _T]) -> _T:
        """Call a function, in the thread, and count the time as busy."""
        started = time.monotonic()
        try:
            return function()
        finally:
            self.busy.append((started, time.monotonic()))

    def take_busy(self) -> list[tuple[float, float]]:
        """Return the intervals collected since the last call."""
        busy, self.busy = self.busy, []
        return busy

    def close(self) -> None:
        """Wait for what runs and end the thread."""
        self._executor.shutdown()


class Trainer:
    """One rank's policy with what was trained into it.

    All methods but those that say otherwise are collective: every rank calls the same one in the same order, in its
    torch thread.

    Attributes:
        step: updates applied so far.
        digest: groups whose gradients are in the weights.
    """

    def __init__(self, config: RunConfig, ranks: Ranks, policy: Policy) -> None:
        self.step = 0
        self.digest = TrainedDigest()
        self.ranks = ranks
        self._config, self._policy = config, policy
        self._accumulated: list[int] = []
        weights = config.weights
        # With deltas the version before is what the next one is compared with.
        sets = 2 if weights.delta.enabled else 1
        self._copies = Copies(policy.parameters, getattr(torch, weights.dtype), sets)

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
            self._policy.accumulate(samples)
        self._accumulated.extend(gids)
        return True

    def misfit(self, samples: Sequence[TrainSample]) -> ValueError | None:
        """Why samples do not fit the model, None when they do; not collective."""
        return self._policy.misfit(samples)

    def apply(self, tokens: int) -> UpdateStats:
        """Apply the update of the step, normalised by `tokens` sampled tokens of all ranks."""
        stats = self._policy.apply_update(tokens)
        if not stats.skipped:
            self.digest.add(self._accumulated)
            self.step += 1
        self._accumulated.clear()
        return stats

    def discard(self) -> None:
        """Forget the gradients of a partial step."""
        self._policy.discard()
        self._accumulated.clear()

    def snapshot(self) -> Snapshot:
        """A copy of this rank's share of the weights as they are published; not collective.

        It is valid until the next one; with deltas until the one after that, which needs it no more.
        """
        return self._copies.take()

    def save(self, draft: Path, position: Position) -> bool:
        """Write this rank's shard into the draft of a checkpoint; False when some rank could not."""
        path = draft / shard_name(self.ranks.rank, self.ranks.world)
        about = {"epoch": position[0], "step": position[1], "count": self.digest.count, "digest": self.digest.hexdigest}
        try:
            write_shard(path, self._policy.shard_state(), about)
            written = 1
        except (OSError, InvalidCheckpoint) as error:
            logger.error("checkpoint shard failed", extra={"path": str(path), "error": str(error)})  # noqa: TRY400
            written = 0
        return self.ranks.all_min(written) == [1]

    def load(self, folder: Path, meta: Meta) -> None:
        """Load this rank's shard of a checkpoint.

        Raises:
            Refused: the checkpoint was written by another number of ranks.
        """
        if meta.world != self.ranks.world:
            raise Refused(
                f"{folder} was written by {meta.world} ranks, this learner has {self.ranks.world}",
                f"set learner.ranks to {meta.world}, or start afresh",
            )
        self._policy.load_shard_state(read_shard(folder / shard_name(self.ranks.rank, self.ranks.world)))
        self.step = meta.step
        self.digest = TrainedDigest(meta.count, meta.digest)

    def adopt(self, folder: Path) -> bool:
        """Take the weights of a pinned version, moments begin anew; False when some rank could not: nothing happened.

        The step goes on counting: what was trained stays trained. Call it between two steps.
        """
        rows: Callable[[str], torch.Tensor] | None = None
        try:
            rows = rows_reader(folder, self._policy.parameters)
        except (OSError, WeightsError) as error:
            logger.error("weights not taken", extra={"folder": str(folder), "error": str(error)})  # noqa: TRY400
        if self.ranks.all_min(int(rows is not None)) != [1] or rows is None:
            return False
        self._policy.adopt(rows)
        self._accumulated.clear()
        return True

    def export(self, folder: Path) -> None:
        """Write the Hugging Face directory of the trained model (rank 0)."""
        self._policy.export(folder)

    def unload(self) -> None:
        """Move weights and moments to the host; not collective. A repeat does nothing."""
        self._policy.to_host()

    def reload(self) -> None:
        """Bring them back to the device; not collective. A repeat does nothing."""
        self._policy.to_device()


class Crew:
    """Rank 0 with the other ranks behind it.

    Args:
        trainer: rank 0's share of the policy.
        torch: rank 0's torch thread.
        switch: of devices that are shared with engines; every order needs them, so it takes them. None: they are ours.
    """

    def __init__(self, trainer: Trainer, torch: TorchThread, switch: LearnerSwitch | None = None) -> None:
        self.trainer, self.torch = trainer, torch
        self._told_at = time.monotonic()
        self._switch = switch
        if switch is not None:
            switch.attach(
                load=lambda: self._give_order(Command.RELOAD, [], trainer.reload),
                unload=lambda: self._give_order(Command.UNLOAD, [], trainer.unload),
            )

    @property
    def alternates(self) -> bool:
        """Whether engines stand still while this learner works."""
        return self._switch is not None

    async def release(self) -> None:
        """There is nothing to do for now: engines may have shared devices. A repeat does nothing."""
        if self._switch is not None:
            await self._switch.give()

    async def order(
        self, command: Command, arguments: Sequence[int], part: Callable[[], _T], *, computes: bool = False
    ) -> _T:
        """Broadcast a command and do this rank's part of it; returns what the part returns.

        Both are one piece of work of the torch thread: a caller that is cancelled between them would leave the other
        ranks in a collective that this one never joins.

        Args:
            command: of which kind.
            arguments: of the command, for the other ranks.
            part: what this rank does.
            computes: whether the time of the part counts as busy.
        """
        if self._switch is not None:
            await self._switch.take()
        return await self._give_order(command, arguments, part, computes=computes)

    async def _give_order(
        self, command: Command, arguments: Sequence[int], part: Callable[[], _T], *, computes: bool = False
    ) -> _T:
        def both() -> _T:
            self._broadcast(command, *arguments)
            return self.torch.timed(part) if computes else part()

        return await self.torch.run(both)

    async def tell(self, command: Command) -> None:
        """Broadcast a command that this rank has no part in."""
        await self.torch.run(self._broadcast, command)

    async def keep_alive(self, deadline: float) -> None:
        """Break every silence well before the others give up after `deadline` seconds; runs until cancelled.

        Rank 0 may wait long without a word for groups, for Redis or for a disk.
        """
        while True:
            await asyncio.sleep(max(0.0, self._told_at + deadline / 4 - time.monotonic()))
            if time.monotonic() >= self._told_at + deadline / 4:
                await self.tell(Command.IDLE)

    def _broadcast(self, *numbers: int) -> None:
        self.trainer.ranks.broadcast_ints(numbers)
        self._told_at = time.monotonic()


def share(groups: Sequence[TrainGroup], world: int) -> list[int]:
    """Owner of each group: the costliest first, each to the rank with the least so far; `NOBODY` without a gradient.

    The bound of this rule (Graham 1969, longest processing time first) is 4/3 of the best possible maximum.
    """
    loads = [(0, rank) for rank in range(world)]
    owners = [NOBODY] * len(groups)
    for index in sorted(range(len(groups)), key=lambda place: -groups[place].cost):
        if not groups[index].zero_advantage:
            load, rank = heapq.heappop(loads)
            owners[index] = rank
            heapq.heappush(loads, (load + groups[index].cost, rank))
    return owners
