"""The state behind all screens: the newest snapshot, the run's progress, the roles and the last events."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Final

from streamrl.config import RunConfig
from streamrl.monitor.progress import Progress
from streamrl.monitor.roles import KnownRole
from streamrl.monitor.snapshot import Rates, Snapshot
from streamrl.monitor.verdict import RolePace, Verdict, judge, paces, stalled, unanswered

_EVENTS_KEPT: Final = 50
_AT_WORK: Final = frozenset({"ready", "draining"})


@dataclass(frozen=True, slots=True)
class Goal:
    """Limits of the run; None: no such limit.

    `round_responses` is the size of an evaluation round; a point with fewer than half of them is not shown yet.
    """

    steps: int | None = None
    accuracy: float | None = None
    round_responses: int = 1


@dataclass(slots=True)
class Board:
    """`role` and `event` may be called from any thread. `look` takes a snapshot, None while Redis does not answer."""

    name: str
    run_dir: Path
    goal: Goal
    look: Callable[[], Snapshot | None]
    config: RunConfig | None = None
    started: float = field(default_factory=time.time)
    footer: str = "Ctrl-C drains and stops, again: now"
    snapshot: Snapshot | None = None
    roles: dict[str, KnownRole] = field(default_factory=dict)
    events: deque[tuple[float, str, bool]] = field(default_factory=lambda: deque(maxlen=_EVENTS_KEPT))
    progress: Progress = field(init=False)
    _rates: Rates = field(default_factory=Rates)
    _silent: bool = False
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def __post_init__(self) -> None:
        self.progress = Progress(self.run_dir)

    def role(self, name: str, state: KnownRole) -> None:
        with self._lock:
            self.roles[name] = state

    def forget(self, name: str) -> None:
        with self._lock:
            self.roles.pop(name, None)

    def event(self, text: str, *, bad: bool = False) -> None:
        with self._lock:
            self.events.append((time.time(), text, bad))

    def refresh(self) -> None:
        """Read the queue in one round trip, and what was added to the files."""
        snapshot = self.look()
        self._silent = snapshot is None and self.snapshot is not None
        if snapshot is not None:
            self.snapshot = self._rates.of(snapshot)
        elif self.snapshot is not None:
            self.snapshot = replace(self.snapshot, roles={})
        self.progress.refresh()

    def sorted_roles(self) -> list[tuple[str, KnownRole]]:
        with self._lock:
            return list(self.roles.items())

    def last_events(self, count: int) -> list[tuple[float, str, bool]]:
        """Oldest first: (seconds since 1970, text, whether it is bad news)."""
        with self._lock:
            return list(self.events)[-count:]

    def troubles(self) -> list[tuple[str, str]]:
        roles = self.snapshot.roles if self.snapshot is not None else {}
        return [(name, status["trouble"]) for name, status in sorted(roles.items()) if status.get("trouble")]

    def paces(self) -> list[RolePace]:
        """Of the learner and the replicas that are at work; a role that died or left has none."""
        if self.snapshot is None:
            return []
        states = dict(self.sorted_roles())
        found = [*paces(self.snapshot, "learner"), *paces(self.snapshot, "rollout")]
        return [pace for pace in found if pace.name not in states or states[pace.name].state in _AT_WORK]

    def verdict(self) -> Verdict:
        if self.snapshot is None or self.config is None:
            return Verdict("unknown", "not enough steps yet")
        return judge(self.snapshot, self.config)

    def stalled(self) -> str:
        """Why the run stands still; empty if it does not, or if it ends."""
        if self._silent:
            states = dict(self.sorted_roles())
            return unanswered("") if all(state.state == "ready" for state in states.values()) else ""
        return stalled(self.snapshot) if self.snapshot is not None else ""

    @property
    def restarts(self) -> int:
        return sum(state.restarts for _, state in self.sorted_roles())

    def accuracy(self) -> list[tuple[int, float]]:
        """`(version, held-out accuracy)` ascending, of rounds that are at least half done."""
        return self.progress.accuracy.points(max(1, self.goal.round_responses // 2))

    def recent_staleness(self) -> dict[int, int]:
        """Trained tokens of the last 20 steps by their age in steps."""
        counts: dict[int, int] = {}
        for step in list(self.progress.steps)[-20:]:
            for age, tokens in step.staleness.items():
                counts[age] = counts.get(age, 0) + tokens
        return counts
