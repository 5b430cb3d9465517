"""The files of a checkpoint: one safetensors file for each rank, and reading them on any number of ranks.

The state of a learner is a table of tensors by name, in which each rank has its rows: a tensor is split on its first
dimension in equal pieces, the last ones shorter or empty (as FSDP2 does it), and a rank without a row leaves the name
out. A tensor without dimensions is a number that all ranks have. So the rows of any rank of any number of ranks can be
read from the files of any other number, without a file that says where they are.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from enum import IntEnum
from pathlib import Path
from typing import Any

import msgspec
import torch
from safetensors import SafetensorError, safe_open

from streamrl.learner.checkpoint import InvalidCheckpoint, Shard, describe, shard_name
from streamrl.learner.snapshot import rows_of
from streamrl.weight_sync.tensors import write_tensors

logger = logging.getLogger(__name__)


def write_shard(path: Path, tensors: Mapping[str, torch.Tensor]) -> Shard:
    """Write one rank's tensors durably, read the file back, and describe it in a note beside it (`NAME.json`).

    Args:
        path: file to write; it may exist from an attempt that failed.
        tensors: this rank's tensors, on the CPU. Nobody may write to them meanwhile.

    Raises:
        OSError: the disk is full or broken.
        InvalidCheckpoint: what was read back is not what was written.
    """
    path.unlink(missing_ok=True)
    plain = [(name, tensor.detach().contiguous()) for name, tensor in tensors.items()]
    entry = write_tensors(path, plain, durable=True)
    with path.open("rb") as file:
        # The checksum is to be that of the disk, where the system lets us ask for it.
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    shard = Shard(entry.file, entry.bytes, entry.checksum)
    if describe(path) != shard:
        raise InvalidCheckpoint(f"{path}: what was read back is not what was written")
    _note(path).write_bytes(msgspec.json.encode(shard))
    return shard


def take_notes(draft: Path, world: int) -> list[Shard]:
    """What all ranks said of their files, by rank; the notes are removed.

    Raises:
        OSError: a note is missing.
        InvalidCheckpoint: a note is none, or its file is not there in full.
    """
    shards = []
    for rank in range(world):
        path = draft / shard_name(rank, world)
        try:
            shard = msgspec.json.decode(_note(path).read_bytes(), type=Shard)
        except msgspec.MsgspecError as error:
            raise InvalidCheckpoint(f"{_note(path)}: {error}") from error
        if (shard.file, shard.bytes) != (path.name, path.stat().st_size):
            raise InvalidCheckpoint(f"{path} is not what its rank has written")
        shards.append(shard)
    for shard in shards:
        _note(draft / shard.file).unlink()
    return shards


def _note(path: Path) -> Path:
    return path.with_suffix(".json")


class Progress(IntEnum):
    """How far the writing of a shard is; the least of all ranks says how far a checkpoint is."""

    WRITING = 0
    FAILED = 1
    WRITTEN = 2


class ShardWriter:
    """Writes this rank's shards in a thread of its own while training goes on, one after the other."""

    def __init__(self) -> None:
        self._executor = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        self._newest: Future[bool] | None = None

    def start(self, path: Path, tensors: Mapping[str, torch.Tensor]) -> None:
        """Begin to write a shard; the tensors are kept until it is written. Arguments as of `write_shard`."""
        self._newest = self._executor.submit(_written, path, tensors)

    def progress(self) -> Progress:
        """How far the newest shard is."""
        if self._newest is None:
            return Progress.FAILED
        if not self._newest.done():
            return Progress.WRITING
        return Progress.WRITTEN if self._newest.result() else Progress.FAILED


def _written(path: Path, tensors: Mapping[str, torch.Tensor]) -> bool:
    try:
        write_shard(path, tensors)
    except (OSError, InvalidCheckpoint) as error:
        logger.error("checkpoint shard failed", extra={"path": str(path), "error": str(error)})  # noqa: TRY400
        return False
    return True


class ShardReader:
    """The state in the files of a checkpoint, tensor by tensor.

    Args:
        shards: open files, by rank.
    """

    def __init__(self, shards: Sequence[Any]) -> None:
        self._holders: dict[str, list[Any]] = {}
        for shard in shards:
            for name in shard.keys():  # noqa: SIM118  (a file of safetensors is no mapping)
                self._holders.setdefault(name, []).append(shard)

    @property
    def names(self) -> list[str]:
        """Names of all tensors, sorted."""
        return sorted(self._holders)

    def shape(self, name: str) -> list[int]:
        """Shape of the whole tensor."""
        shapes = [list(holder.get_slice(name).get_shape()) for holder in self._holders[name]]
        return [sum(shape[0] for shape in shapes), *shapes[0][1:]] if shapes[0] else []

    def read(self, name: str, rows: slice | None = None) -> torch.Tensor:
        """Rows of a tensor on the CPU, all of them when None; a tensor without dimensions whole."""
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
    """Open the files of a checkpoint that `world` ranks wrote, for the length of the block.

    Raises:
        InvalidCheckpoint: a file is missing or no safetensors file.
    """
    with ExitStack() as files:
        shards = []
        for rank in range(world):
            path = folder / shard_name(rank, world)
            try:
                shards.append(files.enter_context(safe_open(path, framework="pt")))
            except (SafetensorError, OSError) as error:
                raise InvalidCheckpoint(f"{path}: {error}") from error
        yield ShardReader(shards)
