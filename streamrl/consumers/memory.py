"""Which reward keeps memory: growth of the process over a minute is looked into by tracing allocations for a while."""

from __future__ import annotations

import asyncio
import functools
import inspect
import itertools
import logging
import os
import time
import tracemalloc
from collections import Counter, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from streamrl.consumers.calls import RewardCalls

logger = logging.getLogger(__name__)

_LOOK_SECONDS: Final = 1.0
_TRACE_SECONDS: Final = 10.0
_FRAMES: Final = 12
_SHARE: Final = 0.25
"""Part of the growth that must have been allocated under a reward for it to be named."""


class Growth:
    """Whether memory grows, and goes on growing. Pure: sizes and times come from outside.

    The smallest size of each window counts, so that what comes and goes does not.

    Args:
        window: seconds of a window.
        windows: of them in a row, each above the one before.
        least: bytes that they grew by in all. What was found once is found again when there is twice as much.
    """

    def __init__(self, window: float = 10.0, windows: int = 6, least: int = 64 << 20) -> None:
        self.per_second = 0.0
        self._window = window
        self._smallest: deque[int] = deque(maxlen=windows)
        self._least = least
        self._from = 0
        self._ends: float | None = None
        self._now = 0

    def add(self, now: float, size: int) -> bool:
        """Take the size (bytes) at a time (seconds of any clock); True when memory has been growing for long enough.

        `per_second` then is the rate in bytes per second; counting begins anew.
        """
        if self._ends is None:
            self._ends, self._now = now + self._window, size
        if now < self._ends:
            self._now = min(self._now, size)
            return False
        self._smallest.append(self._now)
        self._ends, self._now = now + self._window, size
        sizes = list(self._smallest)
        grew = sizes[-1] - sizes[0]
        rises = all(after > before for before, after in itertools.pairwise(sizes))
        if len(sizes) < (self._smallest.maxlen or 0) or not rises or grew < self._least or sizes[-1] < self._from:
            return False
        self.per_second = grew / (self._window * (len(sizes) - 1))
        self._from = 2 * sizes[-1]
        self._smallest.clear()
        return True


@dataclass(frozen=True, slots=True)
class Kept:
    """What code of a reward has allocated and not let go: bytes, and the line that has most of it."""

    bytes: int
    line: str


class MemoryWatch:
    """Names rewards that keep memory, in the log and in their figures.

    Args:
        calls: the rewards of this process.
        growth: when to look into it.
        seconds: how long allocations are traced, which makes Python code up to three times as slow.
    """

    def __init__(
        self, calls: Sequence[RewardCalls], growth: Growth | None = None, seconds: float = _TRACE_SECONDS
    ) -> None:
        self._calls = calls
        self._growth = growth or Growth()
        self._seconds = seconds

    async def run(self) -> None:
        """Watch until cancelled; where the system does not say how large a process is, do nothing."""
        while (size := resident_bytes()) is not None:
            if self._growth.add(time.monotonic(), size):
                await self._look_into(size)
            await asyncio.sleep(_LOOK_SECONDS)

    async def _look_into(self, size: int) -> None:
        snapshot = await traced(self._seconds)
        files = {calls.reward.name: file for calls in self._calls if (file := source_of(calls)) is not None}
        kept = await asyncio.to_thread(kept_by, snapshot, files)
        rate = self._growth.per_second
        named = {name: found for name, found in kept.items() if found.bytes >= _SHARE * rate * self._seconds}
        shown = {"resident_mib": size >> 20, "mib_per_second": round(rate / (1 << 20), 3)}
        if not named:
            logger.warning("memory of this worker grows, and no reward's Python code is seen to keep it", extra=shown)
        for calls in self._calls:
            if calls.reward.name in named:
                found = named[calls.reward.name]
                calls.figures.leaks = f"{found.bytes / self._seconds / 1e6:.3g} MB/s at {found.line}"
                extra = {"reward": calls.reward.name, "line": found.line, **shown}
                logger.warning("a reward keeps memory", extra=extra)


async def traced(seconds: float) -> tracemalloc.Snapshot:
    """What is allocated within so many seconds and still there at their end."""
    mine = not tracemalloc.is_tracing()
    if mine:
        tracemalloc.start(_FRAMES)
    try:
        await asyncio.sleep(seconds)
        return await asyncio.to_thread(tracemalloc.take_snapshot)
    finally:
        if mine:
            tracemalloc.stop()


def kept_by(snapshot: tracemalloc.Snapshot, files: Mapping[str, str]) -> dict[str, Kept]:
    """What was allocated under the code of each reward: of every trace that goes through its file.

    Args:
        snapshot: of all that is kept.
        files: source file by the name of the reward.
    """
    names: dict[str, list[str]] = {}
    for name, file in files.items():
        names.setdefault(file, []).append(name)
    sizes: dict[str, Counter[str]] = {name: Counter() for name in files}
    for found in snapshot.statistics("traceback"):
        for frame in reversed(found.traceback):  # the innermost frame of a reward is the line that a person looks for
            if frame.filename in names:
                for name in names[frame.filename]:
                    sizes[name][f"{Path(frame.filename).name}:{frame.lineno}"] += found.size
                break
    return {name: Kept(sum(lines.values()), lines.most_common(1)[0][0]) for name, lines in sizes.items() if lines}


def source_of(calls: RewardCalls) -> str | None:
    """File with the code of a reward; None for one without (written in C)."""
    call: Any = calls.reward.call
    while isinstance(call, functools.partial):
        call = call.func
    call = inspect.unwrap(call)
    owner = type(call.__self__) if inspect.ismethod(call) else call
    if not inspect.isclass(owner) and not inspect.isfunction(owner):
        owner = type(owner)
    try:
        return inspect.getsourcefile(owner)
    except TypeError:
        return None


def resident_bytes() -> int | None:
    """Memory of this process that is in use, in bytes; None where the system does not say."""
    try:
        pages = int(Path("/proc/self/statm").read_text().split()[1])
    except (OSError, IndexError, ValueError):
        return None
    return pages * os.sysconf("SC_PAGE_SIZE")
