"""What the weights of a checkpoint were trained on, and which step each version of the weights came from.

Each learner (one epoch of the fence) writes two files of its own: `trained-EPOCH.log` has the id of each group it
trained, one per line, and `groups-EPOCH.msgpack` has what is known of the group, so that `streamrl trace` still finds
it when Redis has retired it. A checkpoint names the prefixes of both that belong to its weights, as (file, bytes).
Only these prefixes count. What a crash or a woken old learner leaves behind them is ignored, so no file is ever cut.

This module imports no torch: the audit reads the same files.
"""

from __future__ import annotations

import bisect
import hashlib
import os
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

from streamrl.errors import CannotCreate, Refused
from streamrl.wire import pack_frame, read_frames

Link = tuple[str, int]
"""A file and the bytes of it that count."""
VERSIONS_FILE: Final = "versions.log"
_MODULUS: Final = 1 << 128


class TrainedDigest:
    """Count and order-free digest of the groups whose gradients are in the weights.

    It grows only when an update was really applied. A checkpoint stores it, and the audit compares it with the ids of
    the chain, which other code writes. The digest is the sum modulo 2^128 of the first 16 bytes of SHA-256("g" +
    decimal id), so a group trained twice changes it twice.
    """

    def __init__(self, count: int = 0, digest: str = "0" * 32) -> None:
        self.count = count
        self._sum = int(digest, 16)

    def add(self, group_ids: Iterable[int]) -> None:
        for group_id in group_ids:
            self.count += 1
            self._sum = (self._sum + int.from_bytes(hashlib.sha256(b"g%d" % group_id).digest()[:16], "big")) % _MODULUS

    @property
    def hexdigest(self) -> str:
        return f"{self._sum:032x}"


def trained_file(epoch: int) -> str:
    return f"trained-{epoch}.log"


def record_file(epoch: int) -> str:
    return f"groups-{epoch}.msgpack"


def read_trained(folder: Path, chain: Sequence[Link]) -> list[int]:
    """The ids in the logs of `folder`, in the order they were trained, repeats included."""
    group_ids: list[int] = []
    for file, size in chain:
        try:
            with (folder / file).open("rb") as log:
                data = log.read(size)
            group_ids.extend(int(line) for line in data.split())
        except (OSError, ValueError) as error:
            raise Refused(f"{folder / file}: the log of trained groups cannot be read: {error}") from error
        if len(data) != size:
            raise Refused(f"{folder / file}: {len(data)} bytes, the checkpoint needs {size}")
    return group_ids


def read_record(run_dir: Path, record: Sequence[Link]) -> Iterator[dict[str, Any]]:
    for file, size in record:
        yield from read_frames(run_dir / file, size)


def greatest_logged_epoch(folder: Path) -> int:
    """Greatest epoch that has a log here, 0 when none; the next learner's epoch must be above it."""
    numbers = [path.stem.removeprefix("trained-") for path in folder.glob("trained-*.log")]
    return max((int(number) for number in numbers if number.isdigit()), default=0)


class EpochFile:
    """A file that only the learner of one epoch appends to; a checkpoint names the prefix that counts.

    Bytes stay in memory until `sync`: without a checkpoint they have no meaning, so a full disk delays both. A write
    that failed half way is repeated at the same offset. One thread may add while another one syncs.
    """

    def __init__(self, folder: Path, file: str) -> None:
        self.file = file
        try:
            self._descriptor = os.open(folder / file, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o644)
        except OSError as error:
            raise CannotCreate(f"{folder / file} cannot be made: {error.strerror}") from error
        self._unwritten = b""
        self._written = 0
        self._lock = threading.Lock()

    def append(self, data: bytes) -> None:
        with self._lock:
            self._unwritten += data

    def mark(self) -> Link:
        """The link for what was added until now; it is valid after the next `sync`."""
        with self._lock:
            return self.file, self._written + len(self._unwritten)

    def sync(self) -> Link:
        """Make what was added durable, and return the link for it. After an OSError, call again: nothing is lost."""
        with self._lock:
            while self._unwritten:
                count = os.pwrite(self._descriptor, self._unwritten, self._written)
                self._unwritten = self._unwritten[count:]
                self._written += count
            written, descriptor = self._written, os.dup(self._descriptor)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
        return self.file, written

    def close(self) -> None:
        """Close the file; a repeat does nothing.

        While a thread writes, the file stays open: a disk that hangs would block the caller. A thread that syncs has
        a descriptor of its own, or fails: it never writes into another file that got the same number.
        """
        if not self._lock.acquire(blocking=False):
            return
        try:
            if self._descriptor >= 0:
                os.close(self._descriptor)
            self._descriptor = -1
        finally:
            self._lock.release()


class Lineage:
    def __init__(self, run_dir: Path, epoch: int) -> None:
        self._ids = EpochFile(run_dir / "checkpoints", trained_file(epoch))
        self._groups = EpochFile(run_dir, record_file(epoch))

    def add(self, groups: Iterable[dict[str, Any]]) -> None:
        for group in groups:
            self._ids.append(b"%d\n" % group["gid"])
            self._groups.append(pack_frame(group))

    def mark(self) -> tuple[Link, Link]:
        return self._ids.mark(), self._groups.mark()

    def sync(self) -> tuple[Link, Link]:
        return self._ids.sync(), self._groups.sync()

    def close(self) -> None:
        self._ids.close()
        self._groups.close()


class VersionNote(NamedTuple):
    """One line of the version log, written before the version is published."""

    epoch: int
    version: int
    step: int
    nonce: str


def read_versions(folder: Path) -> list[VersionNote]:
    """Read the version log; lines that a crash cut off or mixed up are skipped."""
    path = folder / VERSIONS_FILE
    if not path.exists():
        return []
    notes = []
    for line in path.read_text(errors="replace").splitlines():
        fields = line.split()
        if len(fields) == 4 and all(field.isdigit() for field in fields[:3]):
            notes.append(VersionNote(int(fields[0]), int(fields[1]), int(fields[2]), fields[3]))
    return notes


class VersionsLog:
    """Appends to `versions.log`, which all learners of a run share."""

    def __init__(self, folder: Path, epoch: int, nonce: str) -> None:
        self._epoch, self._nonce = epoch, nonce
        flags = os.O_CREAT | os.O_APPEND | os.O_RDWR
        self._descriptor = os.open(folder / VERSIONS_FILE, flags, 0o644)

    def note(self, version: int, step: int) -> None:
        """Write down, durably, that `version` will be published; call before publishing it."""
        size = os.fstat(self._descriptor).st_size
        torn = size > 0 and os.pread(self._descriptor, 1, size - 1) != b"\n"
        line = f"{self._epoch} {version} {step} {self._nonce}\n"
        os.write(self._descriptor, (("\n" if torn else "") + line).encode())
        os.fsync(self._descriptor)

    def close(self) -> None:
        os.close(self._descriptor)


class Branch:
    """Steps of the surviving branch by version, so that staleness counts updates and not restarts.

    A version of a lost branch counts as the step at which that branch left the surviving one (`surviving`: epochs in
    the chain of the loaded checkpoint). Its tokens are farther from the present policy than this number says; the
    importance weights account for it, because the log-probabilities of sampling are stored with the tokens.
    """

    def __init__(self, notes: Sequence[VersionNote], surviving: Iterable[int], epoch: int, step: int) -> None:
        first = {epoch: step}
        for note in notes:
            first[note.epoch] = min(note.step, first.get(note.epoch, note.step))
        alive = {*surviving, epoch}
        steps: dict[int, int] = {}
        for note in sorted(note for note in notes if note.epoch != epoch):
            steps[note.version] = min(note.step, _fork(first, alive, note.epoch))
        self._steps = steps
        self._order = sorted(steps)

    def note(self, version: int, step: int) -> None:
        """Numbers only grow."""
        self._steps[version] = step
        self._order.append(version)

    def step(self, version: int) -> int:
        """Step of a version; if it was not noted, that of the newest version before it (0 when none)."""
        place = bisect.bisect_right(self._order, version)
        return self._steps[self._order[place - 1]] if place else 0

    @property
    def greatest(self) -> int:
        return self._order[-1] if self._order else 0


def _fork(first: Mapping[int, int], alive: set[int], epoch: int) -> int:
    """Last step of an epoch's branch that is in the history of the present weights."""
    later = [step for other, step in first.items() if other > epoch and other in alive]
    return min(later if epoch in alive else [*later, first[epoch]])
