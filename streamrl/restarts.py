"""How often, and after which pause, a dead role or engine server is restarted. Pure, without a clock."""

from __future__ import annotations

from dataclasses import dataclass, field

from streamrl.config import SupervisorConfig

HEALTHY_SECONDS = 60.0
"""After being ready for this long, the backoff starts from the beginning."""


@dataclass(frozen=True, slots=True)
class RestartPolicy:
    """Limits of restarts: at most `max_restarts` within `window` seconds, pauses from `backoff` to `max_backoff`."""

    max_restarts: int
    window: float
    backoff: float
    max_backoff: float

    @classmethod
    def of(cls, config: SupervisorConfig) -> RestartPolicy:
        return cls(config.max_restarts, config.window, config.backoff, config.max_backoff)

    def pause(self, failures: int, jitter: float) -> float:
        """Seconds to wait after `failures` deaths in a row (1 or more), with `jitter` drawn from [0, 1).

        Full jitter: a uniform draw below min(max_backoff, backoff * 2^(failures - 1)), so that roles that died of the
        same cause do not restart at the same moment (aws.amazon.com, "Exponential Backoff and Jitter").
        """
        exponent = min(failures - 1, 60)
        return jitter * min(self.max_backoff, self.backoff * 2.0**exponent)


@dataclass(slots=True)
class Deaths:
    policy: RestartPolicy
    _failures: int = 0
    _ready_at: float | None = None
    _recent: list[float] = field(default_factory=list)

    @property
    def recent(self) -> int:
        return len(self._recent)

    def started(self) -> None:
        self._ready_at = None

    def ready(self, now: float) -> None:
        """A repeat restarts the count of healthy seconds."""
        self._ready_at = now

    def died(self, now: float, jitter: float) -> float | None:
        """Count a death. Returns the seconds to wait before the next start, None after too many."""
        if self._ready_at is not None and now - self._ready_at >= HEALTHY_SECONDS:
            self._failures = 0
        self._ready_at = None
        self._failures += 1
        self._recent = [at for at in self._recent if now - at < self.policy.window] + [now]
        return None if len(self._recent) > self.policy.max_restarts else self.policy.pause(self._failures, jitter)
