"""Files of closed groups: their format, and how they are read.

A run keeps groups in three places: its archive, its recording (`up --rollout-only`), and the scores of
`streamrl rescore` (`rescored/NAME`). All are files `groups-EPOCH-PART.msgpack.zst`: MessagePack maps, one after the
other, compressed with zstandard (`zstd -dc FILE` gives the maps). The first map of a file is the `Header`, the others
are groups. Groups are added in blocks, each a zstandard frame of its own; a frame that a crash cut off ends the file.
A process writes a group again if the one before it died before it was sure, so a group may be there twice.

```python
from streamrl.archive import read_archive

for group in read_archive(Path("runs/demo")):
    for sample in group.samples:
        print(group.group_id, sample.number, sample.score.value, sample.score.parts, sample.response.text)
```
"""

from __future__ import annotations

import itertools
import re
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, Final

import msgspec
import zstandard

from streamrl import wire
from streamrl.config import ImagesConfig
from streamrl.errors import ConfigError, WireError
from streamrl.images.store import ImageStore, files_beside
from streamrl.queues.records import ClosedGroup

# directories in that of the run
ARCHIVE: Final = "archive"
FOLDER: Final = "recording"
RESCORED: Final = "rescored"  # one directory below for each name
EVALUATION: Final = "evaluation"  # held-out groups, in the directory of the archive
_SCHEMA: Final = "streamrl.recording/1"
_BLOBS: Final = b"\xa5blobs"  # the key in MessagePack
_NAME: Final = re.compile(r"groups-(\d+)-(\d+)\.msgpack\.zst")
_MAX_GROUP_BYTES: Final = 1 << 30
_READ_BYTES: Final = 1 << 14  # small, because so little can become a thousand times as much
_HINT: Final = "name a recording: RUN_DIR/recording of `streamrl up --rollout-only`, or one of its files"


class Header(msgspec.Struct, frozen=True, kw_only=True):
    """What all groups of a recording have in common.

    `id` is the recording's; responses were sampled with `model` and `temperature`. Without `logprobs` the
    log-probabilities are zeros, and such groups cannot be trained. A thinned file holds one in `one_in` of its groups.
    """

    schema: str = _SCHEMA
    id: str
    run: str
    model: str
    temperature: float
    logprobs: bool = True
    one_in: int = 1


class RecordedGroup(msgspec.Struct, frozen=True, kw_only=True):
    """One closed group: its id in the run that made it, its prompt, and payload and score of each usable response.

    `causes` are the numbers of the dead responses and why they died; the usable ones have the other numbers, in order.
    `attempt` and `version` are those of its admission; `at` is when it was recorded, in seconds since 1970, 0 if
    unknown. Until November 2026 a record without responses said that this version of the group is lost.
    """

    group_id: int = msgspec.field(name="gid")
    prompt: bytes
    samples: list[tuple[bytes, bytes]]
    causes: list[tuple[int, str]] = []
    attempt: int = 1
    version: int = 0
    at: float = 0.0

    @classmethod
    def of(cls, group: ClosedGroup) -> RecordedGroup:
        """Of dead samples only the cause is kept."""
        prompt, samples = images_once(group.prompt, [group.samples[k] for k in sorted(group.samples)])
        return cls(
            group_id=group.group_id,
            prompt=prompt,
            samples=samples,
            causes=sorted(group.causes.items()),
            attempt=group.attempt,
            version=group.version,
            at=time.time(),
        )

    @property
    def numbers(self) -> list[int]:
        """The number of each usable response in its group, in the order of `samples`."""
        dead = {number for number, _ in self.causes}
        alive = (number for number in itertools.count() if number not in dead)
        return list(itertools.islice(alive, len(self.samples)))


def images_once(prompt: bytes, samples: list[tuple[bytes, bytes]]) -> tuple[bytes, list[tuple[bytes, bytes]]]:
    """The group with all its small images beside the prompt, each once: samples of a group often show the same ones."""
    if not any(_BLOBS in payload for payload, _ in samples):
        return prompt, samples
    try:
        asked = wire.decode(prompt, wire.Prompt)
        answers = [wire.decode(payload, wire.Sample) for payload, _ in samples]
    except WireError:
        return prompt, samples  # whoever reads it says what is wrong
    blobs = dict.fromkeys([*asked.blobs, *(data for answer in answers for data in answer.blobs)])
    bare = [wire.encode(msgspec.structs.replace(answer, blobs=[])) for answer in answers]
    scores = [score for _, score in samples]
    return wire.encode(msgspec.structs.replace(asked, blobs=list(blobs))), list(zip(bare, scores, strict=True))


def recording_files(path: Path) -> list[Path]:
    """The files of a recording in the order in which they were made.

    `path` is one of them, their folder, or the directory of the run that made them.
    """
    if path.is_file():
        return [path]
    folder = path / FOLDER if (path / FOLDER).is_dir() else path
    found = [(match, file) for file in folder.glob("groups-*") if (match := _NAME.fullmatch(file.name))]
    return [file for _, file in sorted(found, key=lambda item: (int(item[0][1]), int(item[0][2])))]


def greatest_epoch(folder: Path) -> int:
    """Greatest epoch that wrote a file into the folder of a recording; 0: none did."""
    return max((int(match[1]) for file in folder.glob("groups-*") if (match := _NAME.fullmatch(file.name))), default=0)


def read_header(path: Path) -> Header | None:
    """The header of a recording; None if there is none, or nothing in it. Arguments and errors as of `read_groups`."""
    return next((header for file in recording_files(path) if (header := read_file(file)[0]) is not None), None)


def read_groups(path: Path) -> Iterator[RecordedGroup]:
    """The groups of a recording in the order in which they were recorded, each once; `path` as of `recording_files`.

    `ConfigError`: a file is not of a recording, or of another recording than the first. `WireError`: a file is damaged
    in the middle, or holds something else than groups.
    """
    first: Header | None = None
    seen: set[int] = set()
    for file in recording_files(path):
        header, groups = read_file(file)
        if header is None:
            continue  # its recorder died before it wrote anything
        first = first or header
        if header.id != first.id:
            raise ConfigError(
                f"{file} belongs to another recording than the files before it", "keep each recording in its own folder"
            )
        for group in groups:
            if group.group_id not in seen and group.samples:
                seen.add(group.group_id)
                yield group


def read_file(file: Path) -> tuple[Header | None, Iterator[RecordedGroup]]:
    """Header and groups of one file as they are written there; no header: a crash cut it off.

    `ConfigError`: not a recording, or of another version; `WireError`, while groups are read: damaged.
    """
    maps = _maps(file)
    try:
        first = next(maps, None)
        header = None if first is None else msgspec.convert(first, Header)
    except (WireError, OSError, msgspec.ValidationError) as error:
        raise ConfigError(f"{file} is not a file of a recording: {error}", _HINT) from error
    if header is not None and header.schema != _SCHEMA:
        raise ConfigError(f"{file} has schema {header.schema}, this program knows {_SCHEMA}", _HINT)
    return header, _groups(file, maps)


def _groups(file: Path, maps: Iterator[dict[str, Any]]) -> Iterator[RecordedGroup]:
    for record in maps:
        try:
            yield msgspec.convert(record, RecordedGroup)
        except msgspec.ValidationError as error:
            raise WireError(f"{file}: not a recorded group: {error}") from error


def _maps(file: Path) -> Iterator[dict[str, Any]]:
    try:
        with file.open("rb") as source:
            yield from wire.unpack_frames(_frames(source), file, _MAX_GROUP_BYTES)
    except zstandard.ZstdError as error:
        raise WireError(f"{file}: damaged: {error}") from error


def _frames(source: BinaryIO) -> Iterator[bytes]:
    """Content of the frames of a file, one after the other, so that all before a damaged one is read."""
    decompressor = zstandard.ZstdDecompressor()
    frame = decompressor.decompressobj()
    while chunk := source.read(_READ_BYTES):
        while chunk:
            yield frame.decompress(chunk)
            chunk = b""
            if frame.eof:
                chunk, frame = frame.unused_data, decompressor.decompressobj()


@dataclass(frozen=True, slots=True)
class ArchivedSample:
    """One response: its number in the group, what was sampled, and its score."""

    number: int
    response: wire.Sample
    score: wire.SampleScore


@dataclass(frozen=True, slots=True)
class ArchivedGroup:
    """One closed group."""

    group_id: int
    attempt: int  # 1, or more after a replay
    version: int  # of the weights at its admission
    at: float  # when it was archived, in seconds since 1970; 0 where that is not known
    prompt: wire.Prompt
    samples: tuple[ArchivedSample, ...]  # responses with a score, by number
    causes: dict[int, str]  # why the others died, by number
    header: Header  # of the file it comes from
    raw: RecordedGroup  # as it is in the file
    images: ImageStore  # large ones that are files of the run


class ArchiveReading:
    """Iterates over groups in the order in which they were written, each once; may be iterated again.

    Of a group that was written twice the last version counts: if Redis has lost seconds, the group was generated again.
    So the files are read twice, first for the ids alone. Groups that are appended in the meantime are left out.
    `problems` says what could not be read, and is complete after an iteration; a damaged file is read up to there.
    """

    def __init__(self, files: list[Path]) -> None:
        self.files = files
        self.problems: list[str] = []

    def __iter__(self) -> Iterator[ArchivedGroup]:
        return self._last_versions(None)

    def find(self, group_id: int) -> list[ArchivedGroup]:
        """All attempts at one group, ascending."""
        return sorted(self._last_versions(group_id), key=lambda group: group.attempt)

    def _last_versions(self, wanted: int | None) -> Iterator[ArchivedGroup]:
        last = {
            (group.group_id, group.attempt): place
            for place, _, group in self._read()
            if wanted is None or group.group_id == wanted
        }
        self.problems.clear()
        for place, header, group in self._read():
            if last.get((group.group_id, group.attempt)) != place or not group.samples:
                continue
            try:
                yield _opened(header, group, place[0])
            except WireError as error:
                self.problems.append(f"group {group.group_id}: {error.message}")

    def _read(self) -> Iterator[tuple[tuple[Path, int], Header, RecordedGroup]]:
        """All groups with their places: the file, and how many versions of the group are before it in that file."""
        for file in self.files:
            versions: Counter[tuple[int, int]] = Counter()  # thinning the file changes none of these numbers
            try:
                header, groups = read_file(file)
                if header is None:
                    continue
                for group in groups:
                    versions[group.group_id, group.attempt] += 1
                    yield (file, versions[group.group_id, group.attempt]), header, group
            except FileNotFoundError:
                continue  # the last of its groups went meanwhile (`archive.max_bytes`)
            except (WireError, ConfigError) as error:
                self.problems.append(error.message)


def read_archive(path: Path, *, evaluation: bool = False) -> ArchiveReading:
    """Read closed groups with their scores.

    Args:
        path: directory of a run (its archive, or its recording where there is no archive), of an archive or a
            recording, `RUN_DIR/rescored/NAME`, or one file of them.
        evaluation: held-out groups instead of training groups.

    Raises:
        ConfigError: there are none, or the file is of another program or version.
    """
    files = archive_files(path, evaluation=evaluation)
    if files == [path]:
        read_file(path)
    if not files:
        what = "held-out groups" if evaluation else "groups"
        raise ConfigError(
            f"{path} has no archived {what}",
            "a run keeps them with archive.enabled: true; `streamrl up --rollout-only` records them",
        )
    return ArchiveReading(files)


def archive_files(path: Path, *, evaluation: bool = False) -> list[Path]:
    """The files that `read_archive` reads; none when there are none."""
    if path.is_file():
        return [path]
    folders = [path / ARCHIVE, path / FOLDER, path]
    found = (recording_files(folder / EVALUATION if evaluation else folder) for folder in folders if folder.is_dir())
    return next((files for files in found if files), [])


def _opened(header: Header, group: RecordedGroup, file: Path) -> ArchivedGroup:
    samples = tuple(
        ArchivedSample(number, wire.decode(payload, wire.Sample), wire.decode(score, wire.SampleScore))
        for number, (payload, score) in zip(group.numbers, group.samples, strict=True)
    )
    return ArchivedGroup(
        group_id=group.group_id,
        attempt=group.attempt,
        version=group.version,
        at=group.at,
        prompt=wire.decode(group.prompt, wire.Prompt),
        samples=samples,
        causes=dict(group.causes),
        header=header,
        raw=group,
        images=ImageStore(ImagesConfig(), files_beside(file)),
    )
