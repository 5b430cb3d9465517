"""How long to wait for something that does not answer: full jitter, growing pauses, one patience. Pure."""

from __future__ import annotations

from dataclasses import dataclass

FIRST_PAUSE = 0.05
LONGEST_PAUSE = 2.0


def pause(failures: int, chance: float) -> float:
    """Seconds to wait after the n-th failure in a row (n >= 1), with full jitter; `chance` is uniform in [0, 1).

    Source: Brooker, Exponential Backoff And Jitter (AWS Architecture Blog, 2015), "full jitter".
    """
    exponent = min(failures - 1, 16)  # bounded, so that a long outage overflows nothing
    return chance * min(LONGEST_PAUSE, FIRST_PAUSE * 2.0**exponent)


@dataclass
class Outage:
    """State of one outage; takes the clock as an argument.

    Attributes:
        patience: seconds from the first failure to giving up.
        since: when the first failure was, None when all is well.
        failures: failures since then.
    """

    patience: float
    since: float | None = None
    failures: int = 0

    def failed(self, now: float, chance: float) -> float | None:
        """Note a failure; return the seconds to wait before the next attempt, None when the patience is over."""
        if self.since is None:
            self.since = now
        self.failures += 1
        return None if now - self.since >= self.patience else pause(self.failures, chance)

    def recovered(self) -> None:
        """Note a success: the outage is over."""
        self.since, self.failures = None, 0
