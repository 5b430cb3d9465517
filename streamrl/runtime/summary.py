"""What a finished run was: `summary.json` and `curve.png` in its directory.

The figures are measured, not remembered: accuracies by sampling the first and the last weights again on the same
held-out prompts, counts of groups by the audit, times from the intervals the roles wrote down while they worked, on the
monotonic clock that all roles of one machine share. Those of other machines are brought to it by their wall clocks.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TypeAlias

import numpy as np
import numpy.typing as npt
import orjson

from streamrl.atomic import write_whole
from streamrl.config import RunConfig
from streamrl.errors import StreamrlError, writing
from streamrl.monitor.tail import Tail
from streamrl.producers.meter import TICK_SECONDS
from streamrl.runtime.roles import no_collection

if TYPE_CHECKING:
    from streamrl.runtime.offline import OnProgress

Interval: TypeAlias = tuple[float, float]
LEARNER_FILE: Final = "learner.0.jsonl"
SUMMARY_FILE: Final = "summary.json"
CURVE_FILE: Final = "curve.png"
_ACCURACY: Final = "#0b7a4b"
_REWARD: Final = "#7aa6c2"
_ENDS: Final = "#c8502d"
_SAME_CLOCK: Final = 1.0
"""Seconds that wall clock and monotonic clock of one machine drift apart in a run, at most."""
_MEASURING_SEED: Final = 0x5EED
"""Added to the seed of the run, so that no response is measured with the random numbers of the training."""


@dataclass(frozen=True, slots=True)
class Accuracies:
    """`measure_accuracy` of the first and the last weights; empty: not measured.

    `failure` says why the measurement ended early.
    """

    before: Mapping[str, float] = field(default_factory=dict)
    after: Mapping[str, float] = field(default_factory=dict)
    failure: StreamrlError | None = None


async def measure(config: RunConfig, run_dir: Path, on_progress: OnProgress) -> Accuracies:
    """Measure first and last weights, on the same held-out prompts.

    `after` is empty if the run has exported no model. A cancellation skips the rest. A model, data or rewards that
    cannot be used are a `failure`, so that the other figures are still written.
    """
    with no_collection():
        from streamrl.runtime.offline import measure_accuracy, with_model  # loads torch: only to measure

    seed = config.seed + _MEASURING_SEED
    before: Mapping[str, float] = {}
    try:
        before = await measure_accuracy(config, run_dir, "first version", seed, on_progress)
        last = run_dir / "model"
        if not last.is_dir():
            return Accuracies(before)
        trained = with_model(config, str(last))
        return Accuracies(before, await measure_accuracy(trained, run_dir, "last version", seed, on_progress))
    except asyncio.CancelledError:
        return Accuracies(before)
    except StreamrlError as error:
        return Accuracies(before, failure=error)


def write_summary(
    config: RunConfig, run_dir: Path, counts: Mapping[str, int], accuracies: Accuracies
) -> dict[str, Any]:
    learner = read_learner(run_dir)
    summary = summarize(config, run_dir, learner, counts, accuracies)
    with writing(run_dir / SUMMARY_FILE):
        options = orjson.OPT_INDENT_2 | orjson.OPT_APPEND_NEWLINE
        write_whole(run_dir / SUMMARY_FILE, orjson.dumps(summary, option=options))
    draw_curve(run_dir / CURVE_FILE, config.name, learner.steps, summary, read_rounds(run_dir, learner))
    return summary


def summarize(
    config: RunConfig, run_dir: Path, learner: LearnerFigures, counts: Mapping[str, int], accuracies: Accuracies
) -> dict[str, Any]:
    """The content of `summary.json`. Fractions are of `train_seconds`, the share is of all sampled tokens."""
    seconds = learner.train_seconds
    rollouts = read_rollouts(run_dir, learner)
    samples = sum(line.get("samples", line["groups"] * config.sampling.group_size) for line in learner.steps.values())
    stale_tokens = sum(learner.staleness.values())
    staleness = sum(age * tokens for age, tokens in learner.staleness.items())
    return {
        "accuracy_before": accuracies.before.get("accuracy"),
        "accuracy_after": accuracies.after.get("accuracy"),
        "train_seconds": round(seconds, 3),
        "steps": max(learner.steps, default=0),
        "samples_per_second": round(samples / seconds, 1) if seconds else 0.0,
        "completion_tokens_per_second": round(learner.total("tokens") / seconds, 1) if seconds else 0.0,
        "learner_idle_fraction": round(learner.idle_fraction, 4),
        "rollout_idle_fraction": round(rollouts.idle_fraction, 4),
        "share_of_tokens_sampled_during_learner_steps": round(share_within(rollouts.ticks, learner.busy), 4),
        "samples_spanning_versions": int(learner.total("samples_spanning_versions")),
        "staleness_max": max(learner.staleness, default=0),
        "staleness_mean": round(staleness / stale_tokens, 4) if stale_tokens else 0.0,
        "engine_gap": learner.mean("engine_gap"),
        **{f"groups_{key}": int(counts[key]) for key in ("admitted", "trained", "dropped", "dead", "evaluated")},
        "samples_dead": int(counts["dead_samples"]),
        **{f"{name}_before": value for name, value in accuracies.before.items() if name.startswith(("avg_", "pass_"))},
        **{f"{name}_after": value for name, value in accuracies.after.items() if name.startswith(("avg_", "pass_"))},
        "sources": _sources(learner, accuracies),
    }


def _sources(learner: LearnerFigures, accuracies: Accuracies) -> dict[str, dict[str, float]]:
    """The last figures of each source, with the groups of all learners of the run, and its accuracies."""
    found: dict[str, dict[str, float]] = {}
    ends = {line["epoch"]: line.get("sources", {}) for line in learner.steps.values()}
    for source, figures in (item for sources in ends.values() for item in sources.items()):
        found[source] = figures | {"groups": figures["groups"] + found.get(source, {}).get("groups", 0)}
    for when, accuracy in (("before", accuracies.before), ("after", accuracies.after)):
        for name, value in accuracy.items():
            if name.startswith("accuracy/"):
                found.setdefault(name.removeprefix("accuracy/"), {})[f"accuracy_{when}"] = value
    return found


def read_rounds(run_dir: Path, learner: LearnerFigures) -> list[tuple[int, dict[str, Any]]]:
    """Complete rounds as `(step, line)`, ascending; the step is the one that made the version."""
    made: dict[int, int] = {}
    for step, line in sorted(learner.steps.items()):
        made.setdefault(int(line["version"]), step)  # the later ones train on before the next version
    rounds: dict[int, tuple[int, dict[str, Any]]] = {}
    for line in Tail(run_dir / "metrics" / "feeder.0.jsonl").read():
        if line.get("kind") == "evaluation":
            version = int(line["version"])
            step = max((step for other, step in made.items() if other <= version), default=0)
            rounds[version] = (step, line)
    return [rounds[version] for version in sorted(rounds)]


def draw_curve(
    path: Path, name: str, steps: Mapping[int, Mapping[str, Any]], summary: Mapping[str, Any], rounds: Sequence[Any]
) -> None:
    # A figure of its own: no pyplot, so no global state and no window system.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 5), dpi=200)
    axes = FigureCanvasAgg(figure).figure.add_subplot()
    numbers = sorted(steps)
    if numbers:
        axes.plot(numbers, [steps[n]["reward_mean"] for n in numbers], color=_REWARD, lw=1, label="reward of training")
    for source in dict.fromkeys(source for _, line in rounds for source in line.get("sources", ())):
        points = [(step, line["sources"][source]["accuracy"]) for step, line in rounds if source in line["sources"]]
        axes.plot(*zip(*points, strict=True), lw=1, ls=":", marker=".", label=f"of {source}")
    if rounds:
        places, values, counts = zip(
            *((step, line["accuracy"], line["responses"]) for step, line in rounds), strict=True
        )
        # One standard deviation of a binomial share: how much of a wiggle is chance.
        errors = [(value * (1 - value) / max(1, count)) ** 0.5 for value, count in zip(values, counts, strict=True)]
        axes.errorbar(
            places,
            values,
            errors,
            color=_ACCURACY,
            marker="o",
            ms=4,
            capsize=2,
            label="held-out accuracy, while training",
        )
    last = numbers[-1] if numbers else 0
    ends = [(0, summary["accuracy_before"], "before"), (last, summary["accuracy_after"], "after")]
    measured = [end for end in ends if end[1] is not None]
    if measured:
        places, values, _ = zip(*measured, strict=True)
        label = "held-out accuracy: " + ", ".join(f"{value:.3f} {when}" for _, value, when in measured)
        axes.plot(places, values, marker="*", ms=14, color=_ENDS, ls="none", zorder=5, label=label)
    axes.set(xlabel="step of the learner", ylabel="accuracy / mean reward", title=_title(name, summary))
    axes.set_ylim(min(0.0, axes.get_ylim()[0]), max(1.05, axes.get_ylim()[1]))
    axes.margins(x=0.06)
    axes.locator_params(axis="x", integer=True)
    axes.grid(visible=True, alpha=0.25)
    if numbers or rounds or measured:
        axes.legend(frameon=False)  # where it covers least
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    with writing(path):
        figure.savefig(path, bbox_inches="tight")


def _title(name: str, summary: Mapping[str, Any]) -> str:
    return (
        f"{name}: {summary['steps']} steps in {summary['train_seconds']:.1f} s, "
        f"staleness {summary['staleness_mean']:.2f} (at most {summary['staleness_max']})"
    )


@dataclass(slots=True)
class LearnerFigures:
    """The learner's lines in sum.

    Attributes:
        steps: by number, the last line of each step (a step of a lost branch is done again).
        spans: for each learner of the run, from its first groups to the end of its last step; ascending.
        busy: intervals of computing within the spans, ascending and apart.
        staleness: trained tokens by age in steps.
        clock: wall clock less monotonic clock, in seconds.
    """

    steps: dict[int, dict[str, Any]] = field(default_factory=dict)
    spans: list[Interval] = field(default_factory=list)
    busy: list[Interval] = field(default_factory=list)
    staleness: Counter[int] = field(default_factory=Counter)
    clock: float = 0.0

    @property
    def train_seconds(self) -> float:
        """Length of all spans: a pause between two learners of a resumed run is no training."""
        return length(self.spans)

    @property
    def idle_fraction(self) -> float:
        return 1 - length(self.busy) / self.train_seconds if self.train_seconds else 0.0

    def mean(self, key: str) -> float | None:
        """Over the steps that have it; None where none has."""
        values = [line[key] for line in self.steps.values() if line.get(key) is not None]
        return round(sum(values) / len(values), 6) if values else None

    def total(self, key: str) -> float:
        return float(sum(line.get(key, 0) for line in self.steps.values()))


def read_learner(run_dir: Path) -> LearnerFigures:
    """Figures of rank 0; zeros if it never made a step."""
    figures = LearnerFigures()
    spans: dict[int, Interval] = {}
    busy: list[Interval] = []
    for line in Tail(run_dir / "metrics" / LEARNER_FILE).read():
        if "loss" not in line or "step" not in line:
            continue
        figures.steps[int(line["step"])] = line
        figures.clock = line["at"] - line["mono"]
        # A line is written at the end of its step, and its step began that much earlier: the first one with the
        # first groups. Loading and the first version come before that, and do not count as training.
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
    """The same time, ascending and without overlap."""
    result: list[Interval] = []
    for start, end in sorted(intervals):
        if result and start <= result[-1][1]:
            result[-1] = (result[-1][0], max(end, result[-1][1]))
        else:
            result.append((start, end))
    return result


@dataclass(slots=True)
class RolloutFigures:
    """The lines of all replicas in sum.

    Attributes:
        ticks: `(seconds, tokens sampled in the tick that ends then)`.
        idle_seconds: time within the learner's spans in which an engine had nothing to decode.
        covered_seconds: time within the spans that the lines cover.
    """

    ticks: list[tuple[float, int]] = field(default_factory=list)
    idle_seconds: float = 0.0
    covered_seconds: float = 0.0

    @property
    def idle_fraction(self) -> float:
        return self.idle_seconds / self.covered_seconds if self.covered_seconds else 0.0


def read_rollouts(run_dir: Path, learner: LearnerFigures) -> RolloutFigures:
    """Idle time is counted within the spans of the learner only."""
    figures = RolloutFigures()
    for path in sorted((run_dir / "metrics").glob("rollout.*.jsonl")):
        lines = [line for line in Tail(path).read() if "idle_seconds" in line]
        for line in lines:
            shift = _shift(line, learner.clock)
            figures.ticks.extend((float(at) + shift, int(tokens)) for at, tokens in line.get("timeline", ()))
        if len(lines) < 2:
            continue
        at = np.asarray([line["mono"] + _shift(line, learner.clock) for line in lines], dtype=np.float64)
        idle = np.diff(np.asarray([line["idle_seconds"] for line in lines], dtype=np.float64))
        seconds = np.diff(at)
        # A count that falls is another process of the same replica, which counts from 0.
        same = (idle >= 0) & (seconds > 0)
        covered = overlap(at[:-1], at[1:], learner.spans)[same]
        figures.covered_seconds += float(covered.sum())
        figures.idle_seconds += float((covered * np.minimum(1.0, idle[same] / seconds[same])).sum())
    return figures


def _shift(line: Mapping[str, Any], clock: float) -> float:
    """Seconds from the monotonic clock of a line to the learner's; on one machine both are the same clock."""
    shift = float(line["at"] - line["mono"]) - clock
    return shift if abs(shift) > _SAME_CLOCK else 0.0


def share_within(ticks: Sequence[tuple[float, int]], busy: Sequence[Interval]) -> float:
    """Share of all sampled tokens that were sampled while the learner computed.

    `ticks` are `(end of a tick, tokens sampled in it)`, with an even pace within their 50 ms; `busy` intervals are
    ascending and do not overlap.
    """
    total = sum(tokens for _, tokens in ticks)
    if not total or not busy:
        return 0.0
    ends, tokens = (np.asarray(column, dtype=np.float64) for column in zip(*ticks, strict=True))
    inside = overlap(ends - TICK_SECONDS, ends, busy) / TICK_SECONDS
    return float((tokens * inside).sum() / total)
