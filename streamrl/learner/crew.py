"""Rank 0 and the ranks behind it: orders as a few integers, one torch thread, who computes which group."""

from __future__ import annotations

import asyncio
import heapq
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from enum import IntEnum
from typing import ParamSpec, TypeVar

from streamrl.learner.batch import TrainSample
from streamrl.learner.groups import TrainGroup
from streamrl.learner.steps import Trainer
from streamrl.queues.device_lock import LearnerDevices

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
    """tokens, responses: the updates of the step."""
    PUBLISH = 4
    """epoch, version, epoch and version of the base (`NO_BASE` twice: none): write this rank's share of a version."""
    DISCARD = 5
    """Forget the gradients of a step that will not be finished."""
    SAVE = 6
    """epoch, step: copy the state and begin to write this rank's shard of the checkpoint."""
    SAVED = 12
    """Say whether the shard is written."""
    EXPORT = 7
    """Gather the model for the final export."""
    UNLOAD = 10
    """Move weights and moments to the host: engines come onto the devices."""
    RELOAD = 11
    """Bring them back."""
    HISTORY = 13
    """version, step, version, step, ...: of the surviving branch, so that every rank knows the ages of tokens."""
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


class Crew:
    """Rank 0 with the other ranks behind it.

    Args:
        trainer: rank 0's share of the policy.
        torch: rank 0's torch thread.
        switch: of devices that are shared with engines; every order needs them, so it takes them. None: they are ours.
    """

    def __init__(self, trainer: Trainer, torch: TorchThread, switch: LearnerDevices | None = None) -> None:
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

    async def ask(self, command: Command, part: Callable[[], _T]) -> _T:
        """As `order`, for a question that needs no device; any task may ask at any time."""
        return await self._give_order(command, [], part)

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


def share(
    groups: Sequence[TrainGroup], world: int, work: Callable[[Sequence[TrainSample]], int], *, all_read: bool
) -> list[int]:
    """Owner of each group: the costliest first, each to the rank with the least so far; `NOBODY` without a gradient.

    The bound of this rule (Graham 1969, longest processing time first) is 4/3 of the best possible maximum.

    Args:
        groups: of one micro-batch.
        world: ranks.
        work: of the samples of a group, in any unit (`ShardedModule.work`).
        all_read: every group needs a rank that reads it, also one without a gradient (`Recipe.reads_all`).
    """
    loads = [(0, rank) for rank in range(world)]
    owners = [NOBODY] * len(groups)
    costs = [0 if group.flat else work(group.samples) for group in groups]
    for index in sorted(range(len(groups)), key=lambda place: -costs[place]):
        if all_read or not groups[index].flat:
            load, rank = heapq.heappop(loads)
            owners[index] = rank
            heapq.heappush(loads, (load + costs[index], rank))
    return owners
