"""What people see of a comparison of scores: lines, histogram, the responses that differ most, and a picture."""

from __future__ import annotations

from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final

from streamrl.commands.letters import parts_line
from streamrl.consumers.rescoring import Bin, Comparison
from streamrl.errors import CannotCreate, ConfigError
from streamrl.monitor.lines import duration, number, printable, shortened
from streamrl.monitor.plots import bar

_BAR: Final = 24
_SHOWN_FAILURES: Final = 10
_TEXT: Final = 100


def report(data: dict[str, Any], comparison: Comparison | None, threshold: float) -> list[str]:
    """The lines of a whole result, as `streamrl.rescore/1` has it."""
    counts = f"{data['kept']} were there already, {data['failed']} failed  ({data['groups']} groups)"
    lines = [f"{data['scored']} responses scored in {duration(data['seconds'])}, {counts}"]
    if comparison is None:
        lines.append("nothing to compare: no response has both scores")
    else:
        lines += ["", *_figures(comparison, threshold), "", *_histogram(comparison.histogram)]
    if data["differ"]:
        lines += ["", "these differ most, by their rank in each set:"]
        lines += [line for row in data["differ"] for line in _different(row)]
    lines += _failures(data)
    lines += ["", f"new scores   {data['directory']}"]
    return lines


def _figures(found: Comparison, threshold: float) -> list[str]:
    old, new = found.old, found.new
    rows = [
        ("", "old", "new"),
        ("mean", number(old.mean), number(new.mean)),
        ("deviation", number(old.std), number(new.std)),
        ("least", number(old.min), number(new.min)),
        ("greatest", number(old.max), number(new.max)),
        ("flat groups", f"{found.flat_old}/{found.groups}", f"{found.flat_new}/{found.groups}"),
    ]
    lines = [f"{name:12} {a:>10} {b:>10}".rstrip() for name, a, b in rows]
    lines += [
        "",
        f"same score        {_share(found.same)} of {found.samples} responses",
        f"same side of {threshold:<4g} {_share(found.agreement)}",
        f"same order        {_share(found.order)} of {found.pairs} pairs of responses to one prompt",
        f"correlation       {_two(found.pearson)} linear, {_two(found.spearman)} of ranks",
    ]
    if found.pearson is None:
        lines.append("                  one side has a single value, so there is no correlation")
    return lines


def _share(value: float | None) -> str:
    """With a digit more than usual: one response of a thousand that differs is what people look for."""
    return "-" if value is None else f"{100 * value:.1f} %"


def _two(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"


def _histogram(bins: Sequence[Bin]) -> list[str]:
    most = max(max(each.old, each.new) for each in bins)
    labels = [f"{each.low:.4g}" if each.low == each.high else f"{each.low:.3g} .. {each.high:.3g}" for each in bins]
    width = max(map(len, ["score", *labels]))
    lines = [f"{'score':{width}}  {'old':{_BAR + 8}} new"]
    for label, each in zip(labels, bins, strict=True):
        sides = [f"{bar(count / most, _BAR)} {count:<7}" for count in (each.old, each.new)]
        lines.append(f"{label:{width}}  {sides[0]}{sides[1]}".rstrip())
    return lines


def _different(row: dict[str, Any]) -> list[str]:
    change = f"{row['old']:g} -> {row['new']:g}"
    return [
        f"  group {row['group']} sample {row['sample']}  {change}  {parts_line(row['parts'])}".rstrip(),
        f"    prompt    {shortened(row['prompt'], _TEXT)}",
        f"    response  {shortened(row['text'], _TEXT)}",
    ]


def _failures(data: dict[str, Any]) -> list[str]:
    failures: list[dict[str, Any]] = data["failures"]
    if not failures:
        return []
    lines = ["", "without a new score:"]
    lines += [f"  group {f['group']} sample {f['sample']}  {printable(f['why'])}" for f in failures[:_SHOWN_FAILURES]]
    if len(failures) > _SHOWN_FAILURES:
        lines.append(f"  and {len(failures) - _SHOWN_FAILURES} more; --json lists all")
    if data["unwritten"]:
        lines.append(
            f"their {data['unwritten']} groups are not written: the same call tries them again (--drop-failed)"
        )
    return lines


def check_drawing(path: Path) -> None:
    """See that a picture can be drawn.

    Raises:
        ConfigError: matplotlib is missing.
        CannotCreate: there is no directory for it.
    """
    if not path.absolute().parent.is_dir():
        raise CannotCreate(f"{path}: there is no directory {path.parent}", "make it first")
    if not find_spec("matplotlib"):
        raise ConfigError("a picture needs matplotlib", "pip install 'streamrl[train]', or leave --picture out")


def draw(path: Path, name: str, comparison: Comparison, old: Sequence[float], new: Sequence[float]) -> None:
    """Write a picture (PNG): each response as a point, new over old, and both histograms.

    Raises:
        CannotCreate: the file cannot be written.
    """
    # A figure of its own: no pyplot, so no global state and no window system.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 4.5), dpi=150)
    FigureCanvasAgg(figure)
    points, bars = figure.subplots(1, 2)
    points.scatter(old, new, s=9, alpha=0.35, color="#0b7a4b", edgecolors="none")
    points.set(xlabel="old score", ylabel="new score", title=f"{name}: {comparison.samples} responses")
    bins = comparison.histogram
    places = range(len(bins))
    bars.bar([place - 0.2 for place in places], [each.old for each in bins], 0.4, label="old", color="#7aa6c2")
    bars.bar([place + 0.2 for place in places], [each.new for each in bins], 0.4, label="new", color="#0b7a4b")
    bars.set_xticks(list(places), [f"{each.low:.3g}" for each in bins], rotation=45, ha="right")
    bars.set(xlabel="score", ylabel="responses")
    bars.legend(frameon=False)
    try:
        figure.savefig(path, format="png", bbox_inches="tight")
    except OSError as error:
        raise CannotCreate(f"{path}: {error.strerror or error}", "check space and permissions") from error
