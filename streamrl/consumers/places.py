"""Places for the calls of one reward: how many may run at the same time, which may change while they run."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from typing import Final

LOOK_SECONDS: Final = 1.0
"""Seconds after which the first in line looks whether there are more places now."""


class Places:
    """A line in front of some places, in the order of coming. Made and used in one event loop.

    Args:
        limit: places there are now, at least 1; None: any number. It is asked anew for each call.
    """

    def __init__(self, limit: Callable[[], int | None]) -> None:
        self._limit = limit
        self._taken = 0
        self._line: deque[asyncio.Event] = deque()

    async def take(self, seconds: float) -> None:
        """Wait for a place and take it; `give` gives it back. Cancelled, it leaves the line.

        Raises:
            TimeoutError: there was none within so many seconds.
        """
        if not self._line and self._free():
            self._taken += 1
            return
        mine = asyncio.Event()
        self._line.append(mine)
        try:
            async with asyncio.timeout(seconds):
                while self._line[0] is not mine or not self._free():
                    await self._turn(mine)
            self._taken += 1
        finally:
            self._line.remove(mine)
            self._wake()

    def give(self) -> None:
        """Give a place back."""
        self._taken -= 1
        self._wake()

    def _free(self) -> bool:
        limit = self._limit()
        return limit is None or self._taken < limit

    def _wake(self) -> None:
        if self._line:
            self._line[0].set()

    async def _turn(self, mine: asyncio.Event) -> None:
        """Wait for a place that was given back; the first in line also looks by itself."""
        try:
            async with asyncio.timeout(LOOK_SECONDS if self._line[0] is mine else None):
                await mine.wait()
        except TimeoutError:
            return
        mine.clear()
