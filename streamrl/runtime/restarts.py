"""When a dead role comes back: what its exit code means, how long to wait, how often. Pure functions.

| exit code | meaning | what the supervisor does |
|---|---|---|
| 0 | finished | nothing; the learner's means that the run is finished |
| 3 | failed before it was ready | no restart, the run fails |
| 64-78, without 69 and 75 | configuration, data, plug-in or a broken promise | no restart, the run fails |
| 69, 75 | a service is away, or a deadline is over | restart |
| anything else, every signal | crash | restart |
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from streamrl.config import SupervisorConfig
from streamrl.errors import ExitCode

HEALTHY_SECONDS = 60.0
"""A role that was ready for this long starts its backoff from the beginning."""


class ExitClass(StrEnum):
    """What an exit code asks for."""

    FINISHED = "finished"
    HOPELESS = "hopeless"
    CRASHED = "crashed"


def classify(code: int) -> ExitClass:
    """Return the class of an exit code; negative codes are signals, as in `asyncio.subprocess`."""
    if code == ExitCode.OK:
        return ExitClass.FINISHED
    if code in {ExitCode.UNREACHABLE, ExitCode.TEMPORARY}:
        return ExitClass.CRASHED
    if code == ExitCode.NOT_READY or 64 <= code <= 78:
        return ExitClass.HOPELESS
    return ExitClass.CRASHED


@dataclass(frozen=True, slots=True)
class RestartPolicy:
    """Limits of restarts: at most `max_restarts` within `window` seconds, pauses from `backoff` to `max_backoff`."""

    max_restarts: int
    window: float
    backoff: float
    max_backoff: float

    @classmethod
    def of(cls, config: SupervisorConfig) -> RestartPolicy:
        """Take the limits from the configuration."""
        return cls(config.max_restarts, config.window, config.backoff, config.max_backoff)

    def pause(self, failures: int, jitter: float) -> float:
        """Seconds to wait after `failures` deaths in a row (1 or more), with `jitter` drawn from [0, 1).

        Full jitter: a uniform draw below min(max_backoff, backoff * 2^(failures - 1)), so that roles that died of the
        same cause do not come back at the same moment (aws.amazon.com, "Exponential Backoff and Jitter").
        """
        exponent = min(failures - 1, 60)
        return jitter * min(self.max_backoff, self.backoff * 2.0**exponent)
