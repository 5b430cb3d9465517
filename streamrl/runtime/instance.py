"""The states of one role instance, as a pure state machine without processes, clock or random numbers.

```
pending -> starting -> ready -> draining -> stopped
              |          |          |
              +----------+----------+--> backoff -> starting     (a crash, while restarts are left)
                                    +--> stopped | failed
```
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum

from streamrl.errors import ExitClass, classify
from streamrl.restarts import Deaths, RestartPolicy


class RoleState(StrEnum):
    PENDING = "pending"
    """Waits for the roles that must be ready before it."""
    STARTING = "starting"
    """Its process runs and has not reported that it is ready."""
    READY = "ready"
    """It does its work."""
    DRAINING = "draining"
    """It was asked to end and finishes what it holds."""
    BACKOFF = "backoff"
    """It died and waits for its restart."""
    STOPPED = "stopped"
    """It finished its work, or ended because it was asked to. Final."""
    FAILED = "failed"
    """It is not restarted again. Final."""


FINAL = frozenset({RoleState.STOPPED, RoleState.FAILED})
ALIVE = frozenset({RoleState.STARTING, RoleState.READY, RoleState.DRAINING})


@dataclass(slots=True)
class Instance:
    """State of one role instance. All times are seconds of one monotonic clock.

    `finishes`: exit code 0 without being asked is the end of its work (learner, feeder), not a death. `reason` says why
    it is in its state; `until` is the end of a pause in `backoff`.
    """

    policy: RestartPolicy
    finishes: bool
    state: RoleState = RoleState.PENDING
    restarts: int = 0
    reason: str = ""
    exit_code: int | None = None
    until: float = 0.0
    _deaths: Deaths = field(init=False)

    def __post_init__(self) -> None:
        self._deaths = Deaths(self.policy)

    def start(self) -> None:
        self._expect(RoleState.PENDING, RoleState.BACKOFF)
        if self.state is RoleState.BACKOFF:
            self.restarts += 1
        self._deaths.started()
        self.state = RoleState.STARTING

    def ready(self, now: float) -> None:
        """A repeat, or a call while draining, changes nothing."""
        if self.state is RoleState.STARTING:
            self.state, self.reason = RoleState.READY, ""
            self._deaths.ready(now)

    def drain(self, reason: str) -> None:
        """Ask it to end. Without a process it is stopped at once. A repeat changes nothing."""
        if self.state in {RoleState.STARTING, RoleState.READY}:
            self.state, self.reason = RoleState.DRAINING, reason
        elif self.state in {RoleState.PENDING, RoleState.BACKOFF}:
            self.state, self.reason = RoleState.STOPPED, reason

    def died(self, now: float, code: int, cause: str, jitter: float, *, fenced: bool = False) -> None:
        """Its process ended with `code` (negative for a signal); `cause` is for people.

        `jitter` in [0, 1) decides the pause. `fenced`: it ended because a newer process took over. It is restarted as
        after a crash, and takes over in turn.
        """
        self._expect(*ALIVE)
        self.exit_code = code
        kind = classify(code)
        if self.state is RoleState.DRAINING:
            # No restart: its leases expire and others get its work.
            self.state, self.reason = RoleState.STOPPED, "" if kind is ExitClass.FINISHED else cause
        elif kind is ExitClass.FINISHED and self.finishes and not fenced:
            self.state, self.reason = RoleState.STOPPED, cause
        elif kind is ExitClass.HOPELESS:
            self.state, self.reason = RoleState.FAILED, cause
        else:
            self._crashed(now, cause, jitter)

    def _crashed(self, now: float, cause: str, jitter: float) -> None:
        pause = self._deaths.died(now, jitter)
        if pause is None:
            self.state = RoleState.FAILED
            self.reason = f"{cause}; {self._deaths.recent} deaths within {self.policy.window:g} s"
            return
        self.state, self.reason = RoleState.BACKOFF, cause
        self.until = now + pause

    def _expect(self, *states: RoleState) -> None:
        if self.state not in states:
            raise AssertionError(f"not possible in state {self.state}")
