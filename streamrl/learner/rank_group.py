"""The ranks of a learner: orders of rank 0 as a few integers, and what every rank does, rank 0 too.

```
Leader -> RankGroup.order(command, *integers) -- broadcast --> RankWorker.execute on every rank, in its torch thread
                                               follow: the loop of the ranks above 0
```
Rank 0 has read and opened every group. It deals the samples of a micro-batch to the ranks, so the others never ask the
ledger.
"""

from __future__ import annotations

import asyncio
import heapq
import logging
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from enum import IntEnum
from functools import partial
from typing import Any, Final, ParamSpec, TypeVar, get_args

import msgspec
import numpy as np
import torch

from streamrl.config import RunConfig
from streamrl.learner.batch import RowLimits, TrainSample, work_of
from streamrl.learner.checkpoint import Checkpoints
from streamrl.learner.checkpoint_files import RankState, WriteProgress
from streamrl.learner.groups import TrainGroup
from streamrl.learner.ranks import Ranks
from streamrl.learner.reference_servers import NoReference
from streamrl.learner.sharding import ShardedModel
from streamrl.learner.step import Models, StepStats, collect, stream, update_collected, update_streamed
from streamrl.learner.weight_copy import Copies, PolicySnapshot
from streamrl.queues.device_lock import LearnerDevices

logger = logging.getLogger(__name__)


def deal(
    groups: Sequence[TrainGroup], world: int, limits: RowLimits, *, split: bool, every: bool
) -> list[list[TrainSample]]:
    """Samples of each rank: the costliest piece first, to the idlest rank (Graham 1969: at most 4/3 of the best).

    A piece is a group, which computes its prompt once; with `split` a part of a group that would be more than half the
    load of a rank. Groups without a gradient go to no rank, unless `every` one counts.
    """
    costs = [0 if group.zero_gradient else work_of(group.samples, limits) for group in groups]
    half = max(1, sum(costs) // (2 * world))
    pieces: list[tuple[int, Sequence[TrainSample]]] = []
    for group, cost in zip(groups, costs, strict=True):
        if group.zero_gradient and not every:
            continue
        parts = min(len(group.samples), max(1, -(-cost // half))) if split and world > 1 else 1
        ordered = sorted(group.samples, key=lambda sample: -sample.cost) if parts > 1 else group.samples
        cut = [ordered[first::parts] for first in range(parts)]
        pieces += [(work_of(part, limits) if cost else 0, part) for part in cut]
    shares: list[list[TrainSample]] = [[] for _ in range(world)]
    loads = [(0, rank) for rank in range(world)]
    for cost, part in sorted(pieces, key=lambda piece: -piece[0]):
        load, rank = heapq.heappop(loads)
        shares[rank] += part
        heapq.heappush(loads, (load + cost, rank))
    return shares


def scatter(ranks: Ranks, shares: Sequence[Sequence[TrainSample]]) -> Sequence[TrainSample]:
    """This rank's share; rank 0 has all of them. Collective."""
    if ranks.rank == 0:
        ranks.scatter([b"", *map(encode, shares[1:])])
        return shares[0]
    return decode(ranks.scatter(()))


def encode(samples: Sequence[TrainSample]) -> bytes:
    """An image that several samples show travels once."""
    blobs = {name: data for sample in samples for name, data in sample.blobs.items()}
    if blobs:
        samples = [replace(sample, blobs=dict.fromkeys(sample.blobs, b"")) for sample in samples]
    return msgspec.msgpack.encode((samples, blobs), enc_hook=np.ndarray.tobytes)


def decode(data: bytes) -> list[TrainSample]:
    samples, blobs = msgspec.msgpack.decode(data, type=tuple[list[TrainSample], dict[str, bytes]], dec_hook=_array)
    return [replace(one, blobs={name: blobs[name] for name in one.blobs}) if blobs else one for one in samples]


def _array(kind: Any, data: bytes) -> np.ndarray[Any, Any]:
    """An array of `kind`, which is `NDArray[...]`; writable, as torch wants it."""
    (dtype,) = get_args(get_args(kind)[1])
    return np.frombuffer(bytearray(data), dtype)


class Command(IntEnum):
    IDLE = 0  # keeps the other ranks from giving up
    LOAD = 1  # epoch, step: load this checkpoint
    TRAIN = 2  # 1 or 0, ids of groups: a micro-batch, whose samples follow (`scatter`); 1: none has a gradient
    APPLY = 3  # tokens, responses: the updates of the step
    PUBLISH = 4  # gather the weights on rank 0
    DISCARD = 5  # forget the gradients of a step that will not be finished
    SAVE = 6  # epoch, step: copy the state and begin to write this rank's shard of the checkpoint
    STOP = 8
    UNLOAD = 10  # move weights and moments to the host: engines come onto the devices
    RELOAD = 11  # bring them back
    POLL_SAVE = 12  # say whether the shard is written, or the checkpoint fetched
    FETCH_CHECKPOINT = 13  # epoch, step: begin to bring a checkpoint from a store to this host


class RankWorker:
    """One rank's models with what was trained into them; all ranks call its methods in the same order."""

    def __init__(self, config: RunConfig, ranks: Ranks, models: Models, checkpoints: Checkpoints) -> None:
        actor, weights = models.actor, config.weights
        self.step = 0
        self.count = 0  # groups whose gradients are in the weights
        self.ranks, self.recipe, self.actor = ranks, models.recipe, actor
        self._models = models
        self.checkpoints = checkpoints
        critics = {"critic": models.critic} if models.critic is not None else {}
        adapters = {"lora": actor.lora} if actor.lora is not None else {}
        kl = {"kl": models.kl} if config.learner.kl.controller == "adaptive" else {}
        self.state = RankState(ranks, {"actor": actor, **critics}, {**adapters, **kl})
        self._streams = self.recipe.streams
        self._gids: list[int] = []
        self._samples: list[TrainSample] = []  # of a step that does not stream
        self.reserved = 0  # bytes of the device that torch kept when the models had left it
        # With deltas the version before is what the next one is compared with.
        sets = 2 if weights.delta.enabled else 1
        dtype: torch.dtype = getattr(torch, weights.dtype)
        self._copies = Copies(actor.published, dtype, sets, actor.adapter)

    def execute(  # noqa: PLR0911  (one line for each order)
        self, command: Command, arguments: Sequence[int] = (), shares: Sequence[Sequence[TrainSample]] = ()
    ) -> Any:
        match command:
            case Command.LOAD:
                return self.load(*arguments)
            case Command.TRAIN:
                return self.train(arguments[1:], scatter(self.ranks, shares), idle=bool(arguments[0]))
            case Command.APPLY:
                return self.apply(*arguments)
            case Command.PUBLISH:
                return self.snapshot()
            case Command.DISCARD:
                return self.discard()
            case Command.SAVE:
                position = arguments[0], arguments[1]
                return self.state.save(self.checkpoints.draft(position), partial(self.checkpoints.send, position))
            case Command.FETCH_CHECKPOINT:
                position = arguments[0], arguments[1]
                return self.state.begin(lambda: self.checkpoints.fetch(self.checkpoints.read(position)))
            case Command.POLL_SAVE:
                return self.state.saved()
            case Command.UNLOAD:
                return self.unload()
            case Command.RELOAD:
                return self.reload()
            case Command.IDLE | Command.STOP:
                return None

    def check_samples(self, batch: Sequence[TrainSample]) -> None:
        """Raise a ValueError when a sample does not fit one of the models. Not collective."""
        for model in self._models.movable:
            if isinstance(model, ShardedModel):
                model.check_samples(batch)

    def train(self, group_ids: Sequence[int], samples: Sequence[TrainSample], *, idle: bool = False) -> bool:
        """Take in a micro-batch with the groups of all ranks; False, without effect: a rank has no reference for it."""
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
        """Apply the updates of the step, which has so many tokens and responses on all ranks."""
        with self.ranks.computing("update"):
            if self._streams:
                stats = update_streamed(self._models, tokens=tokens, responses=responses)
            else:
                stats = update_collected(self._models, sorted(self._gids), self._samples, self.step)
        if not stats.skipped:
            self.count += len(self._gids)
            self.step += 1
            if stats.updates:
                self._models.kl.update(stats.trained.mean("kl_reference"), responses)
        self._gids, self._samples = [], []
        return stats

    def discard(self) -> None:
        self._models.discard()
        self._gids, self._samples = [], []

    def snapshot(self) -> PolicySnapshot:
        """Copy the published weights to rank 0, valid until the next copy (deltas: next but one)."""
        with self.ranks.computing("copy of the weights"):
            return self._copies.take(self._models.actor.published_rows())

    def load(self, epoch: int, step: int) -> None:
        meta = self.checkpoints.read((epoch, step))
        self.state.load(self.checkpoints.path((epoch, step)), meta)
        self.step = meta.step
        self.count = meta.count

    def unload(self) -> None:
        for model in self._models.movable:
            model.to_host()
        self.reserved = self.ranks.give_back_memory()

    def reload(self) -> None:
        for model in self._models.movable:
            model.to_device()


_P = ParamSpec("_P")
_T = TypeVar("_T")
_BUSY: Final = frozenset({Command.TRAIN, Command.APPLY, Command.PUBLISH, Command.SAVE})
"""Orders whose time counts as busy."""
_NEEDS_NO_DEVICE: Final = frozenset(
    {Command.IDLE, Command.STOP, Command.POLL_SAVE, Command.FETCH_CHECKPOINT, Command.UNLOAD, Command.RELOAD}
)
_ASK_SECONDS: Final = 0.01  # first pause between two questions whether all ranks have written; it doubles
_LONGEST_ASK: Final = 1.0


class TorchThread:
    """The one thread that runs torch."""

    def __init__(self) -> None:
        self.busy: list[tuple[float, float]] = []  # intervals of computing, in `time.monotonic()`
        self._executor = ThreadPoolExecutor(1, thread_name_prefix="torch")

    async def run(self, function: Callable[_P, _T], *args: _P.args, **kwargs: _P.kwargs) -> _T:
        """Run in the thread; cancelling the caller does not stop it."""
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
        """Let engines have shared devices, because there is nothing to do."""
        if self._devices is not None:
            await self._devices.give()

    async def order(self, command: Command, *arguments: int, shares: Sequence[Sequence[TrainSample]] = ()) -> Any:
        """Have all ranks execute a command; returns what `RankWorker.execute` returns on this one."""
        if self._devices is not None and command not in _NEEDS_NO_DEVICE:
            await self._devices.take()

        # Broadcast and execution are one piece of work of the thread: a caller that is cancelled between them would
        # leave the other ranks in a collective that this one never joins.
        def execute() -> Any:
            self.worker.ranks.broadcast_ints([command, *arguments])
            self._told_at = started = time.monotonic()
            try:
                result = self.worker.execute(command, arguments, shares)
                if command in _BUSY:
                    # Crash counters are cleared next, and the time that it took is noted.
                    self.worker.ranks.finish()
                return result
            finally:
                if command in _BUSY:
                    self.torch.busy.append((started, time.monotonic()))

        return await self.torch.run(execute)

    async def train(self, groups: Sequence[TrainGroup]) -> bool:
        """Have the ranks share a micro-batch; False as of `RankWorker.train`."""
        worker, recipe = self.worker, self.worker.recipe
        shares = deal(groups, worker.ranks.world, worker.actor.limits, split=recipe.early, every=recipe.reads_all)
        idle = all(group.zero_gradient for group in groups) and not recipe.reads_all
        group_ids = [group.group_id for group in groups]
        trained: bool = await self.order(Command.TRAIN, int(idle), *group_ids, shares=shares)
        return trained

    async def saved(self) -> WriteProgress:
        """Wait until all ranks have written, or fetched, what they were ordered to, or one has failed."""
        pause = _ASK_SECONDS
        while (progress := WriteProgress(await self.order(Command.POLL_SAVE))) is WriteProgress.WRITING:
            await asyncio.sleep(pause)
            pause = min(_LONGEST_ASK, 2 * pause)
        return progress

    async def keep_alive(self, deadline: float) -> None:
        """Send `IDLE` before the other ranks give up: rank 0 may wait long for groups, Redis or a disk."""
        while True:
            await asyncio.sleep(max(0.0, self._told_at + deadline / 4 - time.monotonic()))
            if time.monotonic() >= self._told_at + deadline / 4:
                await self.order(Command.IDLE)


async def follow(worker: RankWorker, torch: TorchThread) -> None:
    """Execute the orders of rank 0 until `STOP`, also after SIGTERM: only rank 0 decides when to stop."""
    while True:
        command, *arguments = await torch.run(worker.ranks.broadcast_ints)
        if command == Command.STOP:
            return
        await torch.run(worker.execute, Command(command), arguments)
