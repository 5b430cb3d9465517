"""One rank's own files of a version: full values, or only what changed since the version it wrote last.

```
rank 0:       makes the draft folder ---------------------- own files -- waits for all reports -> manifest -> rename
rank 1 ..:    waits for the draft folder -> own files -> part-RRR.json
```
No rank reads or waits for the tensors of another; only rank 0 waits, and only until its deadline.
"""

from __future__ import annotations

import logging
import math
import os
import threading
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Final, Literal, TypeAlias

import msgspec
import torch

from streamrl.atomic import write_whole
from streamrl.config import WeightsConfig
from streamrl.errors import CannotCreate, DeadlineExceeded, StreamrlError, WeightsError
from streamrl.weight_sync import delta
from streamrl.weight_sync.files import SLACK_BYTES, check_room, short_hash, store_of, take_spare
from streamrl.weight_sync.manifest import Pair, Shard
from streamrl.weight_sync.tensors import DTYPE_NAMES, raw_bytes, write_tensors

logger = logging.getLogger(__name__)
DRAFT: Final = ".draft-"
_LONGEST_LOOK: Final = 0.05

Named: TypeAlias = tuple[str, torch.Tensor]
ErrorKind = Literal["", "CannotCreate", "DeadlineExceeded", "WeightsError"]
_ERRORS: Final[Mapping[ErrorKind, type[StreamrlError]]] = {
    "CannotCreate": CannotCreate,
    "DeadlineExceeded": DeadlineExceeded,
    "WeightsError": WeightsError,
}


class RankPart(msgspec.Struct, frozen=True, forbid_unknown_fields=True, array_like=True):
    name: str
    dtype: str  # of safetensors
    shape: list[int]  # of these rows
    whole: list[int]  # shape of the whole tensor
    shard: int  # number of the rank's file
    hash: str  # xxh3-64 of the bytes; empty in a run without deltas


class RankReport(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """What one rank wrote of one version, or why it could not."""

    rank: int
    shards: list[Shard] = []
    parts: list[RankPart] = []
    elements: int = 0  # values that it holds
    changed: int | None = None  # values that differ from the version before; None: it did not compare
    error: ErrorKind = ""  # empty when all is written
    message: str = ""
    hint: str = ""


_decoder: Final = msgspec.json.Decoder(RankReport)


class RankWriter:
    """Writes what one rank holds of each version; used from one thread, but for `stop`."""

    def __init__(self, config: WeightsConfig, run_dir: Path, rank: int) -> None:
        self._config, self._rank = config, rank
        self._store = store_of(config.transport, run_dir)
        self._dtype = torch.bfloat16 if config.dtype == "bfloat16" else torch.float32
        self._written: Pair | None = None
        self._last: dict[str, torch.Tensor] = {}
        self._stopped = threading.Event()

    def stop(self) -> None:
        """End every wait of the other thread with an error; for a process that is about to leave."""
        self._stopped.set()

    def write(
        self,
        pair: Pair,
        base: Pair | None,
        tensors: Iterable[Named],
        shapes: Mapping[str, Sequence[int]],
        *,
        until: float,
    ) -> RankReport:
        """Write this rank's files into the draft folder of a version.

        Floating tensors are cast to the configured dtype. Without deltas tensors are taken one by one, and at most one
        shard of them is held. After a failure, files stay until the draft is removed; the draft may be gone. The clock
        (`until`, monotonic) is checked between shards only. Arguments and errors as of `Publisher.publish`.
        """
        draft = self._store.root / draft_name(pair)
        cast = self._cast(tensors)
        whole = dict(cast) if self._config.delta.enabled else {}
        changed = self._changed(base, whole)
        as_delta = changed is not None and changed <= self._config.delta.max_density * _elements(whole)
        self._written = None  # until all of it is
        shards: list[Shard] = []
        parts: list[RankPart] = []
        for bucket in buckets(whole.items() if self._config.delta.enabled else cast, self._config.shard_bytes):
            if time.monotonic() > until or self._stopped.is_set():
                raise out_of_time(draft, self._config.deadline)
            path = draft / f"r{self._rank:03}-{len(shards):05}.safetensors"
            parts.extend(self._part(name, tensor, shapes, len(shards)) for name, tensor in bucket)
            shards.append(self._delta(path, bucket) if as_delta else self._full(path, bucket))
        self._last = whole
        self._written = pair
        count = sum(math.prod(part.shape) for part in parts)
        return RankReport(rank=self._rank, shards=shards, parts=parts, elements=count, changed=changed)

    def deliver(
        self, pair: Pair, base: Pair | None, tensors: Iterable[Named], shapes: Mapping[str, Sequence[int]]
    ) -> bool:
        """As `write`, for a rank other than 0: waits for the draft folder, and reports to rank 0, errors too.

        False: the version was not written; that is logged, and no error of the weights ends this rank.
        """
        until = time.monotonic() + self._config.deadline
        try:
            wait_for(self._store.root, draft_name(pair), until, self._stopped)
        except (OSError, StreamrlError) as error:
            return self._failed(pair, error)
        try:
            report = self.write(pair, base, tensors, shapes, until=until)
        except (OSError, StreamrlError) as error:
            self._remove_own(pair)
            self.refuse(pair, error)
            return self._failed(pair, error)
        try:
            write_report(self._store.root / draft_name(pair), report)
        except OSError as error:
            return self._failed(pair, error)
        return True

    def refuse(self, pair: Pair, error: Exception) -> None:
        """Tell rank 0 not to wait for this rank's files of a version. Safe in any thread."""
        kind: ErrorKind = "CannotCreate"
        for name, family in _ERRORS.items():
            if isinstance(error, family):
                kind = name
        message, hint = (error.message, error.hint) if isinstance(error, StreamrlError) else (str(error), "")
        report = RankReport(rank=self._rank, error=kind, message=f"rank {self._rank}: {message}", hint=hint)
        try:
            write_report(self._store.root / draft_name(pair), report)
        except OSError as problem:
            logger.warning("rank 0 not told", extra={"version": pair[1], "error": str(problem)})

    def _changed(self, base: Pair | None, tensors: Mapping[str, torch.Tensor]) -> int | None:
        """Values that differ from those of the base; None when no delta against it is possible."""
        if base is None or base != self._written or list(tensors) != list(self._last):
            return None
        pairs = [(self._last[name], tensor) for name, tensor in tensors.items()]
        if any(old.shape != new.shape or old.dtype != new.dtype for old, new in pairs):
            return None
        return sum(delta.changed(old, new) for old, new in pairs)

    def _full(self, path: Path, bucket: Sequence[Named]) -> Shard:
        here = take_spare(spare_of(path.parent) / path.name, path)
        need = sum(tensor.nbytes for _, tensor in bucket) + SLACK_BYTES
        check_room(self._store, max(SLACK_BYTES, need - (here or 0)))
        return write_tensors(path, bucket, durable=self._store.durable, over=here is not None)

    def _delta(self, path: Path, bucket: Sequence[Named]) -> Shard:
        encoded = {name: delta.encode(self._last[name], tensor) for name, tensor in bucket}
        found = {name: changes for name, changes in encoded.items() if changes is not None}
        check_room(self._store, sum(changes.bytes for changes in found.values()) + SLACK_BYTES)
        return delta.write_delta_shard(path, found, durable=self._store.durable)

    def _part(self, name: str, tensor: torch.Tensor, shapes: Mapping[str, Sequence[int]], shard: int) -> RankPart:
        proof = short_hash(raw_bytes(tensor)) if self._config.delta.enabled else ""
        whole = list(shapes.get(name, tensor.shape))
        return RankPart(name, DTYPE_NAMES[tensor.dtype], list(tensor.shape), whole, shard, proof)

    def _cast(self, tensors: Iterable[Named]) -> Iterable[Named]:
        names: set[str] = set()
        for name, tensor in tensors:
            if name in names:
                raise WeightsError(f"tensor {name} was given twice")
            names.add(name)
            if tensor.dtype not in DTYPE_NAMES:
                raise WeightsError(f"tensor {name} has dtype {tensor.dtype}, which cannot be published")
            cast = tensor.detach().to(self._dtype) if tensor.is_floating_point() else tensor.detach()
            yield name, cast.cpu().contiguous()

    def _remove_own(self, pair: Pair) -> None:
        """Remove this rank's files, because rank 0 needs the room to receive the report."""
        for path in (self._store.root / draft_name(pair)).glob(f"r{self._rank:03}-*"):
            path.unlink(missing_ok=True)

    def _failed(self, pair: Pair, error: Exception) -> bool:
        extra = {"version": pair[1], "rank": self._rank, "error": str(error)}
        logger.warning("part of a version not written", extra=extra)
        return False


def buckets(tensors: Iterable[Named], limit: int) -> Iterator[list[Named]]:
    """One file each: groups of at most `limit` bytes, in order; a larger tensor is a group of its own and never cut.

    At most one group and one tensor are held. The same shapes give the same groups.
    """
    bucket: list[Named] = []
    size = 0
    for name, tensor in tensors:
        if bucket and size + tensor.nbytes > limit:
            yield bucket
            bucket, size = [], 0
        bucket.append((name, tensor))
        size += tensor.nbytes
    if bucket:
        yield bucket


def draft_name(pair: Pair) -> str:
    """Folder in which a version is written; all ranks know it, and no number is used twice."""
    return f"{DRAFT}{pair[0]}-{pair[1]}"


def spare_of(draft: Path) -> Path:
    """Folder with files that may be written over for a version; often it does not exist."""
    return draft.with_name(f"{draft.name}.spare")


def report_name(rank: int) -> str:
    return f"part-{rank:03}.json"


def write_report(folder: Path, report: RankReport) -> None:
    write_whole(folder / report_name(report.rank), msgspec.json.encode(report))


def take_report(folder: Path, rank: int) -> RankReport:
    """Read and remove the report of a rank; raises the error that it holds, `WeightsError` when it is invalid."""
    path = folder / report_name(rank)
    data = path.read_bytes()
    path.unlink()
    try:
        report = _decoder.decode(data)
    except msgspec.DecodeError as error:
        raise WeightsError(f"{path} is no report of a rank: {error}") from error
    if report.error:
        raise _ERRORS[report.error](report.message, report.hint)
    if report.rank != rank or any(not 0 <= part.shard < len(report.shards) for part in report.parts):
        raise WeightsError(f"{path} is not the report of rank {rank}")
    return report


def wait_for(folder: Path, name: str, until: float, stopped: threading.Event) -> None:
    """Return when `folder` has an entry called `name`; DeadlineExceeded after `until`, or on `stopped`.

    The folder is listed, because a network file system may remember for long that a single name was not there.
    """
    pause = 0.001
    while not _has(folder, name):
        if stopped.wait(pause) or time.monotonic() > until:
            raise DeadlineExceeded(
                f"{folder / name} did not come",
                "the log of the other rank says why; raise weights.deadline if it is only slow",
            )
        pause = min(2 * pause, _LONGEST_LOOK)


def _has(folder: Path, name: str) -> bool:
    try:
        return name in os.listdir(folder)  # noqa: PTH208  only the names are wanted
    except FileNotFoundError:  # a clean-up removed it, and rank 0 makes it again
        return False


def out_of_time(draft: Path, deadline: float) -> DeadlineExceeded:
    return DeadlineExceeded(
        f"the weights were not written to {draft} within {deadline:g} s",
        "raise weights.deadline, or use a faster transport",
    )


def _elements(tensors: Mapping[str, torch.Tensor]) -> int:
    return sum(tensor.numel() for tensor in tensors.values())
