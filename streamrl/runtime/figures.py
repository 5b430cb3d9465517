"""Figures of a run from the files it left: how long, how fast, who waited for whom, how stale.

All times are of the monotonic clock of the machine, which all roles of `streamrl up` share.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, TypeAlias

import numpy as np
import numpy.typing as npt

from streamrl.monitor.tail import Tail
from streamrl.producers.meter import TICK_SECONDS

Interval: TypeAlias = tuple[float, float]
LEARNER_FILE: Final = "learner.0.jsonl"


@dataclass(slots=True)
class LearnerFigures:
    """What the lines of the learner add up to.

    Attributes:
        steps: by number, the last line of each step (a step of a lost branch is done again).
        spans: for each learner of the run, from its first groups to the end of its last step; ascending.
        busy: intervals of computing within the spans, ascending and apart.
        staleness: trained tokens by age in steps.
    """

    steps: dict[int, dict[str, Any]] = field(default_factory=dict)
    spans: list[Interval] = field(default_factory=list)
    busy: list[Interval] = field(default_factory=list)
    staleness: Counter[int] = field(default_factory=Counter)

    @property
    def train_seconds(self) -> float:
        """Length of all spans: a pause between two learners of a resumed run is no training."""
        return length(self.spans)

    @property
    def idle_fraction(self) -> float:
        """Share of `train_seconds` in which the learner did not compute."""
        return 1 - length(self.busy) / self.train_seconds if self.train_seconds else 0.0

    def total(self, key: str) -> float:
        """Sum of a number over all steps."""
        return float(sum(line.get(key, 0) for line in self.steps.values()))


def read_learner(run_dir: Path) -> LearnerFigures:
    """Add up the lines of the learner's first rank; zeros when it never made a step."""
    figures = LearnerFigures()
    spans: dict[int, Interval] = {}
    busy: list[Interval] = []
    for line in Tail(run_dir / "metrics" / LEARNER_FILE).read():
        if "loss" not in line or "step" not in line:
            continue
        figures.steps[int(line["step"])] = line
        # A line is written at the end of its step, and its step began that much earlier: the first one with the
        # first groups. What was computed before (loading, the first version) is no training.
        began = line["mono"] - line["step_seconds"]
        work = [(max(float(start), began), float(end)) for start, end in line["busy"] if end > began]
        busy.extend(work)
        ended = max((end for _, end in work), default=began)
        first, last = spans.get(line["epoch"], (began, ended))
        spans[line["epoch"]] = (min(first, began), max(last, ended))
    figures.spans, figures.busy = merged(spans.values()), merged(busy)
    for line in figures.steps.values():
        figures.staleness.update({int(age): int(tokens) for age, tokens in line["staleness"].items()})
    return figures


def length(intervals: Iterable[Interval]) -> float:
    """Seconds in intervals that do not overlap."""
    return sum(end - start for start, end in intervals)


def overlap(
    starts: npt.NDArray[np.float64], ends: npt.NDArray[np.float64], intervals: Sequence[Interval]
) -> npt.NDArray[np.float64]:
    """Seconds of each `(start, end)` that lie in `intervals`, which are ascending and do not overlap."""
    if not intervals:
        return np.zeros_like(starts)
    edges = np.asarray([edge for interval in intervals for edge in interval])
    spent = np.asarray([part for start, end in intervals for part in (0.0, end - start)]).cumsum()
    within: npt.NDArray[np.float64] = np.interp(ends, edges, spent) - np.interp(starts, edges, spent)
    return within


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
        idle_seconds: time of all replicas, within the learner's spans, in which an engine had nothing to decode.
        covered_seconds: time within the spans that the lines speak of, of all replicas.
    """

    ticks: list[tuple[float, int]] = field(default_factory=list)
    idle_seconds: float = 0.0
    covered_seconds: float = 0.0

    @property
    def idle_fraction(self) -> float:
        """Share of the replicas' time within the spans in which they had nothing to decode."""
        return self.idle_seconds / self.covered_seconds if self.covered_seconds else 0.0


def read_rollouts(run_dir: Path, spans: Sequence[Interval]) -> RolloutFigures:
    """Add up the lines of all replicas; idle time is counted within `spans` only (the learner's)."""
    figures = RolloutFigures()
    for path in sorted((run_dir / "metrics").glob("rollout.*.jsonl")):
        lines = [line for line in Tail(path).read() if "idle_seconds" in line]
        for line in lines:
            figures.ticks.extend((float(at), int(tokens)) for at, tokens in line.get("timeline", ()))
        if len(lines) < 2:
            continue
        at = np.asarray([line["mono"] for line in lines], dtype=np.float64)
        idle = np.diff(np.asarray([line["idle_seconds"] for line in lines], dtype=np.float64))
        seconds = np.diff(at)
        # A count that falls is another process of the same replica, which counts from 0.
        same = (idle >= 0) & (seconds > 0)
        covered = overlap(at[:-1], at[1:], spans)[same]
        figures.covered_seconds += float(covered.sum())
        figures.idle_seconds += float((covered * np.minimum(1.0, idle[same] / seconds[same])).sum())
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
    inside = overlap(ends - TICK_SECONDS, ends, busy) / TICK_SECONDS
    return float((tokens * inside).sum() / total)
