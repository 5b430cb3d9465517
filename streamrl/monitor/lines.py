"""Small pieces of text that all screens share: durations, sizes, numbers, log lines, tracebacks."""

from __future__ import annotations

import re
import time
from collections.abc import Mapping
from itertools import groupby
from typing import Any, Final

_SHOWN_ELSEWHERE: Final = frozenset({"at", "time", "mono", "role", "level", "event", "logger", "message", "exception"})

_QUIET: Final = frozenset({"INFO", "DEBUG", "RAW"})
_FRAME: Final = re.compile(r'^  File "(?P<file>[^"]*)", line \d+, in ')
_FRAMEWORK: Final = re.compile(r"/(streamrl/[a-z_]+|asyncio|concurrent/futures)/|/threading\.py$")


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


def latency(seconds: float | None) -> str:
    """`12us`, `3.4ms`, `1.2s`; `-` for None."""
    if seconds is None:
        return "-"
    if seconds < 0.001:
        return f"{seconds * 1e6:.0f}us"
    return f"{seconds * 1e3:.3g}ms" if seconds < 1 else duration(seconds)


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


def clock(at: float) -> str:
    return time.strftime("%H:%M:%S", time.localtime(at)) if at > 0 else " " * 8


def date_time(at: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(at))


def log_line(role: str, at: float, record: Mapping[str, Any], width: int) -> str:
    """Render one record of a role's log: `12:01:33 rollout.0 | WARNING event words key=value`, exception below."""
    level = str(record.get("level", "info")).upper()
    event = str(record.get("event", record.get("message", "")))
    pairs = [f"{key}={value}" for key, value in record.items() if key not in _SHOWN_ELSEWHERE and value is not None]
    text = " ".join([*([] if level in _QUIET else [level]), event, *pairs])
    lines = [text, *str(record.get("exception") or "").splitlines()]
    return "\n".join(f"{clock(at)} {role:{width}} | {printable(line)}" for line in lines)


def shortened(text: Any, most: int = 100) -> str:
    """The text as Python writes it, on one line, of at most `most` characters."""
    shown = repr(text) if isinstance(text, str) else str(text)
    return shown if len(shown) <= most else f"{shown[: most - 3]}..."


def printable(text: str) -> str:
    """The text with control characters spelt out, so that a model or a reward cannot steer the terminal."""
    return "".join(
        char if char.isprintable() or char == "\t" else char.encode("unicode_escape").decode() for char in text
    )


def folded(detail: str) -> list[str]:
    """The lines of a traceback, with runs of frames of the framework in one line each.

    The innermost frame of each exception stays, wherever it is: there the error was raised.
    """
    blocks: list[tuple[bool, list[str]]] = []
    for line in detail.splitlines():
        frame = _FRAME.match(line)
        if frame is not None:
            blocks.append((_FRAMEWORK.search(frame["file"]) is not None, [line]))
        elif line.startswith("    ") and blocks:
            blocks[-1][1].append(line)  # the source of the frame, and the marks below it
        else:
            if blocks and blocks[-1][0] and line.strip():
                blocks[-1] = (False, blocks[-1][1])  # what follows is the error that this frame raised
            blocks.append((False, [line]))
    lines: list[str] = []
    for framework, run in groupby(blocks, key=lambda block: block[0]):
        found = list(run)
        if framework:
            lines.append(f"  ... {len(found)} frame{'s' if len(found) > 1 else ''} of streamrl and asyncio")
        else:
            lines.extend(line for _, block in found for line in block)
    return lines
