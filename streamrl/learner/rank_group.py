"""Rank 0 and the ranks behind it: one torch thread each, orders as a few integers, who computes which group."""

from __future__ import annotations

import asyncio
import heapq
import logging
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final, ParamSpec, TypeVar

from streamrl.learner.batch import TrainSample
from streamrl.learner.groups import GroupOpener, TrainGroup, Unusable
from streamrl.learner.rank_worker import NOBODY, Command, MicrobatchOrder, RankWorker
from streamrl.queues.ledger import Ledger
from streamrl.queues.turn import LearnerSwitch

logger = logging.getLogger(__name__)
_P = ParamSpec("_P")
_T = TypeVar("_T")
_BUSY: Final = frozenset({Command.TRAIN, Command.APPLY, Command.PUBLISH})
"""Orders whose time counts as busy."""
_NEEDS_NO_DEVICE: Final = frozenset({Command.IDLE, Command.STOP, Command.SAVED, Command.UNLOAD, Command.RELOAD})


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

    def take_busy(self) -> list[tuple[float, float]]:
        """Return the intervals collected since the last call."""
        busy, self.busy = self.busy, []
        return busy

    def close(self) -> None:
        """Wait for what runs and end the thread."""
        self._executor.shutdown()


class RankGroup:
    """Rank 0 with the other ranks behind it.

    Args:
        worker: rank 0's share of the work.
        torch: rank 0's torch thread.
        switch: of devices that are shared with engines; orders that need them take them. None: they are ours.
    """

    def __init__(self, worker: RankWorker, torch: TorchThread, switch: LearnerSwitch | None = None) -> None:
        self.worker, self.torch = worker, torch
        self._told_at = time.monotonic()
        self._switch = switch
        if switch is not None:
            switch.attach(load=lambda: self.order(Command.RELOAD), unload=lambda: self.order(Command.UNLOAD))

    @property
    def alternates(self) -> bool:
        """Whether engines stand still while this learner works."""
        return self._switch is not None

    async def release(self) -> None:
        """There is nothing to do for now: engines may have shared devices. A repeat does nothing."""
        if self._switch is not None:
            await self._switch.give()

    async def order(self, command: Command, *arguments: int, samples: Sequence[TrainSample] | None = None) -> Any:
        """Have all ranks execute a command; returns what `RankWorker.execute` returns on this one.

        Broadcast and execution are one piece of work of the torch thread: a caller that is cancelled between them would
        leave the other ranks in a collective that this one never joins.

        Args:
            command: what to do.
            arguments: of the command.
            samples: of a micro-batch, those of this rank.
        """
        if self._switch is not None and command not in _NEEDS_NO_DEVICE:
            await self._switch.take()

        def execute() -> Any:
            self.worker.ranks.broadcast_ints([command, *arguments])
            self._told_at = started = time.monotonic()
            try:
                return self.worker.execute(command, arguments, samples)
            finally:
                if command in _BUSY:
                    self.torch.busy.append((started, time.monotonic()))

        return await self.torch.run(execute)

    async def train(self, groups: Sequence[TrainGroup]) -> bool:
        """Have the ranks share a micro-batch. False when a rank could not: then none did anything."""
        all_read = self.worker.recipe.reads_all
        owners = share(groups, self.worker.ranks.world, self.worker.work, all_read=all_read)
        order = MicrobatchOrder(
            {group.gid: owner for group, owner in zip(groups, owners, strict=True)},
            {version: step for group in groups for version, step in group.versions.items()},
        )
        mine = [sample for group in groups if order.owners[group.gid] == 0 for sample in group.samples]
        trained: bool = await self.order(Command.TRAIN, *order.encode(), samples=mine)
        return trained

    async def keep_alive(self, deadline: float) -> None:
        """Break every silence well before the others give up after `deadline` seconds; runs until cancelled.

        Rank 0 may wait long without a word for groups, for Redis or for a disk.
        """
        while True:
            await asyncio.sleep(max(0.0, self._told_at + deadline / 4 - time.monotonic()))
            if time.monotonic() >= self._told_at + deadline / 4:
                await self.order(Command.IDLE)


async def follow(worker: RankWorker, torch: TorchThread, ledger: Ledger) -> None:
    """Execute the orders of rank 0 on another rank until `STOP`; rank 0 alone decides when, also on SIGTERM.

    Args:
        worker: this rank's share of the work.
        torch: this rank's torch thread.
        ledger: the training ledger, only read.

    Raises:
        DeadlineExceeded: rank 0 said nothing for `learner.collective_deadline`.
        Unreachable: another rank is gone.
    """
    opener = GroupOpener(worker.recipe, worker.misfit)
    try:
        while True:
            command, *arguments = await torch.run(worker.ranks.broadcast_ints)
            if command == Command.STOP:
                return
            samples = None
            if command == Command.TRAIN:
                samples = await read_share(MicrobatchOrder.decode(arguments), worker.ranks.rank, ledger, opener)
            await torch.run(worker.execute, Command(command), arguments, samples)
    finally:
        worker.close()


async def read_share(
    order: MicrobatchOrder, rank: int, ledger: Ledger, opener: GroupOpener
) -> list[TrainSample] | None:
    """The samples of a rank's groups; None when one of them is not there (any more)."""
    mine = [gid for gid, owner in order.owners.items() if owner == rank]
    async with asyncio.TaskGroup() as tasks:
        reads = [tasks.create_task(ledger.read_group(gid)) for gid in mine]
    samples: list[TrainSample] = []
    for gid, read in zip(mine, reads, strict=True):
        closed = read.result()
        if closed is None:
            logger.warning("group is not there", extra={"group": gid})
            return None
        try:
            samples.extend(opener(closed, order.step_of).samples)
        except Unusable as error:
            logger.warning("group cannot be read", extra={"group": gid, "error": str(error)})
            return None
    return samples


def share(
    groups: Sequence[TrainGroup], world: int, work: Callable[[Sequence[TrainSample]], int], *, all_read: bool
) -> list[int]:
    """Owner of each group: the costliest first, each to the rank with the least so far; `NOBODY` without a gradient.

    The bound of this rule (Graham 1969, longest processing time first) is 4/3 of the best possible maximum.

    Args:
        groups: of one micro-batch.
        world: ranks.
        work: of the samples of a group, in any unit (`RowModel.work`).
        all_read: every group needs a rank that reads it, also one without a gradient (`Recipe.reads_all`).
    """
    loads = [(0, rank) for rank in range(world)]
    owners = [NOBODY] * len(groups)
    costs = [0 if group.zero_gradient else work(group.samples) for group in groups]
    for index in sorted(range(len(groups)), key=lambda place: -costs[place]):
        if all_read or not groups[index].zero_gradient:
            load, rank = heapq.heappop(loads)
            owners[index] = rank
            heapq.heappush(loads, (load + costs[index], rank))
    return owners
