"""What a finished run was: `summary.json` and `curve.png` in its directory.

The figures are measured, not remembered: accuracies by sampling the first and the last weights again on the same
held-out prompts, counts of groups by the audit, times from the intervals the roles wrote down while they worked.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import orjson

from streamrl.config import RunConfig
from streamrl.errors import CannotCreate, StreamrlError
from streamrl.monitor.tail import Tail
from streamrl.runtime.figures import LearnerFigures, read_learner, read_rollouts, share_within
from streamrl.runtime.offline import OnProgress, measure_accuracy, with_model

SUMMARY_FILE: Final = "summary.json"
CURVE_FILE: Final = "curve.png"
_ACCURACY: Final = "#0b7a4b"
_REWARD: Final = "#7aa6c2"
_ROOM: Final = 0.1  # of the height, for a label
_MEASURING_SEED: Final = 0x5EED
"""Added to the seed of the run, so that no response is measured with the random numbers of the training."""


@dataclass(frozen=True, slots=True)
class Accuracies:
    """Share of right responses with the first and with the last weights; None when it was not measured.

    Attributes:
        failure: why the measurement ended early.
    """

    before: float | None = None
    after: float | None = None
    failure: StreamrlError | None = None


async def measure(config: RunConfig, run_dir: Path, on_progress: OnProgress) -> Accuracies:
    """Measure first and last weights, on the same held-out prompts at the run's temperature.

    Nothing is measured when `evaluation.final_prompts` is 0; `after` is None when the run has exported no model. A
    model, data or rewards that cannot be used are a `failure`: the other figures of a run do not need them.
    """
    if not config.evaluation.final_prompts:
        return Accuracies()
    seed = config.seed + _MEASURING_SEED
    before: float | None = None
    try:
        before = await measure_accuracy(config, run_dir, "first version", seed, on_progress)
        last = run_dir / "model"
        if not last.is_dir():
            return Accuracies(before)
        trained = with_model(config, str(last))
        return Accuracies(before, await measure_accuracy(trained, run_dir, "last version", seed, on_progress))
    except StreamrlError as error:
        return Accuracies(before, failure=error)


def write_summary(
    config: RunConfig, run_dir: Path, counts: Mapping[str, int], accuracies: Accuracies
) -> dict[str, Any]:
    """Write `summary.json` and `curve.png`, and return the summary.

    Args:
        config: of the run.
        run_dir: its directory.
        counts: of the audit.
        accuracies: as measured.

    Raises:
        CannotCreate: a file cannot be written.
    """
    learner = read_learner(run_dir)
    summary = summarize(config, run_dir, learner, counts, accuracies)
    _write(run_dir / SUMMARY_FILE, orjson.dumps(summary, option=orjson.OPT_INDENT_2))
    draw_curve(run_dir / CURVE_FILE, config.name, learner.steps, summary, read_rounds(run_dir, learner))
    return summary


def summarize(
    config: RunConfig, run_dir: Path, learner: LearnerFigures, counts: Mapping[str, int], accuracies: Accuracies
) -> dict[str, Any]:
    """The content of `summary.json`. Fractions are of `train_seconds`, the share is of all sampled tokens."""
    seconds = learner.train_seconds
    rollouts = read_rollouts(run_dir, learner.spans)
    samples = sum(line.get("samples", line["groups"] * config.sampling.group_size) for line in learner.steps.values())
    stale_tokens = sum(learner.staleness.values())
    staleness = sum(age * tokens for age, tokens in learner.staleness.items())
    return {
        "accuracy_before": accuracies.before,
        "accuracy_after": accuracies.after,
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
        **{f"groups_{key}": int(counts[key]) for key in ("admitted", "trained", "dropped", "dead", "evaluated")},
        "samples_dead": int(counts["dead_samples"]),
    }


def read_rounds(run_dir: Path, learner: LearnerFigures) -> list[tuple[int, float, int]]:
    """Complete rounds as `(step, accuracy, responses)`, ascending; the step is the one that made the version."""
    made: dict[int, int] = {}
    for step, line in sorted(learner.steps.items()):
        made.setdefault(int(line["version"]), step)  # the later ones train on before the next version
    rounds: dict[int, tuple[int, float, int]] = {}
    for line in Tail(run_dir / "metrics" / "feeder.0.jsonl").read():
        if line.get("kind") == "evaluation":
            version = int(line["version"])
            step = max((step for other, step in made.items() if other <= version), default=0)
            rounds[version] = (step, float(line["accuracy"]), int(line["responses"]))
    return [rounds[version] for version in sorted(rounds)]


def draw_curve(
    path: Path, name: str, steps: Mapping[int, Mapping[str, Any]], summary: Mapping[str, Any], rounds: Sequence[Any]
) -> None:
    """Write the learning curve as a PNG (1,600 x 1,000 pixels).

    Args:
        path: file to write.
        name: of the run.
        steps: lines of the learner by step.
        summary: as `summary.json` has it.
        rounds: evaluation rounds, `(step, accuracy, responses)` ascending.

    Raises:
        CannotCreate: the file cannot be written.
    """
    # A figure of its own: no pyplot, so no global state and no window system.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 5), dpi=200)
    axes = FigureCanvasAgg(figure).figure.add_subplot()
    numbers = sorted(steps)
    if numbers:
        axes.plot(numbers, [steps[n]["reward_mean"] for n in numbers], color=_REWARD, lw=1, label="reward of training")
    if rounds:
        places, values, counts = zip(*rounds, strict=True)
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
    # Labels go inwards from the two ends, and the limits leave room for them: neither lies on an axis or the title.
    ends = [
        (0, summary["accuracy_before"], "before", (-6, -20), "left"),
        (last, summary["accuracy_after"], "after", (8, 12), "right"),
    ]
    for place, value, label, offset, side in ends:
        if value is not None:
            axes.plot([place], [value], marker="*", ms=14, color="#c8502d", ls="none", zorder=5)
            axes.annotate(f"{label} {value:.3f}", (place, value), textcoords="offset points", xytext=offset, ha=side)
    axes.set(xlabel="step of the learner", ylabel="share right / mean reward", title=_title(name, summary))
    lowest, highest = min(0.0, axes.get_ylim()[0]), max(1.05, axes.get_ylim()[1])
    room = _ROOM * (highest - lowest)
    known = [value for _, value, *_ in ends if value is not None]
    axes.set_ylim(min([lowest, *(value - room for value in known)]), max([highest, *(value + room for value in known)]))
    axes.margins(x=0.06)
    axes.locator_params(axis="x", integer=True)
    axes.grid(visible=True, alpha=0.25)
    if numbers or rounds:
        axes.legend(loc="lower right", frameon=False)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    try:
        figure.savefig(path, bbox_inches="tight")
    except OSError as error:
        raise CannotCreate(f"{path}: {error.strerror}", "check space and permissions") from error


def _title(name: str, summary: Mapping[str, Any]) -> str:
    return (
        f"{name}: {summary['steps']} steps in {summary['train_seconds']:.1f} s, "
        f"staleness {summary['staleness_mean']:.2f} (at most {summary['staleness_max']})"
    )


def _write(path: Path, data: bytes) -> None:
    draft = path.with_suffix(".draft")
    try:
        draft.write_bytes(data + b"\n")
        draft.rename(path)
    except OSError as error:
        raise CannotCreate(f"{path}: {error.strerror}", "check space and permissions") from error
