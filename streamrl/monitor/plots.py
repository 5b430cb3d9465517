"""Pictures made of block characters: sparklines, bars, an area plot with an axis."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Final

_BLOCKS: Final = "▁▂▃▄▅▆▇█"


def spark(values: Sequence[float], width: int, low: float | None = None, high: float | None = None) -> str:
    """Draw a series on one line, oldest left, scaled to `low`..`high` (None: its own range).

    More than `width` values are averaged in equal shares, so that nothing is skipped.
    """
    if not values or width < 1:
        return ""
    shown = resample(values, width)
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


def area(points: Sequence[tuple[float, float]], width: int, height: int, low: float, high: float) -> list[str]:
    """Draw y over x as a filled curve of `height` lines with an axis at its left; straight between two points."""
    columns = _interpolate(points, width) if points else []
    lines = []
    for row in range(height):
        floor = height - 1 - row
        label = f"{low + (high - low) * (floor + 1) / height:5.2f} ┤" if row % 2 == 0 else "      │"
        cells = [_cell((value - low) / (high - low) * height - floor) for value in columns]
        lines.append(label + "".join(cells))
    return lines


def histogram(counts: Mapping[int, float], width: int, most: int = 5) -> list[tuple[str, float, str]]:
    """Rows `(label, share, bar)` over 0, 1, 2, ...; all from `most` on are one row."""
    total = sum(counts.values())
    if not total:
        return []
    last = min(max(counts), most)
    rows = []
    for value in range(last + 1):
        more = value == most and max(counts) > most
        count = sum(share for key, share in counts.items() if key >= value) if more else counts.get(value, 0)
        rows.append((f"{value}+" if more else str(value), count / total, bar(count / total, width)))
    return rows


def resample(values: Sequence[float], width: int) -> list[float]:
    if len(values) <= width:
        return list(values)
    edges = [len(values) * index // width for index in range(width + 1)]
    return [sum(values[start:end]) / (end - start) for start, end in pairwise(edges)]


def _cell(fill: float) -> str:
    eighths = round(fill * 8)
    if eighths <= 0:
        return " "
    return _BLOCKS[min(eighths, 8) - 1]


def _interpolate(points: Sequence[tuple[float, float]], width: int) -> list[float]:
    ordered = sorted(points)
    first, last = ordered[0][0], ordered[-1][0]
    if last == first:
        return [ordered[-1][1]]
    values = []
    place = 0
    for column in range(width):
        x = first + (last - first) * column / max(1, width - 1)
        while place + 2 < len(ordered) and ordered[place + 1][0] <= x:
            place += 1
        (x0, y0), (x1, y1) = ordered[place], ordered[place + 1]
        share = 1.0 if x1 == x0 else min(1.0, (x - x0) / (x1 - x0))
        values.append(y0 + (y1 - y0) * share)
    return values
