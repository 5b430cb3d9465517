"""The life of one role instance as a pure state machine: no processes, no clock, no chance of its own.

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

from streamrl.restarts import Deaths, ExitClass, RestartPolicy, classify


class State(StrEnum):
    """Where an instance is in its life."""

    PENDING = "pending"
    """Waits for the roles that must be ready before it."""
    STARTING = "starting"
    """Its process runs and has not said that it is ready."""
    READY = "ready"
    """It does its work."""
    DRAINING = "draining"
    """It was asked to end and finishes what it holds."""
    BACKOFF = "backoff"
    """It died and waits for its restart."""
    STOPPED = "stopped"
    """It ended as it should, or was asked to; final."""
    FAILED = "failed"
    """It cannot be brought back; final."""


FINAL = frozenset({State.STOPPED, State.FAILED})
ALIVE = frozenset({State.STARTING, State.READY, State.DRAINING})


@dataclass(slots=True)
class Instance:
    """State of one role instance. All times are seconds of one monotonic clock.

    Args:
        policy: limits of its restarts.
        finishes: whether exit code 0 without being asked is the end of its work (learner, feeder) or a death.

    Attributes:
        restarts: restarts so far, for people.
        reason: why it is in its state, one line; empty while all is well.
        exit_code: of its last process; negative for a signal.
        until: end of the pause in `backoff`.
    """

    policy: RestartPolicy
    finishes: bool
    state: State = State.PENDING
    restarts: int = 0
    reason: str = ""
    exit_code: int | None = None
    until: float = 0.0
    _deaths: Deaths = field(init=False)

    def __post_init__(self) -> None:
        self._deaths = Deaths(self.policy)

    def start(self) -> None:
        """Its process is being started."""
        self._expect(State.PENDING, State.BACKOFF)
        if self.state is State.BACKOFF:
            self.restarts += 1
        self._deaths.started()
        self.state = State.STARTING

    def ready(self, now: float) -> None:
        """It said that it is ready. Said again, or while draining, it changes nothing."""
        if self.state is State.STARTING:
            self.state, self.reason = State.READY, ""
            self._deaths.ready(now)

    def drain(self, reason: str) -> None:
        """It is asked to end. Without a process it has ended at once; a repeat changes nothing."""
        if self.state in {State.STARTING, State.READY}:
            self.state, self.reason = State.DRAINING, reason
        elif self.state in {State.PENDING, State.BACKOFF}:
            self.state, self.reason = State.STOPPED, reason

    def died(self, now: float, code: int, cause: str, jitter: float, *, fenced: bool = False) -> None:
        """Its process ended.

        Args:
            now: the clock.
            code: exit code, negative for a signal.
            cause: one line on why, shown to people.
            jitter: from [0, 1), for the length of the pause.
            fenced: it left because a newer process elsewhere has taken over. That is not the end of its work: it comes
                back and takes over in turn, as often as any crash may be repeated.
        """
        self._expect(*ALIVE)
        self.exit_code = code
        kind = classify(code)
        if self.state is State.DRAINING:
            # What dies while it is asked to end is not brought back; its leases run out, its work goes to others.
            self.state, self.reason = State.STOPPED, "" if kind is ExitClass.FINISHED else cause
        elif kind is ExitClass.FINISHED and self.finishes and not fenced:
            self.state, self.reason = State.STOPPED, cause
        elif kind is ExitClass.HOPELESS:
            self.state, self.reason = State.FAILED, cause
        else:
            self._crashed(now, cause, jitter)

    def _crashed(self, now: float, cause: str, jitter: float) -> None:
        pause = self._deaths.died(now, jitter)
        if pause is None:
            self.state = State.FAILED
            self.reason = f"{cause}; {self._deaths.recent} deaths within {self.policy.window:g} s"
            return
        self.state, self.reason = State.BACKOFF, cause
        self.until = now + pause

    def _expect(self, *states: State) -> None:
        if self.state not in states:
            raise AssertionError(f"not possible in state {self.state}")
