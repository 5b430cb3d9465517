"""Writing files of closed groups: `RecordingWriter` adds blocks to files, `Archive` keeps every group of a run.

The archive holds all groups up to `archive.max_bytes`, then the newest and a sample of the older ones (`thinning.py`).
The first reader of a closed group (rank 0 of the learner; the feeder for held-out groups) adds it before it decides
anything about it, and has it written before the group leaves Redis. So a kill loses nothing, and a group may be
there twice: readers take the last (`ArchiveReading`).

A thread writes a block each second, and no caller waits for a disk longer than `PATIENCE`. A disk that is full or hangs
costs the archive, not the run: what it does not take is dropped and counted. Another thread copies finished files to
`archive.store` and thins old ones, each time that a file is begun.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import shutil
import uuid
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, Final

import msgspec
import zstandard

from streamrl import wire
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
from streamrl.store import ObjectStore, run_store

logger = logging.getLogger(__name__)
PATIENCE: Final = 5.0  # seconds that a caller waits for the disk
MAX_WAITING: Final = 64 << 20  # bytes of groups in memory that a disk that hangs did not take yet
LAST_SECONDS: Final = 60.0  # longest wait for the copies of the last files when the archive closes
_WRITE_SECONDS: Final = 1.0
_REMEMBERED: Final = 1 << 16
_FILES: Final = 8  # that an archive with a limit has at least


class RecordingWriter:
    """Adds blocks of groups to files of `epoch`, which no other recorder may write.

    CannotCreate: the folder or a file cannot be made, or the file exists.
    """

    def __init__(self, folder: Path, epoch: int, header: Header, file_bytes: int) -> None:
        self._folder, self._epoch, self._file_bytes = folder, epoch, file_bytes
        self._compressor = zstandard.ZstdCompressor(level=3, write_checksum=True)
        self._header = self._compressor.compress(msgspec.msgpack.encode(header))
        self._files: list[tuple[str, int]] = []
        self._descriptor = -1
        self._added: list[bytes] = []
        self._open()

    @property
    def file(self) -> str:
        """Name of the file that is being written."""
        return self._files[-1][0]

    def add(self, group: RecordedGroup) -> None:
        self._added.append(msgspec.msgpack.encode(group))

    def sync(self) -> list[tuple[str, int]]:
        """Write all that was added as one durable block, and return the files with their sizes.

        `OSError`: the disk is full or broken; what was added is dropped, and the file ends with the block before it.
        """
        block = self._compressor.compress(b"".join(self._added)) if self._added else b""
        self._added.clear()
        if block and self._files[-1][1] and self._files[-1][1] + len(block) > self._file_bytes:
            self._open()
        name, size = self._files[-1]
        left, end = block if size else self._header + block, size
        try:
            while left:
                count = os.pwrite(self._descriptor, left, end)
                left, end = left[count:], end + count
            os.fsync(self._descriptor)
        except OSError:
            os.ftruncate(self._descriptor, size)
            raise
        self._files[-1] = name, end
        return list(self._files)

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
        self._descriptor = descriptor
        self._files.append((name, 0))


class Archive:
    """Adds closed groups to the archive of a run; with `archive.enabled: false` every call does nothing.

    A failing disk raises nothing: it is a warning, once, and a count (`lost`; `written` are groups that it took).
    """

    def __init__(self, config: RunConfig, run_dir: Path, *, evaluation: bool = False) -> None:
        self.written = self.lost = 0
        self._run, self._config = config, config.archive
        self._place = f"{ARCHIVE}/{EVALUATION}" if evaluation else ARCHIVE
        self._folder = run_dir / self._place
        self._store = run_store(self._config.store, config, "archive.store") if self._config.enabled else None
        self._seen: dict[tuple[int, int], int] = {}
        self._added: list[RecordedGroup] = []
        self._waiting = 0
        self._thread = ThreadPoolExecutor(1, "archive") if self._config.enabled else None
        self._work: Future[None] | None = None
        self._late = self._refused = False
        self._writer: RecordingWriter | None = None
        self._copied: set[str] = set()
        self._file_bytes = self._config.file_bytes
        self._upkeep = ThreadPoolExecutor(1, "archive files")

    def add(self, group: ClosedGroup) -> None:
        """Add a group; a repeat of the same content does nothing. It waits in memory for `sync` or `run`."""
        # After Redis lost some seconds another group may close under an id.
        content = hash((*sorted(group.samples.items()), *sorted(group.causes.items())))
        key = group.group_id, group.attempt
        if self._thread is None or self._seen.get(key) == content:
            return
        self._seen[key] = content
        if len(self._seen) > _REMEMBERED:
            del self._seen[next(iter(self._seen))]
        if self._waiting > MAX_WAITING:
            self.lost += 1
            self._complain("the disk hangs, or is too slow")
            return
        self._added.append(RecordedGroup.of(group))
        self._waiting += _size(self._added[-1])

    async def sync(self) -> None:
        """Return when all that was added is on the disk, and so survives a crash; after `PATIENCE` anyway."""
        if self._thread is None or not (self._added or self._writing) or (self._late and self._writing):
            return  # a disk that hangs is not waited for twice
        groups, self._added = self._added, []
        size = sum(map(_size, groups))
        self._work = self._thread.submit(self._write, groups)
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

    async def run(self) -> None:
        """Write once a second, until cancelled."""
        while True:
            await asyncio.sleep(_WRITE_SECONDS)
            await self.sync()

    async def close(self) -> None:
        """Make durable what is left, close the file, and copy it. A repeat does nothing."""
        if self._thread is None:
            return
        await self.sync()
        thread, self._thread = self._thread, None
        closing = asyncio.wrap_future(thread.submit(self._close))
        thread.shutdown(wait=False)
        await asyncio.wait([closing], timeout=0 if self._writing else PATIENCE)
        if self._store is not None:
            last = asyncio.wrap_future(self._upkeep.submit(self._keep_up, None))
            await asyncio.wait([last], timeout=LAST_SECONDS)
            if left := [file.name for file in recording_files(self._folder) if file.name not in self._copied]:
                extra = {"folder": str(self._folder), "files": left, "hint": "the next start on this host copies them"}
                logger.warning("files of the archive are not in archive.store", extra=extra)
        self._upkeep.shutdown(wait=False)

    @property
    def counts(self) -> dict[str, int]:
        return {"archived": self.written, "archive_lost": self.lost} if self._config.enabled else {}

    @property
    def _writing(self) -> bool:
        return self._work is not None and not self._work.done()

    # ---- in the threads

    def _write(self, groups: Sequence[RecordedGroup]) -> None:
        before = self._writer and self._writer.file
        try:
            writer = self._writer = self._writer or self._begin()
            for group in groups:
                writer.add(group if self._config.logprobs else without_logprobs(group))
            writer.sync()
        except OSError as error:
            self.lost += len(groups)
            self._complain(str(error))
            return
        self.written += len(groups)
        self._refused = False
        if writer.file != before:
            self._upkeep.submit(self._keep_up, writer.file)

    def _begin(self) -> RecordingWriter:
        """A file of its own for this process; another one may begin at the same time."""
        self._folder.mkdir(parents=True, exist_ok=True)
        for draft in self._folder.glob("*.draft"):  # a kill left it
            draft.unlink(missing_ok=True)
        limit = self._limit(recording_files(self._folder))
        if limit is not None:
            self._file_bytes = min(self._config.file_bytes, limit // _FILES)
        try:
            return RecordingWriter(self._folder, greatest_epoch(self._folder) + 1, self._header(), self._file_bytes)
        except CannotCreate as error:
            if isinstance(error.__cause__, FileExistsError):
                return self._begin()
            raise

    def _header(self) -> Header:
        """The newest file's header if it is the same, so that the files of a run are one recording."""
        config = self._run
        here = Header(
            id=uuid.uuid4().hex,
            run=config.name,
            model=config.model.path,
            temperature=config.sampling.temperature,
            logprobs=self._config.logprobs,
        )
        for file in reversed(recording_files(self._folder)):
            with contextlib.suppress(ConfigError):  # a damaged file
                if (there := read_header(file)) is not None:
                    mine = msgspec.structs.replace(here, id=there.id)
                    return mine if msgspec.structs.replace(there, one_in=1) == mine else here
        return here

    def _keep_up(self, own: str | None) -> None:
        """Copy finished files, those before `own`, and thin the archive where it is too large."""
        try:
            files = recording_files(self._folder)
            if own is not None:
                files = files[: [file.name for file in files].index(own)]  # what is behind it has been begun since
            if self._store is not None:
                for file in files:
                    self._copy(file, self._store)
            if own is not None and (limit := self._limit(recording_files(self._folder))) is not None:
                thin(files, max(0, limit - self._file_bytes))
        except OSError as error:
            extra = {"folder": str(self._folder), "error": str(error), "hint": "it is tried again with the next file"}
            logger.warning("files of the archive cannot be copied or thinned", extra=extra)

    def _copy(self, file: Path, store: ObjectStore) -> None:
        """Copy a file once; one that a killed process did not copy to its end is seen by its size."""
        if file.name in self._copied:
            return
        with contextlib.suppress(ConfigError):  # a damaged file
            if (header := read_header(file)) is not None:
                # Each recording has its folder: files of two hosts never meet under one name.
                name = f"{self._place}/{header.id}/{file.name}"
                if not store.has(name) or (header.one_in == 1 and store.size(name) != file.stat().st_size):
                    store.put(file, name)
        self._copied.add(file.name)

    def _limit(self, files: Sequence[Path]) -> int | None:
        """Bytes that all files may take: a quarter of what the disk has for them, because the run needs it more."""
        if self._config.max_bytes is None:
            return None
        taken = sum(file.stat().st_size for file in files)
        return min(self._config.max_bytes, (taken + shutil.disk_usage(self._folder).free) // 4)

    def _close(self) -> None:
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


def _size(group: RecordedGroup) -> int:
    return len(group.prompt) + sum(len(payload) + len(score) for payload, score in group.samples)
