"""The table and the picture of the staleness experiment."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

REACHED, GOAL = 0.9, 0.95
Line = Mapping[str, Any]
_COLOURS = (
    "#0b7a4b",
    "#c8502d",
    "#7aa6c2",
    "#8b5fa8",
    "#c9a227",
    "#4f6d7a",
    "#d48ab0",
    "#5b8c2a",
    "#7a4b0b",
    "#2f4ba0",
    "#a03050",
    "#208f8f",
    "#9aa020",
    "#6e6e6e",
)


def summary(lines: Iterable[Line]) -> dict[str, Any]:
    """What the cells say: a row for each algorithm, learning rate and staleness, over its seeds; and the goal.

    `lowest` is the lowest measurement after the first one of at least 0.9, None where there is none.
    """
    groups: dict[tuple[Any, ...], list[Line]] = {}
    for line in lines:
        place = (line["algorithm"], line["rule"], line["lr"], line["steps"], str(line["settings"]))
        groups.setdefault((*place, line["staleness"]), []).append(line)
    rows = [_row(sorted(group, key=lambda line: line["seed"])) for group in groups.values()]
    rows.sort(key=lambda row: (row["staleness"], -sum(row["final"]) / len(row["final"])))
    return {"rows": rows, "goal": _goal(rows)}


def _row(group: Sequence[Line]) -> dict[str, Any]:
    first = group[0]
    row = {
        **{name: first[name] for name in ("algorithm", "rule", "lr", "steps", "settings", "staleness")},
        "seeds": [line["seed"] for line in group],
        "final": [line["final"] for line in group],
        "best": [max(value for _, value in line["accuracy"]) for line in group],
        "reached": [_reached(line) for line in group],
        "lowest": [_lowest(line) for line in group],
    }
    name = first["algorithm"] if first["rule"] == "own" else f"{first['algorithm']}, lr {first['rule']}"
    row["name"] = name
    row["text"] = (
        f"{name:<28} S {first['staleness']:<3} final {_numbers(row['final'])}  best {_numbers(row['best'])}"
        f"  >= .9 at {_numbers(row['reached'])}  lowest after {_numbers(row['lowest'])}"
    )
    return row


def _reached(line: Line) -> int | None:
    return next((step for step, value in line["accuracy"] if value >= REACHED), None)


def _lowest(line: Line) -> float | None:
    since = _reached(line)
    later = [value for step, value in line["accuracy"] if since is not None and step > since]
    return min(later, default=None)


def _goal(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any] | None:
    """high_staleness at staleness 16 against on_policy, over the seeds that both have; None without both."""
    old = [row for row in rows if row["algorithm"] == "high_staleness" and row["staleness"] == 16]
    fresh = [row for row in rows if row["algorithm"] == "on_policy"]
    if not old or not fresh:
        return None
    finals = [dict(zip(row["seeds"], row["final"], strict=True)) for row in (old[0], fresh[0])]
    seeds = sorted(finals[0].keys() & finals[1].keys())
    shares = [finals[0][seed] / finals[1][seed] for seed in seeds if finals[1][seed]]
    if not shares:
        return None
    mean = sum(shares) / len(shares)
    return {"seeds": seeds, "shares": shares, "share": mean, "goal": GOAL, "reached": mean >= GOAL}


def _numbers(values: Iterable[float | None]) -> str:
    return ", ".join("-" if v is None else f"{v:.3f}" if isinstance(v, float) else str(v) for v in values)


def write_report(folder: Path, lines: Sequence[Line]) -> None:
    """Write the picture, `staleness.png`; docs/hooks.py makes the tables when the site is built."""
    folder.mkdir(parents=True, exist_ok=True)
    _draw(folder / "staleness.png", lines)


def tables(lines: Sequence[Line]) -> str:
    """The figures in Markdown, a table for each staleness, and whether the goal is reached."""
    table = summary(lines)
    parts = []
    for staleness in sorted({row["staleness"] for row in table["rows"]}):
        parts += [
            f"\n**Staleness {staleness}**\n",
            "| algorithm | seeds | final | best on the way | first .9 at step | lowest after |",
            "|---|---|---|---|---|---|",
        ]
        for row in table["rows"]:
            if row["staleness"] == staleness:
                values = (_numbers(row[name]) for name in ("seeds", "final", "best", "reached", "lowest"))
                parts.append(f"| `{row['name']}` | {' | '.join(values)} |")
    if goal := table["goal"]:
        said = "reached" if goal["reached"] else "not reached"
        parts.append(
            f"\n`high_staleness` at staleness 16 has {goal['share']:.1%} of the final accuracy of `on_policy`"
            f" (seeds {_numbers(goal['seeds'])}: {', '.join(f'{share:.1%}' for share in goal['shares'])}); goal"
            f" {goal['goal']:.0%}: {said}."
        )
    return "\n".join(parts)


def _draw(path: Path, lines: Sequence[Line]) -> None:
    """A panel for each staleness: held-out accuracy by step, one colour for each algorithm, a line for each seed."""
    scale = sorted({line["staleness"] for line in lines})
    names = list(dict.fromkeys(_name(line) for line in lines))
    figure = Figure(figsize=(4 * max(2, len(scale)), 4.6), dpi=130)
    FigureCanvasAgg(figure)
    for place, staleness in enumerate(scale):
        axes = figure.add_subplot(1, len(scale), place + 1)
        _panel(axes, [line for line in lines if line["staleness"] == staleness], names)
        fresh = [line for line in lines if line["algorithm"] == "on_policy"]
        if fresh:
            mean = sum(line["final"] for line in fresh) / len(fresh)
            axes.axhline(GOAL * mean, color="#333333", lw=0.8, ls=":", label="95 % of on_policy")
        axes.set_title(f"staleness {staleness}")
        if place == 0:
            axes.set_ylabel("share of held-out prompts answered rightly")
    handles: dict[str, Any] = {}
    for axes in figure.axes:
        handles |= {line.get_label(): line for line in axes.get_lines() if not line.get_label().startswith("_")}
    figure.legend(handles.values(), handles.keys(), loc="lower center", ncol=7, frameon=False, fontsize=9)
    figure.subplots_adjust(left=0.05, right=0.99, top=0.92, bottom=0.26, wspace=0.12)
    figure.savefig(path, bbox_inches="tight")


def _name(line: Line) -> str:
    return line["algorithm"] if line["rule"] == "own" else f"{line['algorithm']}, lr {line['rule']}"


def _panel(axes: Axes, lines: Sequence[Line], names: Sequence[str]) -> None:
    for line in lines:
        name = _name(line)
        preset = line["algorithm"] in ("on_policy", "high_staleness")
        colour = "black" if line["algorithm"] == "on_policy" else _COLOURS[names.index(name) % len(_COLOURS)]
        places, values = zip(*line["accuracy"], strict=True)
        axes.plot(places, values, color=colour, lw=2.2 if preset else 1.0, label=name, zorder=3 if preset else 2)
        axes.plot([line["steps"]], [line["final"]], marker="o", ms=4, color=colour, zorder=4)
    axes.set(xlabel="step of the learner", ylim=(0, 1.02))
    axes.grid(visible=True, alpha=0.25)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
