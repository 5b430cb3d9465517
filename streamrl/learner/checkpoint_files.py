"""The files of a checkpoint: one for each rank of the learner, written in the background, read by any number of ranks.

A checkpoint holds the *parts* of the learner: models (actor, critic), whose tensors are in the shards as `PART/NAME`,
and parts with numbers (adapter, KL controller), which are in `meta.json`.

Each rank has its rows of each tensor (`rows_of`), and a rank without a row leaves the name out. A tensor without
dimensions is a number that all ranks have. So any number of ranks can read what any other number wrote, without an
index of what lies where.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from enum import IntEnum
from pathlib import Path
from typing import Any, Protocol

import msgspec
import torch
from safetensors import SafetensorError, safe_open

from streamrl.errors import Refused, Unreachable
from streamrl.learner.checkpoint import CheckpointShard, InvalidCheckpoint, Meta, describe, shard_name
from streamrl.learner.ranks import Ranks, rows_of
from streamrl.learner.sharding import TrainableModel
from streamrl.weight_sync.tensors import write_tensors

logger = logging.getLogger(__name__)


# ---- one file


def write_shard(path: Path, tensors: Mapping[str, torch.Tensor]) -> CheckpointShard:
    """Write one rank's tensors, which are on the CPU, durably, read the file back, and describe it."""
    path.unlink(missing_ok=True)
    plain = [(name, tensor.detach().contiguous()) for name, tensor in tensors.items()]
    entry = write_tensors(path, plain, durable=True)
    with path.open("rb") as file:
        # Drop the pages from memory, so that the checksum is that of the disk (where the system honours it).
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    shard = CheckpointShard(entry.file, entry.bytes, entry.checksum)
    if describe(path) != shard:
        raise InvalidCheckpoint(f"{path}: what was read back is not what was written")
    return shard


# ---- this rank's share


class Numbers(Protocol):
    """A part with a few numbers that are the same on all ranks; JSON, so all must be finite."""

    def state(self) -> dict[str, Any]: ...

    def load_state(self, state: Mapping[str, Any]) -> None: ...


class WriteProgress(IntEnum):
    """How far the writing (or fetching) of shards is; the least of all ranks says how far a checkpoint is."""

    WRITING = 0
    FAILED = 1
    WRITTEN = 2


class RankState:
    """This rank's share of the checkpoints of a learner; parts have the same names on every rank."""

    def __init__(
        self, ranks: Ranks, models: Mapping[str, TrainableModel[Any]], numbers: Mapping[str, Numbers] | None = None
    ) -> None:
        self._ranks, self._models, self._numbers = ranks, models, numbers or {}
        self.parts = sorted([*self._models, *self._numbers])
        self.shards: list[CheckpointShard] = []
        self._executor = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        self._newest: Future[bool] | None = None
        self._mine: CheckpointShard | None = None

    def describe(self, meta: Meta) -> Meta:
        """Complete the meta data of a checkpoint with the parts and their numbers."""
        numbers = {name: part.state() for name, part in self._numbers.items()}
        return msgspec.structs.replace(meta, world=self._ranks.world, parts=self.parts, numbers=numbers)

    def save(self, draft: Path, send: Callable[[Path], None] | None = None) -> None:
        """Copy the state to the host and begin to write this rank's file, which `send` gets; training may go on.

        Call it between two steps, when the file before it is written or failed.
        """
        path = draft / shard_name(self._ranks.rank, self._ranks.world)
        states = {name: model.shard_state() for name, model in self._models.items()}
        tensors = {f"{name}/{key}": rows for name, state in states.items() for key, rows in state.items()}

        def write() -> None:
            self._mine = write_shard(path, tensors)
            if send is not None:
                send(path)

        self.begin(write)

    def begin(self, work: Callable[[], object]) -> None:
        """Begin work in the thread that writes files; `saved` says how far it is."""
        self._newest = self._executor.submit(_done, work)

    def saved(self) -> WriteProgress:
        """How far the newest work is on the slowest rank; `shards` describes the files. Collective, never waits."""
        if self._newest is None:
            mine = WriteProgress.FAILED
        elif not self._newest.done():
            mine = WriteProgress.WRITING
        else:
            mine = WriteProgress.WRITTEN if self._newest.result() else WriteProgress.FAILED
        slowest = WriteProgress(self._ranks.all_min(mine)[0])
        if slowest is WriteProgress.WRITTEN and self._mine is not None:
            self.shards = self._gather(self._mine)
        return slowest

    def _gather(self, mine: CheckpointShard) -> list[CheckpointShard]:
        """What all ranks wrote, in their order. Numbers travel, not files: the ranks may share no directory."""
        rank, world = self._ranks.rank, self._ranks.world
        pieces = [int(mine.checksum[start : start + 8], 16) for start in range(0, 32, 8)]
        row, nothing = [mine.bytes, *pieces], [0] * 5
        found = self._ranks.all_max(*nothing * rank, *row, *nothing * (world - rank - 1))
        rows = [found[start : start + 5] for start in range(0, len(found), 5)]
        return [
            CheckpointShard(shard_name(number, world), size, "".join(f"{piece:08x}" for piece in checksum))
            for number, (size, *checksum) in enumerate(rows)
        ]

    def load(self, folder: Path, meta: Meta) -> None:
        """Put the state of a checkpoint back, whatever number of ranks wrote it; Refused when its parts are others."""
        missing, left = sorted({*self.parts} - {*meta.parts}), sorted({*meta.parts} - {*self.parts})
        if missing or left:
            lacks, has = f"has no state of {', '.join(missing)}", f"has state of {', '.join(left)}"
            raise Refused(
                f"ckpt-{meta.name} {lacks if missing else f'{has}, which this learner does not have'}: it was written"
                " with another algorithm",
                "go on with the settings of `learner` that wrote it, or start afresh with --fresh",
            )
        with open_shards(folder, meta.world) as shards:
            tensors = shards.rows(self._ranks.rank, self._ranks.world)
        for name, model in self._models.items():
            prefix = f"{name}/"
            model.load_shard_state({k.removeprefix(prefix): v for k, v in tensors.items() if k.startswith(prefix)})
        for name, part in self._numbers.items():
            part.load_state(meta.numbers[name])


def _done(work: Callable[[], object]) -> bool:
    try:
        work()
    except (OSError, InvalidCheckpoint, Unreachable) as error:
        logger.error("checkpoint files failed", extra={"error": str(error)})  # noqa: TRY400
        return False
    return True


# ---- all files


class ShardReader:
    def __init__(self, shards: Sequence[Any]) -> None:
        self._holders: dict[str, list[Any]] = {}
        for shard in shards:
            for name in shard.keys():  # noqa: SIM118  (a file of safetensors is no mapping)
                self._holders.setdefault(name, []).append(shard)

    @property
    def names(self) -> list[str]:
        return sorted(self._holders)

    def shape(self, name: str) -> list[int]:
        shapes = [list(holder.get_slice(name).get_shape()) for holder in self._holders[name]]
        return [sum(shape[0] for shape in shapes), *shapes[0][1:]] if shapes[0] else []

    def read(self, name: str, rows: slice | None = None) -> torch.Tensor:
        """Rows of a tensor, all of them when None; a tensor without dimensions whole."""
        holders = self._holders[name]
        if not holders[0].get_slice(name).get_shape():
            number: torch.Tensor = holders[0].get_tensor(name)
            return number
        pieces, first = [], 0
        for holder in holders:
            stored = holder.get_slice(name)
            count = stored.get_shape()[0]
            begin, end = (0, count) if rows is None else (max(0, rows.start - first), min(count, rows.stop - first))
            if begin < end:
                pieces.append(stored[begin:end])
            first += count
        return pieces[0] if len(pieces) == 1 else torch.cat(pieces)

    def rows(self, rank: int, world: int) -> dict[str, torch.Tensor]:
        """The tensors of one of `world` ranks, whatever number of ranks wrote them."""
        tensors = {}
        for name in self.names:
            shape = self.shape(name)
            mine = rows_of(shape[0], rank, world) if shape else None
            if mine is None or mine.start < mine.stop:
                tensors[name] = self.read(name, mine)
        return tensors


@contextmanager
def open_shards(folder: Path, world: int) -> Iterator[ShardReader]:
    """The files of a checkpoint that `world` ranks wrote; InvalidCheckpoint when one is missing or damaged."""
    with ExitStack() as files:
        shards = []
        for rank in range(world):
            path = folder / shard_name(rank, world)
            try:
                shards.append(files.enter_context(safe_open(path, framework="pt")))
            except (SafetensorError, OSError) as error:
                raise InvalidCheckpoint(f"{path}: {error}") from error
        yield ShardReader(shards)
