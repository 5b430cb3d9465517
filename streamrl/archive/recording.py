"""Recordings: closed groups in files, so that rollouts can be made today and trained, or scored, another day.

`groups-EPOCH-PART.msgpack.zst`: MessagePack maps, one after the other, compressed with zstandard (`zstd -dc FILE` gives
the maps). The first map of each file says what all have in common (`Header`), the others are groups. Groups are added
in blocks, each a zstandard frame of its own; a frame that a crash cut off ends the file. A group may stand in a
recording twice, when whoever recorded it died before it was sure of it: readers take the first.
"""

from __future__ import annotations

import itertools
import os
import re
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO, Final

import msgpack
import msgspec
import zstandard

from streamrl.atomic import fsync_directory
from streamrl.errors import CannotCreate, ConfigError, WireError
from streamrl.queues.records import ClosedGroup

FOLDER: Final = "recording"
"""Directory in that of the run."""
_SCHEMA: Final = "streamrl.recording/1"
_NAME: Final = re.compile(r"groups-(\d+)-(\d+)\.msgpack\.zst")
_MAX_GROUP_BYTES: Final = 1 << 30
_READ_BYTES: Final = 1 << 14
"""Small, because so little can become a thousand times as much."""
_HINT: Final = "name a recording: RUN_DIR/recording of `streamrl up --rollout-only`, or one of its files"

Link = tuple[str, int]


class Header(msgspec.Struct, frozen=True, kw_only=True):
    """What all groups of a recording have in common.

    `id` is that of the recording; `model` and `temperature` are those the responses were sampled with. Without
    `logprobs` the log-probabilities were left out: zeros stand in their places, and nobody can train such groups.
    """

    schema: str = _SCHEMA
    id: str
    run: str
    model: str
    temperature: float
    logprobs: bool = True


class RecordedGroup(msgspec.Struct, frozen=True, kw_only=True):
    """One closed group: its id in the run that made it, its prompt, and payload and score of each usable response.

    `causes` are the numbers of the dead responses and why they died; the usable ones have the other numbers, in order.
    `attempt` and `version` are those of its admission; `at` is when it was recorded, in seconds since 1970, 0 where
    nobody wrote it down. A record without responses says that this version of the group is lost (`lost`).
    """

    gid: int
    prompt: bytes
    samples: list[tuple[bytes, bytes]]
    causes: list[tuple[int, str]] = []
    attempt: int = 1
    version: int = 0
    at: float = 0.0

    @classmethod
    def of(cls, group: ClosedGroup) -> RecordedGroup:
        """A group as Redis holds it; of dead samples only the cause is kept."""
        return cls(
            gid=group.gid,
            prompt=group.prompt,
            samples=[group.samples[k] for k in sorted(group.samples)],
            causes=sorted(group.causes.items()),
            attempt=group.attempt,
            version=group.version,
            at=time.time(),
        )

    @property
    def lost(self) -> bool:
        """Whether it only says that the group closed so, and that nothing more is known of it."""
        return not self.samples

    @property
    def numbers(self) -> list[int]:
        """The number of each usable response in its group, in the order of `samples`."""
        dead = {number for number, _ in self.causes}
        alive = (number for number in itertools.count() if number not in dead)
        return list(itertools.islice(alive, len(self.samples)))


class RecordingWriter:
    """Adds blocks of groups to the files of one epoch of a recorder.

    Bytes are held in memory until they could be written: writing repeats at the same offset, so what failed half way is
    simply done again by the next `sync`.

    Args:
        folder: of the recording; it is made when missing.
        epoch: of the recorder; no other one may write files of it.
        header: of the recording.
        file_bytes: size at which a file is followed by the next one.

    Raises:
        CannotCreate: the folder or the first file cannot be made, or the file is there.
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

    def add(self, group: RecordedGroup) -> None:
        """Add a group; it is written by the next `sync`."""
        self._added.append(msgspec.msgpack.encode(group))

    def write(self) -> None:
        """Write all that was added as one block: a kill of this process does not take it back.

        Raises:
            OSError: the disk is full or broken; nothing is forgotten, call again later.
        """
        if self._added:
            self._unwritten += self._compressor.compress(b"".join(self._added))
            self._added.clear()
        while self._unwritten:
            count = os.pwrite(self._descriptor, self._unwritten, self._files[-1][1])
            self._unwritten = self._unwritten[count:]
            self._files[-1][1] += count
        self._whole = self._files[-1][1]

    def sync(self) -> list[Link]:
        """`write`, make it durable, and return the files with their sizes. A full file is followed by the next one.

        Raises:
            OSError: the disk is full or broken; nothing is forgotten, call again later.
        """
        self.write()
        os.fsync(self._descriptor)
        links = [(str(name), int(size)) for name, size in self._files]
        if links[-1][1] >= self._file_bytes:
            self._open()
        return links

    @property
    def unwritten(self) -> int:
        """Bytes in memory that the disk did not take."""
        return len(self._unwritten)

    def discard(self) -> None:
        """Give up what could not be written: the file ends with its last whole block.

        Raises:
            OSError: the disk is broken; call again later.
        """
        os.ftruncate(self._descriptor, self._whole)
        self._files[-1][1] = self._whole
        self._unwritten = b"" if self._whole else self._compressor.compress(self._header)

    def close(self) -> None:
        """Close the file; what was not synced is gone."""
        os.close(self._descriptor)

    def _open(self) -> None:
        name = f"groups-{self._epoch}-{len(self._files)}.msgpack.zst"
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            descriptor = os.open(self._folder / name, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o644)
            try:
                # Groups are retired once they are here: a crash must take back neither the file nor the folder.
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


def recording_files(path: Path) -> list[Path]:
    """The files of a recording in the order in which they were made; none when there are none.

    Args:
        path: one of them, their folder, or the directory of the run that made them.
    """
    if path.is_file():
        return [path]
    folder = path / FOLDER if (path / FOLDER).is_dir() else path
    found = [(match, file) for file in folder.glob("groups-*") if (match := _NAME.fullmatch(file.name))]
    return [file for _, file in sorted(found, key=lambda item: (int(item[0][1]), int(item[0][2])))]


def greatest_epoch(folder: Path) -> int:
    """Greatest epoch that wrote a file into the folder of a recording; 0 when none did."""
    return max((int(match[1]) for file in folder.glob("groups-*") if (match := _NAME.fullmatch(file.name))), default=0)


def read_header(path: Path) -> Header | None:
    """The header of a recording; None when there is no recording, or nothing in it.

    Args:
        path: as of `recording_files`.

    Raises:
        ConfigError: a file is none of a recording, or of another version of it.
    """
    return next((header for file in recording_files(path) if (header := _head(file)[0]) is not None), None)


def read_groups(path: Path) -> Iterator[RecordedGroup]:
    """The groups of a recording in the order in which they were recorded, each once.

    Args:
        path: as of `recording_files`.

    Raises:
        ConfigError: a file is none of a recording, or of another recording than the first.
        WireError: a file is damaged in the middle, or holds something else than groups.
    """
    first: Header | None = None
    seen: set[int] = set()
    for file in recording_files(path):
        header, groups = read_file(file)
        if header is None:
            continue  # its recorder died before it wrote anything
        first = first or header
        if header.id != first.id:
            raise ConfigError(f"{file} is of another recording than those before it", "keep each one in its folder")
        for group in groups:
            if group.gid not in seen and not group.lost:
                seen.add(group.gid)
                yield group


def read_file(file: Path) -> tuple[Header | None, Iterator[RecordedGroup]]:
    """Header and groups of one file as they are written there; no header: a crash left nothing in it.

    Raises:
        ConfigError: it is no file of a recording, or of another version of it.
        WireError: while the groups are read: it is damaged in the middle, or holds something else than groups.
    """
    header, maps = _head(file)
    return header, _groups(file, maps)


def _groups(file: Path, maps: Iterator[dict[str, Any]]) -> Iterator[RecordedGroup]:
    for record in maps:
        try:
            yield msgspec.convert(record, RecordedGroup)
        except msgspec.ValidationError as error:
            raise WireError(f"{file}: not a recorded group: {error}") from error


def _head(file: Path) -> tuple[Header | None, Iterator[dict[str, Any]]]:
    """The header of a file, None when a crash cut it off, and the rest of its maps."""
    maps = _maps(file)
    try:
        first = next(maps, None)
        header = None if first is None else msgspec.convert(first, Header)
    except (WireError, OSError, msgspec.ValidationError) as error:
        raise ConfigError(f"{file} is no file of a recording: {error}", _HINT) from error
    if header is not None and header.schema != _SCHEMA:
        raise ConfigError(f"{file} has schema {header.schema}, this program knows {_SCHEMA}", _HINT)
    return header, maps


def _maps(file: Path) -> Iterator[dict[str, Any]]:
    unpacker = msgpack.Unpacker(raw=False, max_buffer_size=_MAX_GROUP_BYTES, strict_map_key=True)
    try:
        with file.open("rb") as source:
            for plain in _frames(source):
                unpacker.feed(plain)
                for record in unpacker:
                    if not isinstance(record, dict):
                        raise WireError(f"{file}: something that is no map before byte {unpacker.tell()}")
                    yield record
    except (zstandard.ZstdError, ValueError, msgpack.exceptions.UnpackException) as error:
        if isinstance(error, WireError):
            raise
        raise WireError(f"{file}: not a file of a recording near byte {unpacker.tell()}: {error}") from error


def _frames(source: BinaryIO) -> Iterator[bytes]:
    """What is in the frames of a file, one frame after the other, so that all before a damaged one is read."""
    decompressor = zstandard.ZstdDecompressor()
    frame = decompressor.decompressobj()
    while chunk := source.read(_READ_BYTES):
        while chunk:
            yield frame.decompress(chunk)
            chunk = b""
            if frame.eof:
                chunk, frame = frame.unused_data, decompressor.decompressobj()
