"""The ranks of a learner: orders of rank 0 as a few integers, and what every rank does, rank 0 too.

```
Leader -> RankGroup.order(command, *integers) -- broadcast --> RankWorker.execute on every rank, in its torch thread
                                               follow: the loop of the ranks above 0
```
Ids travel, never data. Each rank reads its own groups from Redis, and one all-reduce tells whether all have read
theirs, because a rank that leaves would let the others hang in a collective.
"""

from __future__ import annotations

import asyncio
import heapq
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from enum import IntEnum
from functools import partial
from typing import Any, Final, ParamSpec, TypeVar

import torch

from streamrl.config import RunConfig
from streamrl.learner.batch import TrainSample
from streamrl.learner.checkpoint import read_meta
from streamrl.learner.checkpoint_files import Part, RankFiles, RankState, WriteProgress
from streamrl.learner.groups import GroupOpener, TrainGroup, Unusable
from streamrl.learner.lineage import TrainedDigest
from streamrl.learner.ranks import Ranks
from streamrl.learner.reference_servers import NoReference
from streamrl.learner.step import Models, StepStats, collect, stream, update_collected, update_streamed
from streamrl.learner.weight_copy import Copies, PolicySnapshot
from streamrl.queues.device_lock import LearnerDevices
from streamrl.queues.ledger import Ledger

logger = logging.getLogger(__name__)
NOBODY = -1
"""Owner of a group whose gradient is exactly zero: no rank reads it."""


class Command(IntEnum):
    IDLE = 0
    """Nothing to do; keeps the others from giving up."""
    LOAD = 1
    """epoch, step: load this checkpoint."""
    TRAIN = 2
    """A `MicrobatchOrder`."""
    APPLY = 3
    """tokens, responses: the updates of the step."""
    PUBLISH = 4
    """Gather the weights on rank 0."""
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
    """Say whether the shard is written, or the checkpoint brought."""
    BRING = 13
    """epoch, step: begin to bring a checkpoint to hosts that do not share rank 0's run directory."""


@dataclass(frozen=True, slots=True)
class MicrobatchOrder:
    """The arguments of `Command.TRAIN`."""

    owners: Mapping[int, int]  # rank that has each group, by id, or `NOBODY`
    steps: Mapping[int, int]  # of every version that sampled tokens of these groups: all ranks need the tokens' ages

    def encode(self) -> list[int]:
        pairs = [*self.owners.items(), *self.steps.items()]
        return [len(self.owners), *(number for pair in pairs for number in pair)]

    @classmethod
    def decode(cls, numbers: Sequence[int]) -> MicrobatchOrder:
        pairs = list(zip(numbers[1::2], numbers[2::2], strict=True))
        return cls(dict(pairs[: numbers[0]]), dict(pairs[numbers[0] :]))

    def step_of(self, version: int) -> int:
        if version not in self.steps:
            raise ValueError(f"rank 0 found no token of version {version} in this group")
        return self.steps[version]

    @property
    def idle(self) -> bool:
        return max(self.owners.values()) < 0


class RankWorker:
    """One rank's models with what was trained into them.

    Methods are collective unless they say otherwise: every rank calls the same one in the same order, in its torch
    thread. A step is streamed or collected, as its recipe says (step.py).
    """

    def __init__(self, config: RunConfig, ranks: Ranks, models: Models, files: RankFiles) -> None:
        actor, weights = models.actor, config.weights
        self.step = 0
        self.digest = TrainedDigest()
        self.ranks, self.recipe, self.actor = ranks, models.recipe, actor
        self._models = models
        self.files = files
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
        dtype: torch.dtype = getattr(torch, weights.dtype)
        self._copies = Copies(actor.published, dtype, sets, actor.adapter)

    def execute(  # noqa: PLR0911  (one line for each order)
        self, command: Command, arguments: Sequence[int] = (), samples: Sequence[TrainSample] | None = None
    ) -> Any:
        match command:
            case Command.LOAD:
                return self.load(*arguments)
            case Command.TRAIN:
                order = MicrobatchOrder.decode(arguments)
                return self.train(list(order.owners), samples, idle=order.idle)
            case Command.APPLY:
                return self.apply(*arguments)
            case Command.PUBLISH:
                return self.snapshot()
            case Command.DISCARD:
                return self.discard()
            case Command.SAVE:
                position = arguments[0], arguments[1]
                return self.state.save(self.files.draft(position), partial(self.files.send, position))
            case Command.BRING:
                return self.state.begin(partial(self.files.bring, (arguments[0], arguments[1])))
            case Command.SAVED:
                return self.state.saved()
            case Command.UNLOAD:
                return self.unload()
            case Command.RELOAD:
                return self.reload()
            case Command.IDLE | Command.STOP:
                return None

    def train(self, group_ids: Sequence[int], samples: Sequence[TrainSample] | None, *, idle: bool = False) -> bool:
        """Take in one micro-batch. Returns False, without effect, if any rank lacks its samples or reference log-probs.

        `group_ids` are those of all ranks, `samples` this rank's share (None: could not be read). With `idle`, no group
        of the micro-batch has a gradient, so no rank runs the model.
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
        self._gids.extend(group_ids)
        return True

    def apply(self, tokens: int, responses: int) -> StepStats:
        """Apply the updates of the step, which has so many sampled tokens and responses on all ranks."""
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
        self._models.discard()
        self._gids, self._samples = [], []

    def snapshot(self) -> PolicySnapshot:
        """Copy the published weights to rank 0. The copy stays valid until the next one (deltas: next but one)."""
        with self.ranks.computing("copy of the weights"):
            return self._copies.take(self._models.actor.published_rows())

    def load(self, epoch: int, step: int) -> None:
        folder = self.files.folder((epoch, step))
        meta = read_meta(folder)
        self.state.load(folder, meta)
        self.step = meta.step
        self.digest = TrainedDigest(meta.count, meta.digest)

    def unload(self) -> None:
        """Move weights and moments to the host; not collective. A repeat does nothing."""
        for model in self._models.movable:
            model.to_host()
        self.ranks.give_back_memory()

    def reload(self) -> None:
        """Bring them back to the device; not collective. A repeat does nothing."""
        for model in self._models.movable:
            model.to_device()


_P = ParamSpec("_P")
_T = TypeVar("_T")
_BUSY: Final = frozenset({Command.TRAIN, Command.APPLY, Command.PUBLISH, Command.SAVE})
"""Orders whose time counts as busy."""
_NEEDS_NO_DEVICE: Final = frozenset(
    {Command.IDLE, Command.STOP, Command.SAVED, Command.BRING, Command.UNLOAD, Command.RELOAD}
)
_ASK_SECONDS: Final = 0.01
"""First pause between two questions whether all ranks have written; it doubles."""
_LONGEST_ASK: Final = 1.0


class TorchThread:
    """The one thread that runs torch. `busy` are its intervals of computing, in `time.monotonic()`."""

    def __init__(self) -> None:
        self.busy: list[tuple[float, float]] = []
        self._executor = ThreadPoolExecutor(1, thread_name_prefix="torch")

    async def run(self, function: Callable[_P, _T], *args: _P.args, **kwargs: _P.kwargs) -> _T:
        """Run in the thread and return its result. Cancelling the caller does not stop the thread's work."""
        return await asyncio.get_running_loop().run_in_executor(self._executor, lambda: function(*args, **kwargs))

    def take_busy(self) -> list[tuple[float, float]]:
        busy, self.busy = self.busy, []
        return busy

    def close(self) -> None:
        self._executor.shutdown()


class RankGroup:
    """Rank 0 with the other ranks behind it; `devices` are those shared with engines, None: none are shared."""

    def __init__(self, worker: RankWorker, torch: TorchThread, devices: LearnerDevices | None = None) -> None:
        self.worker, self.torch = worker, torch
        self._told_at = time.monotonic()
        self._devices = devices
        if devices is not None:
            devices.attach(load=lambda: self.order(Command.RELOAD), unload=lambda: self.order(Command.UNLOAD))

    @property
    def alternates(self) -> bool:
        """Whether engines stand still while this learner works."""
        return self._devices is not None

    async def release(self) -> None:
        """Let engines have shared devices, because there is nothing to do. A repeat does nothing."""
        if self._devices is not None:
            await self._devices.give()

    async def order(self, command: Command, *arguments: int, samples: Sequence[TrainSample] | None = None) -> Any:
        """Have all ranks execute a command; returns what `RankWorker.execute` returns on this one.

        Broadcast and execution are one piece of work of the torch thread: a caller that is cancelled between them would
        leave the other ranks in a collective that this one never joins.
        """
        if self._devices is not None and command not in _NEEDS_NO_DEVICE:
            await self._devices.take()

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
        """Have the ranks share a micro-batch. False, without effect on any rank, when one could not."""
        all_read = self.worker.recipe.reads_all
        owners = share(groups, self.worker.ranks.world, self.worker.actor.work, all_read=all_read)
        order = MicrobatchOrder(
            {group.group_id: owner for group, owner in zip(groups, owners, strict=True)},
            {version: step for group in groups for version, step in group.versions.items()},
        )
        mine = [sample for group in groups if order.owners[group.group_id] == 0 for sample in group.samples]
        trained: bool = await self.order(Command.TRAIN, *order.encode(), samples=mine)
        return trained

    async def saved(self) -> WriteProgress:
        """Wait until all ranks have written, or brought, what they were ordered to, or one of them has failed."""
        pause = _ASK_SECONDS
        while (progress := WriteProgress(await self.order(Command.SAVED))) is WriteProgress.WRITING:
            await asyncio.sleep(pause)
            pause = min(_LONGEST_ASK, 2 * pause)
        return progress

    async def keep_alive(self, deadline: float) -> None:
        """Send `IDLE` before the other ranks give up: rank 0 may wait long for groups, Redis or a disk."""
        while True:
            await asyncio.sleep(max(0.0, self._told_at + deadline / 4 - time.monotonic()))
            if time.monotonic() >= self._told_at + deadline / 4:
                await self.order(Command.IDLE)


async def follow(worker: RankWorker, torch: TorchThread, ledger: Ledger) -> None:
    """Execute the orders of rank 0 until `STOP`, also after SIGTERM: only rank 0 decides when to stop."""
    opener = GroupOpener(worker.recipe, worker.actor.check_samples)
    while True:
        command, *arguments = await torch.run(worker.ranks.broadcast_ints)
        if command == Command.STOP:
            return
        samples = None
        if command == Command.TRAIN:
            samples = await read_share(MicrobatchOrder.decode(arguments), worker.ranks.rank, ledger, opener)
        await torch.run(worker.execute, Command(command), arguments, samples)


async def read_share(
    order: MicrobatchOrder, rank: int, ledger: Ledger, opener: GroupOpener
) -> list[TrainSample] | None:
    """The samples of a rank's groups; None when one of them is gone or cannot be opened."""
    mine = [group_id for group_id, owner in order.owners.items() if owner == rank]
    async with asyncio.TaskGroup() as tasks:
        reads = [tasks.create_task(ledger.read_group(group_id)) for group_id in mine]
    samples: list[TrainSample] = []
    for group_id, read in zip(mine, reads, strict=True):
        closed = read.result()
        if closed is None:
            logger.warning("group is not there", extra={"group": group_id})
            return None
        try:
            samples.extend(opener(closed, order.step_of).samples)
        except Unusable as error:
            logger.warning("group cannot be read", extra={"group": group_id, "error": str(error)})
            return None
    return samples


def share(
    groups: Sequence[TrainGroup], world: int, work: Callable[[Sequence[TrainSample]], int], *, all_read: bool
) -> list[int]:
    """Owner of each group, `NOBODY` without a gradient (unless `all_read`): the costliest first, to the idlest rank.

    The bound of this rule (Graham 1969, longest processing time first) is 4/3 of the best possible maximum.
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
