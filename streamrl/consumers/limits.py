"""Limits on the calls of one reward: its slots, whose number may change at any time, and its circuit."""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections.abc import Callable, Hashable
from typing import Final

LOOK_SECONDS: Final = 1.0
"""Seconds after which the first waiter checks the limit again, because nothing announces that it grew."""


class Slots:
    """A first-come, first-served semaphore whose size may change while slots are taken. For one event loop.

    `limit` is called for each acquisition: the number of slots now, at least 1; None: any number.
    """

    def __init__(self, limit: Callable[[], int | None]) -> None:
        self._limit = limit
        self._taken = 0
        self._line = asyncio.Lock()  # its holder is first in line and waits for a free slot
        self._released = asyncio.Event()

    async def acquire(self, seconds: float) -> None:
        async with asyncio.timeout(seconds), self._line:
            while not self._free():
                self._released.clear()
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(LOOK_SECONDS):
                        await self._released.wait()
            self._taken += 1

    def release(self) -> None:
        self._taken -= 1
        self._released.set()

    def _free(self) -> bool:
        limit = self._limit()
        return limit is None or self._taken < limit


SAMPLES: Final = 5
"""Samples in a row that fail as if the service were away, until the circuit opens."""
FIRST_PAUSE: Final = 0.5
LONGEST_PAUSE: Final = 10.0


class Circuit:
    """A circuit breaker: while a service is away, samples wait instead of failing one after the other.

    Closed: calls go through. Open: they wait. After a pause one call probes: its success closes the circuit, its
    failure doubles the pause. A pure state machine; `now` is in seconds of any monotonic clock.
    """

    def __init__(self) -> None:
        self.opened = 0  # how often
        self.open_since: float | None = None  # None: closed
        self.why = ""  # the failure that opened it
        self._failing: set[Hashable] = set()
        self._pause = FIRST_PAUSE
        self._next = 0.0
        self._probing = False

    def wait(self, now: float) -> float:
        """Seconds until a call may go through; infinite while another call probes."""
        if self.open_since is None:
            return 0.0
        return math.inf if self._probing else max(0.0, self._next - now)

    def enter(self) -> bool:
        """Let a call through, after `wait` returned 0. Returns whether it is the probe."""
        if self.open_since is None:
            return False
        self._probing = True
        return True

    def success(self) -> None:
        """A call ended with a score, whenever it began: close the circuit."""
        self._failing.clear()
        self.open_since, self._pause, self._probing = None, FIRST_PAUSE, False

    def failure(self, now: float, sample: Hashable, why: str, *, probe: bool, unavailable: bool) -> None:
        """A call failed as if the service were away. Several attempts at one sample count once.

        `unavailable`: the reward itself says that it cannot score now, so the circuit opens at once.
        """
        if self.open_since is None:
            self._failing.add(sample)
            if unavailable or len(self._failing) >= SAMPLES:
                self.open_since, self.why = now, why
                self.opened += 1
                self._next = now + self._pause
        elif probe:
            self._probing, self.why = False, why
            self._pause = min(2 * self._pause, LONGEST_PAUSE)
            self._next = now + self._pause

    def inconclusive(self, *, probe: bool) -> None:
        """A call was cancelled, or the sample caused its failure: nothing is known, and another call may probe."""
        if probe:
            self._probing = False
