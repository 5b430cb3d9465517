"""Figures of a run from the files it left: how long, how fast, who waited for whom, how stale.

All times are of the monotonic clock of the machine, which all roles of `streamrl up` share.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any, Final, TypeAlias

import numpy as np
import orjson

from streamrl.producers.meter import TICK_SECONDS

Interval: TypeAlias = tuple[float, float]
LEARNER_FILE: Final = "learner.0.jsonl"


@dataclass(slots=True)
class LearnerFigures:
    """What the lines of the learner add up to.

    Attributes:
        steps: by number, the last line of each step (a step of a lost branch is done again).
        busy: intervals of computing, of all learners of the run, ascending and apart.
        staleness: trained tokens by age in steps.
    """

    steps: dict[int, dict[str, Any]] = field(default_factory=dict)
    busy: list[Interval] = field(default_factory=list)
    staleness: Counter[int] = field(default_factory=Counter)

    @property
    def train_seconds(self) -> float:
        """From the first work on a leased group to the end of the last step."""
        return self.busy[-1][1] - self.busy[0][0] if self.busy else 0.0

    @property
    def idle_fraction(self) -> float:
        """Share of `train_seconds` in which the learner did not compute."""
        return 1 - sum(end - start for start, end in self.busy) / self.train_seconds if self.train_seconds else 0.0

    def total(self, key: str) -> float:
        """Sum of a number over all steps."""
        return float(sum(line.get(key, 0) for line in self.steps.values()))


def read_learner(run_dir: Path) -> LearnerFigures:
    """Add up the lines of the learner's first rank; zeros when it never made a step."""
    figures = LearnerFigures()
    busy: list[Interval] = []
    for line in read_lines(run_dir / "metrics" / LEARNER_FILE):
        busy.extend((float(start), float(end)) for start, end in line.get("busy", ()))
        if "loss" in line and "step" in line:
            figures.steps[int(line["step"])] = line
    figures.busy = merged(busy)
    for line in figures.steps.values():
        figures.staleness.update({int(age): int(tokens) for age, tokens in line["staleness"].items()})
    return figures


def merged(intervals: Iterable[Interval]) -> list[Interval]:
    """The same time as ascending intervals that do not overlap."""
    result: list[Interval] = []
    for start, end in sorted(intervals):
        if result and start <= result[-1][1]:
            result[-1] = (result[-1][0], max(end, result[-1][1]))
        else:
            result.append((start, end))
    return result


@dataclass(slots=True)
class RolloutFigures:
    """What the lines of all rollout replicas add up to.

    Attributes:
        ticks: `(seconds, tokens sampled in the tick that ends then)` of all replicas.
        idle_seconds: time within the window in which a replica's engine had nothing to decode, summed over replicas.
        covered_seconds: time within the window that the lines speak of, summed over replicas.
    """

    ticks: list[tuple[float, int]] = field(default_factory=list)
    idle_seconds: float = 0.0
    covered_seconds: float = 0.0

    @property
    def idle_fraction(self) -> float:
        """Share of the replicas' time within the window in which they had nothing to decode."""
        return self.idle_seconds / self.covered_seconds if self.covered_seconds else 0.0


def read_rollouts(run_dir: Path, window: Interval) -> RolloutFigures:
    """Add up the lines of all replicas; idle time is counted within `window` only (the learner's train time)."""
    figures = RolloutFigures()
    for path in sorted((run_dir / "metrics").glob("rollout.*.jsonl")):
        lines = list(read_lines(path))
        for line in lines:
            figures.ticks.extend((float(at), int(tokens)) for at, tokens in line.get("timeline", ()))
        for before, after in pairwise(line for line in lines if "idle_seconds" in line):
            idle = after["idle_seconds"] - before["idle_seconds"]
            seconds = after["mono"] - before["mono"]
            if idle < 0 or seconds <= 0:
                continue  # another process of the same replica, which counts from 0
            covered = max(0.0, min(after["mono"], window[1]) - max(before["mono"], window[0]))
            figures.covered_seconds += covered
            figures.idle_seconds += covered * min(1.0, idle / seconds)
    return figures


def share_within(ticks: Sequence[tuple[float, int]], busy: Sequence[Interval]) -> float:
    """Share of all sampled tokens that were sampled while the learner computed.

    Args:
        ticks: `(end of a tick, tokens sampled in it)`; within its 50 ms the pace is taken to be even.
        busy: ascending intervals that do not overlap.
    """
    total = sum(tokens for _, tokens in ticks)
    if not total or not busy:
        return 0.0
    ends, tokens = (np.asarray(column, dtype=np.float64) for column in zip(*ticks, strict=True))
    edges = np.asarray([edge for interval in busy for edge in interval])
    spent = np.asarray([part for start, end in busy for part in (0.0, end - start)]).cumsum()
    overlap = np.interp(ends, edges, spent) - np.interp(ends - TICK_SECONDS, edges, spent)
    return float((tokens * overlap / TICK_SECONDS).sum() / total)


def read_lines(path: Path) -> Iterable[dict[str, Any]]:
    """Yield the JSON objects of a file of lines; nothing when it is missing, and not a line that a crash cut off."""
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        return
    for line in data.split(b"\n"):
        try:
            record = orjson.loads(line)
        except orjson.JSONDecodeError:
            continue
        if isinstance(record, dict):
            yield record
