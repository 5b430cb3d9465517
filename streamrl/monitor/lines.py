"""Small pieces of text that tables, the live screen and plain lines share: durations, sizes, bars, log lines."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any, Final

_BLOCKS: Final = "▁▂▃▄▅▆▇█"
_SHOWN_ELSEWHERE: Final = frozenset({"at", "time", "mono", "role", "level", "event", "logger", "message", "traceback"})


def duration(seconds: float | None) -> str:
    """`0.4s`, `12s`, `3m20s`, `2h05m`; `-` for None."""
    if seconds is None:
        return "-"
    if seconds < 10:
        return f"{seconds:.1f}s"
    if seconds < 60:
        return f"{seconds:.0f}s"
    minutes, rest = divmod(int(seconds), 60)
    if minutes < 60:
        return f"{minutes}m{rest:02d}s"
    hours, minutes = divmod(minutes, 60)
    return f"{hours}h{minutes:02d}m"


def size(count: int) -> str:
    """Bytes with a binary unit: `512 B`, `1.5 MiB`."""
    value = float(count)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if value < 1024:
            return f"{value:.0f} {unit}" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1024
    return f"{value:.1f} TiB"


def number(value: float | None) -> str:
    """Three digits are enough to see a change: `0.531`, `12.4`, `1,204`, `18.2k`; `-` for None."""
    if value is None:
        return "-"
    if abs(value) >= 10_000:
        return f"{value / 1000:.1f}k"
    if abs(value) >= 100:
        return f"{value:,.0f}"
    return f"{value:.3g}"


def percent(value: float | None) -> str:
    """A share as `42 %`; `-` for None."""
    return "-" if value is None else f"{100 * value:.0f} %"


def spark(values: Sequence[float], width: int, low: float | None = None, high: float | None = None) -> str:
    """Draw a series with block characters, oldest left.

    Args:
        values: the series; more than `width` are averaged in equal shares, so that nothing is skipped.
        width: most characters.
        low: value of the lowest block; the least value when None.
        high: value of the highest block; the greatest value when None.
    """
    if not values or width < 1:
        return ""
    shown = [_mean(share) for share in _shares(values, width)]
    bottom = min(shown) if low is None else low
    top = max(shown) if high is None else high
    span = top - bottom
    if span <= 0:
        return _BLOCKS[0] * len(shown)
    steps = len(_BLOCKS) - 1
    return "".join(_BLOCKS[max(0, min(steps, round((value - bottom) / span * steps)))] for value in shown)


def bar(share: float, width: int) -> str:
    """A horizontal bar of `width` characters, filled to `share` (0 to 1)."""
    full = max(0, min(width, round(share * width)))
    return "█" * full + "░" * (width - full)


def clock(at: float) -> str:
    """Local time of day, `12:01:33`; blanks when the time is not known."""
    return time.strftime("%H:%M:%S", time.localtime(at)) if at > 0 else " " * 8


def log_line(role: str, at: float, record: Mapping[str, Any], width: int) -> str:
    """Render one record of a role's log: `12:01:33 rollout.0 | WARNING event words key=value`, traceback below."""
    level = str(record.get("level", "info")).upper()
    event = str(record.get("event", record.get("message", "")))
    pairs = [f"{key}={value}" for key, value in record.items() if key not in _SHOWN_ELSEWHERE and value is not None]
    text = " ".join([*([level] if level not in ("INFO", "DEBUG") else []), event, *pairs])
    lines = [text, *str(record.get("traceback") or "").splitlines()]
    return "\n".join(f"{clock(at)} {role:{width}} | {line}" for line in lines)


def _shares(values: Sequence[float], width: int) -> list[Sequence[float]]:
    if len(values) <= width:
        return [[value] for value in values]
    edges = [len(values) * index // width for index in range(width + 1)]
    return [values[start:end] for start, end in pairwise(edges)]


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)
