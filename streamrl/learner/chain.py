"""What the surviving weights were trained on: logs of group ids, and the map from versions to steps.

Each learner (one epoch of the fence) appends to a log of its own, `trained-EPOCH.log`, one group id per line. A
checkpoint names the prefixes that belong to its weights, `[(file, bytes), ...]`: its chain. Only those prefixes count,
so what a crash or a woken old learner leaves behind them is ignored and nothing ever needs to be cut off.

This module knows no torch: the audit reads the same chain.
"""

from __future__ import annotations

import bisect
import hashlib
import os
import threading
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Final, NamedTuple

from streamrl.errors import CannotCreate, Refused

Link = tuple[str, int]
VERSIONS_FILE: Final = "versions.log"
_MODULUS: Final = 1 << 128


class TrainedDigest:
    """Count and order-free digest of the groups whose gradients are in the weights.

    It lives beside the weights and grows only when an update was really applied; a checkpoint stores it, and the audit
    compares it with the ids of the chain, which are written by other code. The digest is the sum modulo 2^128 of the
    first 16 bytes of SHA-256("g" + decimal id), so that a group trained twice changes it twice.
    """

    def __init__(self, count: int = 0, digest: str = "0" * 32) -> None:
        self.count = count
        self._sum = int(digest, 16)

    def add(self, gids: Iterable[int]) -> None:
        """Count groups whose gradients were applied."""
        for gid in gids:
            self.count += 1
            self._sum = (self._sum + int.from_bytes(hashlib.sha256(b"g%d" % gid).digest()[:16], "big")) % _MODULUS

    @property
    def hexdigest(self) -> str:
        """The digest as 32 hexadecimal digits."""
        return f"{self._sum:032x}"


def trained_file(epoch: int) -> str:
    """Name of the log of one epoch."""
    return f"trained-{epoch}.log"


def read_chain(folder: Path, chain: Sequence[Link]) -> list[int]:
    """Return the group ids of a chain, in the order they were trained, repeats included.

    Raises:
        Refused: a log is missing, shorter than the chain says, or holds something else than ids.
    """
    gids: list[int] = []
    for file, size in chain:
        try:
            with (folder / file).open("rb") as log:
                data = log.read(size)
            gids.extend(int(line) for line in data.split())
        except (OSError, ValueError) as error:
            raise Refused(f"{folder / file}: the log of trained groups cannot be read: {error}") from error
        if len(data) != size:
            raise Refused(f"{folder / file}: {len(data)} bytes, the checkpoint needs {size}")
    return gids


def greatest_logged_epoch(folder: Path) -> int:
    """Greatest epoch that has a log here, 0 when none: the next learner's epoch must be above it."""
    numbers = [path.stem.removeprefix("trained-") for path in folder.glob("trained-*.log")]
    return max((int(number) for number in numbers if number.isdigit()), default=0)


class EpochFile:
    """A file that only the learner of one epoch appends to; a checkpoint names the prefix that counts.

    Bytes are held in memory until they could be written: a full disk delays the file as it delays the checkpoint, and
    without the checkpoint the file has no meaning. Writing repeats at the same offset, so a write that failed half way
    is simply done again. One thread may add while another one syncs.

    Args:
        folder: where the file lies.
        file: its name, which carries the epoch.

    Raises:
        CannotCreate: the file is there already (another learner used this epoch) or cannot be made.
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

    def mark(self) -> Link:
        """The link of the chain for what was added until now; it counts from the next `sync` on."""
        with self._lock:
            return self.file, self._written + len(self._unwritten)

    def sync(self) -> Link:
        """Write what is left, make the file durable, and return its link of the chain.

        Raises:
            OSError: the disk is full or broken: nothing is forgotten, call again later; or the file is closed.
        """
        with self._lock:
            self._write()
            written, descriptor = self._written, os.dup(self._descriptor)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
        return self.file, written

    def close(self) -> None:
        """Close the file; a repeat does nothing.

        A thread that syncs never meets another file under the same descriptor: it has one of its own, or fails. While
        one writes the file stays open, for a disk that hangs would hold up whoever closes.
        """
        if not self._lock.acquire(blocking=False):
            return
        try:
            if self._descriptor >= 0:
                os.close(self._descriptor)
            self._descriptor = -1
        finally:
            self._lock.release()

    def _write(self) -> None:
        while self._unwritten:
            count = os.pwrite(self._descriptor, self._unwritten, self._written)
            self._unwritten = self._unwritten[count:]
            self._written += count


class TrainedLog(EpochFile):
    """The log of the ids that this learner's epoch trained, in the run's `checkpoints` directory."""

    def __init__(self, folder: Path, epoch: int) -> None:
        super().__init__(folder, trained_file(epoch))

    def append(self, gids: Iterable[int]) -> None:
        """Add ids and try to write them; what the disk refuses waits for `sync`."""
        with self._lock:
            self._unwritten += b"".join(b"%d\n" % gid for gid in gids)
            try:
                self._write()
            except OSError:
                return


class VersionNote(NamedTuple):
    """One line of the version log: before a version is published, who made it and at which step."""

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
    """Appends to `versions.log`, which all learners of a run share.

    Args:
        folder: the run's `checkpoints` directory.
        epoch: this learner's epoch.
        nonce: this learner's nonce.
    """

    def __init__(self, folder: Path, epoch: int, nonce: str) -> None:
        self._epoch, self._nonce = epoch, nonce
        flags = os.O_CREAT | os.O_APPEND | os.O_RDWR
        self._descriptor = os.open(folder / VERSIONS_FILE, flags, 0o644)

    def note(self, version: int, step: int) -> None:
        """Write down, durably, that `version` will be published; call before publishing it.

        Raises:
            OSError: the disk is full or broken.
        """
        size = os.fstat(self._descriptor).st_size
        torn = size > 0 and os.pread(self._descriptor, 1, size - 1) != b"\n"
        line = f"{self._epoch} {version} {step} {self._nonce}\n"
        os.write(self._descriptor, (("\n" if torn else "") + line).encode())
        os.fsync(self._descriptor)

    def close(self) -> None:
        """Close the file."""
        os.close(self._descriptor)


class Branch:
    """Steps of the surviving branch by version, so that staleness counts updates and not restarts.

    A version of a lost branch counts as the step at which that branch left the surviving one: its last ancestor in the
    history of today's weights. (Its tokens are farther from today's policy than this number says; the importance
    weights know, because the log-probabilities of sampling are stored with the tokens.)

    Args:
        notes: the version log.
        surviving: epochs in the chain of the checkpoint that was loaded.
        epoch: this learner's epoch.
        step: step of the checkpoint that was loaded.
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
        """Add a version of this learner; numbers only grow."""
        self._steps[version] = step
        self._order.append(version)

    def step(self, version: int) -> int:
        """Step of a version; for one nobody wrote down, that of the newest version before it (0 when none)."""
        place = bisect.bisect_right(self._order, version)
        return self._steps[self._order[place - 1]] if place else 0

    @property
    def pairs(self) -> list[tuple[int, int]]:
        """Every version with its step, ascending; `note` them one by one to have the same branch elsewhere."""
        return [(version, self._steps[version]) for version in self._order]

    @property
    def greatest(self) -> int:
        """Greatest version known, 0 when none."""
        return self._order[-1] if self._order else 0


def _fork(first: Mapping[int, int], alive: set[int], epoch: int) -> int:
    """Last step of an epoch's branch that today's weights still have in their history."""
    later = [step for other, step in first.items() if other > epoch and other in alive]
    return min(later if epoch in alive else [*later, first[epoch]])
