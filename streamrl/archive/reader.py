"""Reading what was kept of groups: the archive of a run, its recording, and scores that were made again.

```python
from streamrl.archive import read_archive

for group in read_archive(Path("runs/demo")):
    for sample in group.samples:
        print(group.gid, sample.number, sample.score.value, sample.score.parts, sample.response.text)
```
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from streamrl import wire
from streamrl.archive.recording import FOLDER, Header, RecordedGroup, read_file, recording_files
from streamrl.archive.writer import ARCHIVE, EVALUATION
from streamrl.errors import ConfigError, WireError

RESCORED: Final = "rescored"
"""Directory in that of the run: scores that were made again, one directory for each name."""


@dataclass(frozen=True, slots=True)
class ArchivedSample:
    """One response: its number in the group, what was sampled, and what the rewards said of it."""

    number: int
    response: wire.Sample
    score: wire.Score


@dataclass(frozen=True, slots=True)
class ArchivedGroup:
    """One closed group.

    Attributes:
        gid: its id in the run.
        attempt: 1, or more after a replay.
        version: of the weights at its admission.
        at: when it was archived, in seconds since 1970; 0 where that is not known.
        prompt: what was asked.
        samples: responses with a score, by number.
        causes: why the others died, by number.
        header: of the file it comes from.
        raw: as it is in the file.
    """

    gid: int
    attempt: int
    version: int
    at: float
    prompt: wire.Prompt
    samples: tuple[ArchivedSample, ...]
    causes: dict[int, str]
    header: Header
    raw: RecordedGroup


class ArchiveReading:
    """Iterates over groups in the order in which they were written, each once; may be iterated again.

    A group that stands there twice is taken as it stands there last: when Redis has lost seconds a group is generated
    again, and the last one is the one that counted. When that one was lost, none is taken. So the files are read twice,
    first for the ids alone. What is appended in the meantime is left out.

    Attributes:
        files: that are read.
        problems: what could not be read or is lost, for people; complete after an iteration. A damaged file is read up
            to there.

    Args:
        files: of recordings, in the order in which they were made.
    """

    def __init__(self, files: list[Path]) -> None:
        self.files = files
        self.problems: list[str] = []

    def __iter__(self) -> Iterator[ArchivedGroup]:
        last: dict[tuple[int, int], int] = {}
        for place, (_, group) in enumerate(self._read()):
            last[group.gid, group.attempt] = place
        self.problems.clear()
        for place, (header, group) in enumerate(self._read()):
            if last.get((group.gid, group.attempt)) != place:
                continue
            if group.lost:
                self.problems.append(_lost(group))
                continue
            try:
                yield _opened(header, group)
            except WireError as error:
                self.problems.append(f"group {group.gid}: {error.message}")

    def find(self, gid: int) -> list[ArchivedGroup]:
        """All attempts at one group, ascending; none when it is not here."""
        self.problems.clear()
        found: dict[int, ArchivedGroup] = {}
        lost: dict[int, str] = {}
        for header, group in self._read():
            if group.gid != gid:
                continue
            if group.lost:
                found.pop(group.attempt, None)
                lost[group.attempt] = _lost(group)
                continue
            lost.pop(group.attempt, None)
            try:
                found[group.attempt] = _opened(header, group)
            except WireError as error:
                found.pop(group.attempt, None)
                self.problems.append(f"group {gid}: {error.message}")
        self.problems += lost.values()
        return [found[attempt] for attempt in sorted(found)]

    def _read(self) -> Iterator[tuple[Header, RecordedGroup]]:
        for file in self.files:
            try:
                header, groups = read_file(file)
                if header is not None:
                    yield from ((header, group) for group in groups)
            except FileNotFoundError:
                continue  # `archive.files` removed it meanwhile
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


def _lost(group: RecordedGroup) -> str:
    return f"group {group.gid}, attempt {group.attempt}: it closed again, and how it closed then is lost (full disk)"


def _opened(header: Header, group: RecordedGroup) -> ArchivedGroup:
    """Decode a group; `WireError` when a message in it is none of ours."""
    samples = tuple(
        ArchivedSample(number, wire.decode(payload, wire.Sample), wire.decode(score, wire.Score))
        for number, (payload, score) in zip(group.numbers, group.samples, strict=True)
    )
    return ArchivedGroup(
        gid=group.gid,
        attempt=group.attempt,
        version=group.version,
        at=group.at,
        prompt=wire.decode(group.prompt, wire.Prompt),
        samples=samples,
        causes=dict(group.causes),
        header=header,
        raw=group,
    )
