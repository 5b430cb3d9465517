"""What holds back the calls of one reward: slots, of which there may be more or fewer at any time, and its circuit."""

from __future__ import annotations

import asyncio
import math
from collections import deque
from collections.abc import Callable, Hashable
from typing import Final

LOOK_SECONDS: Final = 1.0
"""Seconds after which the first in line looks whether there are more slots now."""


class Slots:
    """A line in front of some slots, in the order of coming. Made and used in one event loop.

    Args:
        limit: slots there are now, at least 1; None: any number. It is asked anew for each call.
    """

    def __init__(self, limit: Callable[[], int | None]) -> None:
        self._limit = limit
        self._taken = 0
        self._line: deque[asyncio.Event] = deque()

    async def take(self, seconds: float) -> None:
        """Wait for a slot and take it; `give` gives it back. Cancelled, it leaves the line.

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
        """Give a slot back."""
        self._taken -= 1
        self._wake()

    def _free(self) -> bool:
        limit = self._limit()
        return limit is None or self._taken < limit

    def _wake(self) -> None:
        if self._line:
            self._line[0].set()

    async def _turn(self, mine: asyncio.Event) -> None:
        """Wait for a slot that was given back; the first in line also looks by itself."""
        try:
            async with asyncio.timeout(LOOK_SECONDS if self._line[0] is mine else None):
                await mine.wait()
        except TimeoutError:
            return
        mine.clear()


SAMPLES: Final = 5
"""Samples in a row that fail as if the service were away, before the circuit opens."""
FIRST_PAUSE: Final = 0.5
LONGEST_PAUSE: Final = 10.0


class Circuit:
    """A pure state machine; `now` is any clock in seconds that does not go back.

    Closed: calls go through. Open: they wait. After a pause one call tries: its success closes, its failure doubles the
    pause. `opened` counts how often it opened, `since` is when it did (None: it is closed), `why` the failure that did
    it.
    """

    def __init__(self) -> None:
        self.opened = 0
        self.since: float | None = None
        self.why = ""
        self._failing: set[Hashable] = set()
        self._pause = FIRST_PAUSE
        self._next = 0.0
        self._trying = False

    def wait(self, now: float) -> float:
        """Seconds until a call may go through: 0 now, infinite while another call tries."""
        if self.since is None:
            return 0.0
        return math.inf if self._trying else max(0.0, self._next - now)

    def enter(self) -> bool:
        """A call goes through, after `wait` said 0; True: it is the one that tries."""
        if self.since is None:
            return False
        self._trying = True
        return True

    def success(self) -> None:
        """A call ended with a score, whenever it began."""
        self._failing.clear()
        self.since, self._pause, self._trying = None, FIRST_PAUSE, False

    def failure(self, now: float, sample: Hashable, why: str, *, tries: bool, unavailable: bool) -> None:
        """A call failed as if the service were away.

        Args:
            now: of the clock.
            sample: what was to be scored; attempts at one sample count once.
            why: the failure in words.
            tries: what `enter` said of this call.
            unavailable: the reward itself says that nobody can score now: the circuit opens at once.
        """
        if self.since is None:
            self._failing.add(sample)
            if unavailable or len(self._failing) >= SAMPLES:
                self.since, self.why = now, why
                self.opened += 1
                self._next = now + self._pause
        elif tries:
            self._trying, self.why = False, why
            self._pause = min(2 * self._pause, LONGEST_PAUSE)
            self._next = now + self._pause

    def neither(self, *, tries: bool) -> None:
        """A call ended and said nothing of the service (cancelled, or it failed of its sample): another one may try."""
        if tries:
            self._trying = False
