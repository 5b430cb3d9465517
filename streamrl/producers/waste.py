"""When a run drops more than it trains: stop admitting, so that the data is not used up for nothing. Pure.

```
RUNNING  -> for a minute more groups dropped than trained, by now by more than a budget -> STOPPED
STOPPED  -> after a pause that doubles (1 to 10 minutes), the groups of one step are admitted: a trial
         -> at least as many groups were trained as dropped since the stop or the last trial -> RUNNING
```
A budget is what may be in flight at the same time. A run that drops more than that drops what it has just admitted, so
a burst of stale groups after a pause or a restart stops nothing, however long a step takes. A trial is all that a
run loses per pause while the cause lasts; the run goes on by itself when the cause is gone. Groups with equal rewards
do not count, because `learner.advantage.zero_variance` asks for dropping them, nor do those that a person threw away.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from streamrl.queues.ledger import DROPPED_BY_HAND, ZERO_VARIANCE

WINDOW: Final = 60.0
FIRST_PAUSE: Final = 60.0
LONGEST_PAUSE: Final = 600.0
_WANTED: Final = frozenset({DROPPED_BY_HAND, ZERO_VARIANCE})


def wasted(dropped_for: Mapping[str, int]) -> int:
    """Count the groups that were dropped against the user's wish, from the counts by reason."""
    return sum(count for why, count in dropped_for.items() if why not in _WANTED)


class Waste:
    """Decides whether groups may be admitted.

    Attributes:
        allowed: groups that may be admitted now; None: as many as there is room for.
        dropped: groups dropped in the present period; a period begins with a stop, a trial, or when the run trains as
            much as it drops.
        trained: groups trained in the present period.
        retry_at: when the next trial begins, by the clock of `look`; of no meaning while `allowed` is None.
        found: groups dropped and trained, and seconds, of the period that led to the stop.

    Args:
        budget: groups that may be in flight and untrained.
        step: groups of one step of the learner.
    """

    def __init__(self, budget: int, step: int) -> None:
        self.allowed: int | None = None
        self.dropped = self.trained = 0
        self.retry_at = 0.0
        self.found = (0, 0, 0.0)
        self._budget, self._step = budget, step
        self._counts: tuple[int, int] | None = None
        self._since = self._running_since = 0.0
        self._pause = FIRST_PAUSE

    @property
    def stopped(self) -> bool:
        """Whether admission is stopped, or in a trial."""
        return self.allowed is not None

    def look(self, now: float, dropped: int, trained: int) -> None:
        """Take in how many groups were ever dropped (by `wasted`) and trained; `now` never goes back.

        The counts may go back with Redis or with a learner: only growth counts.
        """
        if self._counts is None:
            self._begin(now)
        else:
            self.dropped += max(0, dropped - self._counts[0])
            self.trained += max(0, trained - self._counts[1])
        self._counts = (dropped, trained)
        if self.stopped:
            self._look_stopped(now)
        elif self.trained >= self.dropped:
            self._begin(now)
        elif now - self._since >= WINDOW and self.dropped - self.trained > self._budget:
            self._stop(now)

    def most(self, wanted: int) -> int:
        """How many of the wanted groups may be admitted now."""
        return wanted if self.allowed is None else min(wanted, self.allowed)

    def admitted(self, count: int) -> None:
        """Groups were admitted."""
        if self.allowed is not None:
            self.allowed = max(0, self.allowed - count)

    def _look_stopped(self, now: float) -> None:
        if self.trained and self.trained >= self.dropped:
            self.allowed, self._running_since = None, now
            self._begin(now)
        elif now >= self.retry_at:
            self.allowed = self._step
            self._begin(now)
            self._wait(now)

    def _stop(self, now: float) -> None:
        self.found = (self.dropped, self.trained, now - self._since)
        self.allowed = 0
        if now - self._running_since >= LONGEST_PAUSE:
            self._pause = FIRST_PAUSE
        self._begin(now)
        self._wait(now)

    def _wait(self, now: float) -> None:
        self.retry_at = now + self._pause
        self._pause = min(2 * self._pause, LONGEST_PAUSE)

    def _begin(self, now: float) -> None:
        self.dropped = self.trained = 0
        self._since = now
