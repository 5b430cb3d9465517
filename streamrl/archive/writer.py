"""Writing files of closed groups: `RecordingWriter` adds blocks to files, `Archive` keeps every group of a run.

The archive holds the groups that closed, with their scores, for people and for scoring them again: all of them up to
`archive.max_bytes`, then the newest and a sample of the older ones (`archive.thinning`).
The first reader of a closed group (rank 0 of the learner; the feeder for held-out groups) adds it before it decides
anything about it, and has it written before the group leaves Redis. So a kill loses nothing, and a group may be
there twice: readers take the last (`ArchiveReading`).

A thread writes a block each second, and no caller waits for a disk longer than `PATIENCE`; no group waits for the
thread that thins. A full disk costs the archive, not the run: groups wait in memory until there is room, up to
`MAX_WAITING` bytes; those above it are lost and counted.

A group is known by its content: when Redis has lost seconds, it closes again under the same id with other responses.
If that version is lost, a record without responses is written in its place as soon as there is room. It tells readers
that the archived version of the group is not the one that counted.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import os
import shutil
import threading
import uuid
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, Final

import msgpack
import msgspec
import zstandard

from streamrl import wire
from streamrl.archive.copies import ArchiveCopies
from streamrl.archive.reader import (
    ARCHIVE,
    EVALUATION,
    Header,
    RecordedGroup,
    greatest_epoch,
    read_header,
    recording_files,
)
from streamrl.archive.thinning import thin
from streamrl.atomic import fsync_directory
from streamrl.config import RunConfig
from streamrl.errors import CannotCreate, ConfigError, WireError
from streamrl.queues.records import ClosedGroup
from streamrl.store import run_store

logger = logging.getLogger(__name__)
PATIENCE: Final = 5.0
"""Seconds that a caller waits for the disk."""
MAX_WAITING: Final = 64 << 20
"""Bytes of groups in memory that the disk did not take yet."""
_WRITE_SECONDS: Final = 1.0
_REMEMBERED: Final = 1 << 16
_TRIES: Final = 3
_FILES: Final = 8
"""Files that an archive with a limit has at least."""


class RecordingWriter:
    """Adds blocks of groups to the files of one epoch of a recorder.

    Bytes stay in memory until they are written: writing repeats at the same offset, so the next `sync` simply redoes
    what failed half way. No other recorder may write files of `epoch`; a file of `file_bytes` is followed by the next
    one. CannotCreate: the folder or the first file cannot be made, or the file exists.
    """

    def __init__(self, folder: Path, epoch: int, header: Header, file_bytes: int) -> None:
        self._folder, self._epoch, self._file_bytes = folder, epoch, file_bytes
        self._header = msgpack.packb(msgspec.to_builtins(header))
        self._compressor = zstandard.ZstdCompressor(level=3, write_checksum=True)
        self._files: list[list[Any]] = []  # [name, bytes]
        self._descriptor = -1
        self._added: list[bytes] = []
        self._unwritten = b""
        self._whole = 0
        self._open()

    @property
    def file(self) -> str:
        """Name of the file that is being written."""
        return str(self._files[-1][0])

    def add(self, group: RecordedGroup) -> None:
        self._added.append(msgspec.msgpack.encode(group))

    def write(self) -> None:
        """Write all that was added as one block, which survives a kill of this process.

        `OSError`: the disk is full or broken; nothing is forgotten, call again later.
        """
        if self._added:
            self._unwritten += self._compressor.compress(b"".join(self._added))
            self._added.clear()
        while self._unwritten:
            count = os.pwrite(self._descriptor, self._unwritten, self._files[-1][1])
            self._unwritten = self._unwritten[count:]
            self._files[-1][1] += count
        self._whole = self._files[-1][1]

    def sync(self) -> list[tuple[str, int]]:
        """`write`, make it durable, and return the files with their sizes."""
        self.write()
        os.fsync(self._descriptor)
        links = [(str(name), int(size)) for name, size in self._files]
        if links[-1][1] >= self._file_bytes:
            self._open()
        return links

    def discard(self) -> None:
        """The file then ends with its last whole block."""
        os.ftruncate(self._descriptor, self._whole)
        self._files[-1][1] = self._whole
        self._added.clear()
        self._unwritten = b"" if self._whole else self._compressor.compress(self._header)

    def close(self) -> None:
        """What was not synced is lost."""
        os.close(self._descriptor)

    def _open(self) -> None:
        name = f"groups-{self._epoch}-{len(self._files)}.msgpack.zst"
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            descriptor = os.open(self._folder / name, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o644)
            try:
                # Groups are retired once they are here, so file and folder must survive a crash.
                fsync_directory(self._folder)
                fsync_directory(self._folder.parent)
            except OSError:
                os.close(descriptor)
                (self._folder / name).unlink()  # the next call makes it again
                raise
        except OSError as error:
            raise CannotCreate(f"{self._folder / name} cannot be made: {error.strerror}") from error
        if self._descriptor >= 0:
            os.close(self._descriptor)
        self._descriptor, self._whole = descriptor, 0
        self._files.append([name, 0])
        self._unwritten = self._compressor.compress(self._header)


class Archive:
    """Adds closed groups to the archive of a run; with `archive.enabled: false` every call does nothing.

    All methods are for one event loop. A failing disk raises nothing: it is a warning, once, and a count.
    """

    def __init__(self, config: RunConfig, run_dir: Path, *, evaluation: bool = False) -> None:
        self.written = 0
        self._run, self._config = config, config.archive
        place = f"{ARCHIVE}/{EVALUATION}" if evaluation else ARCHIVE
        self._folder = run_dir / place
        store = run_store(self._config.store, config, "archive.store") if self._config.enabled else None
        self._copies = None if store is None else ArchiveCopies(store, self._folder, place)
        self._seen: dict[tuple[int, int], bytes] = {}
        self._again: set[tuple[int, int]] = set()
        self._added: list[RecordedGroup] = []
        self._waiting = self._crowded = 0
        self._thread = ThreadPoolExecutor(1, "archive") if self._config.enabled else None
        self._work: Future[None] | None = None
        self._late = self._refused = False
        # Of the thread alone:
        self._writer: RecordingWriter | None = None
        self._pending: list[RecordedGroup] = []
        self._given_up = 0
        self._torn = False
        self._dirty = False
        self._thinning: threading.Thread | None = None

    def add(self, group: ClosedGroup) -> None:
        """Add a group; a repeat of the same content does nothing. It waits in memory for `settle`, `sync` or `run`."""
        if self._thread is None:
            return
        key, content = (group.group_id, group.attempt), _digest(group)
        if self._seen.get(key) == content:
            return
        if key in self._seen:
            self._again.add(key)
        self._seen[key] = content
        if len(self._seen) > _REMEMBERED:
            forgotten = next(iter(self._seen))
            del self._seen[forgotten]
            self._again.discard(forgotten)
        groups = [RecordedGroup.of(group)]
        if self._waiting > MAX_WAITING:
            self._crowded += 1
            self._complain("the disk hangs, or is too slow")
            groups = self._left_of(groups)
        self._added += groups
        self._waiting += sum(map(_size, groups))

    async def settle(self) -> None:
        """Return when all that was added is written, and so survives a kill; after `PATIENCE` anyway."""
        if self._added or self._writing:
            await self._flush(durable=False)

    async def sync(self) -> None:
        """As `settle`, and durable: it survives a crash of the machine too. Copies to a store go on behind it."""
        if self._added or self._dirty or self._writing:
            await self._flush(durable=True)
        if self._copies is not None and self._writer is not None:
            self._copies.begin(self._writer.file)

    async def run(self) -> None:
        """Write once a second, and retry what the disk refused, until cancelled."""
        while True:
            await asyncio.sleep(_WRITE_SECONDS)
            await self.sync()

    async def close(self) -> None:
        """Make durable what is left and close the file. A repeat does nothing."""
        if self._thread is None:
            return
        await self.sync()
        thread, self._thread = self._thread, None
        closing = asyncio.wrap_future(thread.submit(self._close))
        thread.shutdown(wait=False)
        await asyncio.wait([closing], timeout=0 if self._writing else PATIENCE)
        if self._copies is not None:
            await self._copies.close()

    @property
    def lost(self) -> int:
        return self._crowded + self._given_up

    @property
    def counts(self) -> dict[str, int]:
        return {"archived": self.written, "archive_lost": self.lost} if self._config.enabled else {}

    @property
    def _writing(self) -> bool:
        return self._work is not None and not self._work.done()

    async def _flush(self, *, durable: bool) -> None:
        if self._thread is None or (self._late and self._writing):
            return  # a disk that hangs is not waited for twice
        groups, self._added = self._added, []
        size = sum(map(_size, groups))
        self._work = self._thread.submit(self._write, groups, durable=durable)
        waiting: asyncio.Future[None] = asyncio.wrap_future(self._work)

        def written(done: asyncio.Future[None]) -> None:
            self._waiting -= size
            if not done.cancelled() and (error := done.exception()) is not None:
                logger.error("the archive failed", exc_info=error)

        waiting.add_done_callback(written)
        done, _ = await asyncio.wait([waiting], timeout=PATIENCE)
        self._late = not done
        if self._late:
            self._complain(f"the disk takes longer than {PATIENCE:g} s")

    # ---- in the thread

    def _write(self, groups: Sequence[RecordedGroup], *, durable: bool) -> None:
        self._pending += groups
        self._dirty = True
        try:
            writer = self._writer = self._writer or self._begin()
            if self._torn:
                writer.discard()
            self._torn = True
            for group in self._pending:
                writer.add(group if self._config.logprobs else without_logprobs(group))
            writer.write()
            self.written += _number(self._pending)
            self._pending, self._torn = [], False
            if durable:
                writer.sync()
                self._dirty = self._refused = False
                self._make_room(writer)
        except OSError as error:
            self._complain(str(error))
            self._forget_newest()

    def _begin(self) -> RecordingWriter:
        """A file of its own for this process; another one may begin at the same time."""
        self._folder.mkdir(parents=True, exist_ok=True)
        for draft in self._folder.glob("*.draft"):  # a kill left it
            draft.unlink(missing_ok=True)
        header, limit = self._header(), self._limit(recording_files(self._folder))
        file_bytes = min(self._config.file_bytes, self._config.file_bytes if limit is None else limit // _FILES)
        for _ in range(_TRIES):
            epoch = greatest_epoch(self._folder) + 1
            try:
                return RecordingWriter(self._folder, epoch, header, file_bytes)
            except CannotCreate as error:
                if not isinstance(error.__cause__, FileExistsError):
                    raise
        raise CannotCreate(f"{self._folder}: others make files faster than this process")

    def _header(self) -> Header:
        """The newest file's header if it is the same, so that the files of a run are one recording."""
        config = self._run
        there: Header | None = None
        for file in recording_files(self._folder):
            try:
                there = read_header(file) or there
            except ConfigError as error:  # archive new groups in spite of a damaged file
                logger.warning("damaged file in the archive", extra={"file": str(file), "error": str(error)})
        here = Header(
            id=uuid.uuid4().hex,
            run=config.name,
            model=config.model.path,
            temperature=config.sampling.temperature,
            logprobs=self._config.logprobs,
        )
        mine = here if there is None else msgspec.structs.replace(here, id=there.id)
        return mine if there is not None and msgspec.structs.replace(there, one_in=1) == mine else here

    def _forget_newest(self) -> None:
        """Hold what the disk did not take: the oldest groups, as many as there is memory for."""
        room, kept = MAX_WAITING, []
        for group in self._pending:
            room -= _size(group)
            if room >= 0:
                kept.append(group)
            else:
                self._given_up += _number([group])
                kept += self._left_of([group])
        self._pending = kept

    def _left_of(self, lost: Sequence[RecordedGroup]) -> list[RecordedGroup]:
        """Records in place of lost groups that closed again: they say that an earlier version is not the last."""
        again = [group for group in lost if (group.group_id, group.attempt) in self._again]
        return [msgspec.structs.replace(group, samples=[], causes=[]) for group in again]

    def _limit(self, files: Sequence[Path]) -> int | None:
        """Bytes that all files may take: a quarter of what the disk has for them, because the run needs it more."""
        if self._config.max_bytes is None:
            return None
        taken = sum(file.stat().st_size for file in files)
        return min(self._config.max_bytes, (taken + shutil.disk_usage(self._folder).free) // 4)

    def _make_room(self, writer: RecordingWriter) -> None:
        files = recording_files(self._folder)
        if (self._thinning and self._thinning.is_alive()) or (limit := self._limit(files)) is None:
            return
        own = self._folder / writer.file
        done = [file for file in files if file != own and (self._copies is None or file.name in self._copies.copied)]
        self._thinning = threading.Thread(target=thin, args=(done, max(0, limit - own.stat().st_size)))
        self._thinning.start()

    def _close(self) -> None:
        if left := _number(self._pending):
            self._given_up += left
            logger.warning("groups are not in the archive", extra={"folder": str(self._folder), "lost": self.lost})
        if self._writer is not None:
            self._writer.close()

    def _complain(self, error: str) -> None:
        if not self._refused:
            extra: dict[str, Any] = {"folder": str(self._folder), "error": error, "lost": self.lost}
            logger.warning("the archive cannot be written", extra={**extra, "hint": "make room: the run goes on"})
        self._refused = True


def without_logprobs(group: RecordedGroup) -> RecordedGroup:
    """The group with zeros for its log-probabilities; bytes that are no response stay as they are."""

    def stripped(payload: bytes) -> bytes:
        try:
            sample = wire.decode(payload, wire.Sample)
        except WireError:
            return payload
        return wire.encode(msgspec.structs.replace(sample, logprobs=bytes(len(sample.tokens))))

    samples = [(stripped(payload), score) for payload, score in group.samples]
    return msgspec.structs.replace(group, samples=samples)


def _digest(group: ClosedGroup) -> bytes:
    """Tells groups apart that closed under one id; lengths keep the two messages apart."""
    found = hashlib.blake2b(digest_size=16)
    for number, messages in sorted(group.samples.items()):
        for message in messages:
            found.update(b"%d %d " % (number, len(message)) + message)
    found.update(repr(sorted(group.causes.items())).encode())
    return found.digest()


def _number(records: Sequence[RecordedGroup]) -> int:
    return sum(not record.lost for record in records)


def _size(group: RecordedGroup) -> int:
    return len(group.prompt) + sum(len(payload) + len(score) for payload, score in group.samples)
