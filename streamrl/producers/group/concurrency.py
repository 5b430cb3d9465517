"""How many requests one server gets at the same time: more until it queues or preempts, then fewer. A pure machine.

Additive increase, multiplicative decrease, as TCP does it with packets: the limit doubles with every quiet period until
the first congestion, and grows by a small step after it. A queue wastes nothing, so after it the limit goes back to
what the server runs; a preemption throws work away, so it costs a share of the limit. Long responses end slowly: until
the requests in flight have come down to the limit, further congestion is still the old one, and changes nothing.
"""

from __future__ import annotations

import math
from typing import Final

from streamrl.engine import EngineLoad

DECREASE: Final = 0.75
"""What is left of the limit after a preemption; after a queue it never falls deeper either."""
QUIET_SECONDS: Final = 1.0
"""Time without congestion before the limit is raised."""
_FULL: Final = 0.9
"""Cache use above which more requests would soon cost a preemption."""
_FIRST: Final = 16
_STEPS: Final = 16


class Concurrency:
    """The limit of requests in flight on one server, at most `most`. All times are seconds of one monotonic clock.

    While the server stands still (paused, taking new weights), call `interrupted` instead of `see`: its load says
    nothing about its capacity then.
    """

    def __init__(self, most: int, first: int = _FIRST) -> None:
        self._most = most
        self._step = max(1, most // _STEPS)
        self.limit = max(1, min(first, most))
        self._slow_start = True
        self._draining = False
        self._queued = False
        self._reading: int | None = None
        self._preemptions: int | None = None
        self._quiet_since: float | None = None
        self._used = False

    def see(self, now: float, load: EngineLoad, *, in_flight: int, peak: int) -> int:
        """Take in the load of the server and return the limit from now on.

        `in_flight` counts its requests now, `peak` the most of them since the last look. A smaller number of
        preemptions than before means that the server was started anew.
        """
        preempted = self._preemptions is not None and load.preemptions > self._preemptions
        self._preemptions = load.preemptions
        # New requests are queued for one step of the server; a real queue is still there at the next reading.
        read = load.reading is None or load.reading != self._reading
        queued = read and self._queued and load.waiting > 0
        if read:
            self._queued, self._reading = load.waiting > 0, load.reading
        self._draining = self._draining and in_flight > self.limit
        if preempted or queued:
            self._quiet_since = None
            self._used = False
            if not self._draining:
                self._back_off(load.running, in_flight, preempted=preempted)
            return self.limit
        if self._quiet_since is None:
            self._quiet_since = now
        self._used = self._used or peak >= self.limit
        if now - self._quiet_since >= QUIET_SECONDS and self._used and load.cache_use < _FULL:
            self.limit = min(self._most, self.limit * 2 if self._slow_start else self.limit + self._step)
            self._quiet_since = now
            self._used = False
        return self.limit

    def interrupted(self) -> None:
        """The server stood still: observations from before no longer count."""
        self._quiet_since = None
        self._queued = False
        self._used = False

    def _back_off(self, running: int, in_flight: int, *, preempted: bool) -> None:
        floor = max(1, math.floor(self.limit * DECREASE))
        self.limit = floor if preempted else max(floor, min(self.limit, running))
        self._slow_start = False
        self._draining = in_flight > self.limit
