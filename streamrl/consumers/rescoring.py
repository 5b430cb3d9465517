"""New scores of recorded groups by other rewards, beside the old scores.

```
groups of an archive -> samples, a few at a time -> Scorer -> RUN_DIR/rescored/NAME, a recording with the new scores
```
A sample that cannot be scored is listed with its reason; it never gets a 0. Its group is not written, so the next call
with the same name tries only such groups again; `drop_failed` writes the group without the sample.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import msgspec
import numpy as np
import numpy.typing as npt
import orjson

from streamrl import wire
from streamrl.archive.reader import (
    EVALUATION,
    RESCORED,
    ArchivedGroup,
    ArchiveReading,
    Header,
    RecordedGroup,
    archive_files,
    greatest_epoch,
    recording_files,
)
from streamrl.archive.writer import RecordingWriter
from streamrl.atomic import write_durably
from streamrl.consumers.reward import RewardSample
from streamrl.errors import CannotCreate, ConfigError, StreamrlError, writing

ScoreGroup = Callable[[Sequence[RewardSample]], Awaitable[Sequence[wire.SampleScore | StreamrlError]]]
"""Scores the samples of one group: for each, a score or why there is none."""

_ABOUT: Final = "rescored.json"
_FILE_BYTES: Final = 256 << 20
_SYNC_SECONDS: Final = 1.0
_LEAST: Final = 2
"""Responses of a group below which there is no contrast."""

Key = tuple[int, int, int]
"""Group, attempt, number of the response."""


@dataclass(frozen=True, slots=True)
class Failure:
    group_id: int
    attempt: int
    number: int
    why: str


@dataclass(slots=True)
class RescoreResult:
    """Counts of groups and responses. `keys`, `old` and `new` are in the same order."""

    groups: int = 0
    scored: int = 0  # responses scored now
    kept: int = 0  # responses that already had a score under this name
    unwritten: int = 0  # groups left out of the new recording because of failures
    failures: list[Failure] = field(default_factory=list)
    keys: list[Key] = field(default_factory=list)
    old: list[float] = field(default_factory=list)
    new: list[float] = field(default_factory=list)
    seconds: float = 0.0

    def add(self, key: Key, old: float, new: float) -> None:
        self.keys.append(key)
        self.old.append(old)
        self.new.append(new)


class RescoredSet:
    """The recording with the new scores: `RUN_DIR/rescored/NAME`, for held-out groups `evaluation` in it.

    `ConfigError`: the name holds scores of other rewards, or its files are damaged. `CannotCreate`: no space.
    """

    def __init__(self, run_dir: Path, name: str, about: dict[str, Any], *, evaluation: bool) -> None:
        self.folder = run_dir / RESCORED / name
        self.files = self.folder / EVALUATION if evaluation else self.folder
        self._writers: dict[str, RecordingWriter] = {}
        self._synced_at = time.monotonic()
        self._claim(about)
        self.kept = self._read(evaluation=evaluation)

    @staticmethod
    def remove(run_dir: Path, name: str, *, evaluation: bool) -> None:
        """Remove one side of a name's scores, and no other files. A repeat does nothing."""
        folder = run_dir / RESCORED / name / (EVALUATION if evaluation else "")
        if (folder / _ABOUT).exists():
            for file in recording_files(folder):
                file.unlink()
            (folder / _ABOUT).unlink()

    def _claim(self, about: dict[str, Any]) -> None:
        file, data = self.files / _ABOUT, orjson.dumps(about, option=orjson.OPT_INDENT_2 | orjson.OPT_SORT_KEYS)
        with writing(file):
            there = file.read_bytes() if file.exists() else None
            if there is None:
                self.files.mkdir(parents=True, exist_ok=True)
                write_durably(file, data)
        if there is not None and there != data:
            raise ConfigError(
                f"{self.files} holds scores of other rewards or of another source ({_ABOUT} there names them)",
                "choose another --into, or replace them with --force",
            )

    def _read(self, *, evaluation: bool) -> dict[tuple[int, int], dict[int, wire.SampleScore]]:
        reading = ArchiveReading(archive_files(self.folder, evaluation=evaluation))
        found = {
            (group.group_id, group.attempt): {sample.number: sample.score for sample in group.samples}
            for group in reading
        }
        if reading.problems:
            raise ConfigError(f"{self.files}: {reading.problems[0]}", "make the scores anew with --force")
        return found

    def add(self, group: ArchivedGroup, scores: dict[int, wire.SampleScore], causes: dict[int, str]) -> None:
        """Write a group with its new scores, durable within a second. `CannotCreate`: no space."""
        by_number = dict(zip(group.raw.numbers, group.raw.samples, strict=True))
        record = RecordedGroup(
            group_id=group.group_id,
            prompt=group.raw.prompt,
            samples=[(by_number[number][0], wire.encode(scores[number])) for number in sorted(scores)],
            causes=sorted((group.causes | causes).items()),
            attempt=group.attempt,
            version=group.version,
            at=time.time(),
        )
        self._writer(group.header).add(record)
        if time.monotonic() >= self._synced_at + _SYNC_SECONDS:
            self.sync()

    def sync(self) -> None:
        self._synced_at = time.monotonic()
        try:
            for writer in self._writers.values():
                writer.sync()
        except OSError as error:
            raise CannotCreate(f"{self.files}: {error.strerror or error}", "free space and call it again") from error

    def close(self) -> None:
        for writer in self._writers.values():
            writer.close()

    def _writer(self, header: Header) -> RecordingWriter:
        if header.id not in self._writers:
            name = hashlib.sha256(f"{header.id} {self.folder.name}".encode()).hexdigest()[:32]
            mine = msgspec.structs.replace(header, id=name)
            epoch = greatest_epoch(self.files) + 1  # the writer makes the folder
            self._writers[header.id] = RecordingWriter(self.files, epoch, mine, _FILE_BYTES)
        return self._writers[header.id]


async def rescore_groups(
    groups: Iterable[ArchivedGroup],
    score: ScoreGroup,
    into: RescoredSet,
    *,
    concurrency: int,
    drop_failed: bool = False,
    on_progress: Callable[[RescoreResult], None] = lambda _: None,
) -> RescoreResult:
    """Score recorded groups again. Cancellation keeps what was written; the same call continues from there.

    Groups are read in a thread, and `concurrency` of them are scored at a time. `drop_failed` also writes groups that
    lost responses, if two are left. `on_progress` is called after each group.

    Raises:
        CannotCreate: no space for the scores.
        StreamrlError: the rewards cannot continue at all.
    """
    outcome, started = RescoreResult(), time.monotonic()
    slots = asyncio.Semaphore(concurrency)

    async def one(group: ArchivedGroup) -> None:
        try:
            await _one(group, score, into, outcome, drop_failed=drop_failed)
            outcome.seconds = time.monotonic() - started
            on_progress(outcome)
        finally:
            slots.release()

    try:
        async with asyncio.TaskGroup() as tasks, contextlib.aclosing(_ahead(groups)) as coming:
            async for group in coming:
                await slots.acquire()
                tasks.create_task(one(group), name=f"group {group.group_id}")
    finally:
        await asyncio.to_thread(into.sync)
    outcome.seconds = time.monotonic() - started
    return outcome


async def _ahead(groups: Iterable[ArchivedGroup]) -> AsyncGenerator[ArchivedGroup, None]:
    """The groups, each read in a thread, so that reading and unpacking do not delay calls in flight."""
    iterator = iter(groups)
    while (group := await asyncio.to_thread(next, iterator, None)) is not None:
        yield group


async def _one(
    group: ArchivedGroup, score: ScoreGroup, into: RescoredSet, outcome: RescoreResult, *, drop_failed: bool
) -> None:
    outcome.groups += 1
    there = into.kept.get((group.group_id, group.attempt))
    if there is not None:
        for sample in group.samples:
            if (new := there.get(sample.number)) is not None:
                outcome.kept += 1
                outcome.add((group.group_id, group.attempt, sample.number), sample.score.value, new.value)
        return
    if not group.samples:
        return
    about = group.group_id
    samples = [RewardSample.of(group.prompt, each.response, about, each.number, group.images) for each in group.samples]
    results = await score(samples)
    scores: dict[int, wire.SampleScore] = {}
    causes: dict[int, str] = {}
    for sample, result in zip(group.samples, results, strict=True):
        if isinstance(result, wire.SampleScore):
            scores[sample.number] = result
            outcome.add((group.group_id, group.attempt, sample.number), sample.score.value, result.value)
        else:
            causes[sample.number] = result.message
            outcome.failures.append(Failure(group.group_id, group.attempt, sample.number, result.message))
    outcome.scored += len(scores)
    if not causes or (drop_failed and len(scores) >= _LEAST):
        into.add(group, scores, causes)
    else:
        outcome.unwritten += 1


Values = npt.NDArray[np.float64]

_SAME: Final = 1e-6


@dataclass(frozen=True, slots=True)
class Moments:
    """Mean, population standard deviation, least and greatest of one set of scores."""

    mean: float
    std: float
    min: float
    max: float


@dataclass(frozen=True, slots=True)
class Comparison:
    samples: int  # responses with both scores
    groups: int  # groups with at least one of them
    old: Moments
    new: Moments
    same: float  # share of equal scores, to 1e-6 of the greater one
    agreement: float  # share on the same side of the threshold
    pearson: float | None  # linear correlation; None if one side is constant
    spearman: float | None  # correlation of the ranks
    order: float | None  # share of `pairs` with the same order in both, ties counted half: this is what training sees
    pairs: int  # pairs of responses to one prompt with different old scores
    zero_variance_old: int  # groups of equal old scores, which give no gradient
    zero_variance_new: int


def compare(old: Sequence[float], new: Sequence[float], groups: Sequence[Any], threshold: float) -> Comparison:
    """Compare finite scores of the same responses. Equal `groups` share a prompt; above `threshold` is right."""
    a, b = np.asarray(old, dtype=np.float64), np.asarray(new, dtype=np.float64)
    won = pairs = 0.0
    zero_variance_old = zero_variance_new = members = 0
    for rows in _by_group(groups):
        won_here, pairs_here = _order(a[rows], b[rows])
        won, pairs, members = won + won_here, pairs + pairs_here, members + 1
        zero_variance_old += bool(np.all(a[rows] == a[rows][0]))
        zero_variance_new += bool(np.all(b[rows] == b[rows][0]))
    return Comparison(
        samples=len(a),
        groups=members,
        old=_moments(a),
        new=_moments(b),
        same=float(np.mean(_equal(a, b))),
        agreement=float(np.mean((a > threshold) == (b > threshold))),
        pearson=_correlation(a, b),
        spearman=_correlation(_ranks(a), _ranks(b)),
        order=won / pairs if pairs else None,
        pairs=int(pairs),
        zero_variance_old=zero_variance_old,
        zero_variance_new=zero_variance_new,
    )


def most_different(old: Sequence[float], new: Sequence[float], count: int) -> list[int]:
    """Indices of the responses whose ranks differ most between the sets, so that scales need not be alike."""
    a, b = np.asarray(old, dtype=np.float64), np.asarray(new, dtype=np.float64)
    ranks, values = np.abs(_ranks(a) - _ranks(b)), np.abs(a / 2 - b / 2)
    order = np.lexsort((-values, -ranks))
    return [int(index) for index in order[~_equal(a, b)[order]][:count]]


def _by_group(groups: Sequence[Any]) -> Iterator[npt.NDArray[np.int64]]:
    rows: dict[Any, list[int]] = {}
    for row, group in enumerate(groups):
        rows.setdefault(group, []).append(row)
    return map(np.asarray, rows.values())


def _order(old: Values, new: Values) -> tuple[float, int]:
    """Pairs that `new` orders as `old` does, ties counted half, and all pairs that differ in `old`."""
    apart = old[:, None] > old
    above, tied = (new[:, None] > new)[apart], (new[:, None] == new)[apart]
    return float(above.sum() + tied.sum() / 2), int(apart.sum())


def _equal(a: Values, b: Values) -> npt.NDArray[np.bool_]:
    return np.abs(a / 2 - b / 2) <= _SAME / 2 * np.maximum(np.abs(a), np.abs(b))


def _moments(values: Values) -> Moments:
    scale = float(np.max(np.abs(values))) or 1.0  # so that sums of huge scores do not overflow
    small = values / scale
    return Moments(
        mean=float(np.mean(small)) * scale,
        std=float(np.std(small)) * scale,
        min=float(np.min(values)),
        max=float(np.max(values)),
    )


def _ranks(values: Values) -> Values:
    _, inverse, counts = np.unique(values, return_inverse=True, return_counts=True)
    ends = np.cumsum(counts)
    return np.asarray(((ends - counts / 2) / len(values))[inverse], dtype=np.float64)


def _correlation(a: Values, b: Values) -> float | None:
    if np.all(a == a[0]) or np.all(b == b[0]):
        return None
    x, y = (values / np.max(np.abs(values)) for values in (a, b))
    x, y = x - x.mean(), y - y.mean()
    norm = float(np.sqrt((x * x).sum() * (y * y).sum()))
    return float((x * y).sum() / norm) if norm > 0 else None
