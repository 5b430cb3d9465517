"""The picture of a run: held-out accuracy by version, reward by step, accuracy before and after."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from streamrl.errors import CannotCreate

_ACCURACY = "#0b7a4b"
_REWARD = "#7aa6c2"
_ROOM = 0.1  # of the height, for a label


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
