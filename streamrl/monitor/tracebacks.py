"""Tracebacks for people: what belongs to streamrl and to asyncio is folded, the code of a reward stays."""

from __future__ import annotations

import re
from itertools import groupby
from typing import Final

_FRAME: Final = re.compile(r'^  File "(?P<file>[^"]*)", line \d+, in ')
_FRAMEWORK: Final = re.compile(
    r"/(streamrl/(consumers|producers|queues|runtime)|asyncio|concurrent/futures)/|/threading\.py$"
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
