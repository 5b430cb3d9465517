"""The supervisor's events, for a live screen, plain lines or a test.

The callback runs in one thread of its own, event after event, so a terminal that does not read blocks neither the
supervisor nor a role. Log lines that do not fit into the queue are dropped and counted; changes of state never are.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final, Self, TypeAlias

from streamrl.monitor.roles import KnownRole
from streamrl.runtime.instance import RoleState

logger = logging.getLogger(__name__)

QUEUE_LINES: Final = 10_000
_LONGEST_LINGER: Final = 15
"""Times `linger` that a slow reader gets at most at the end."""


@dataclass(frozen=True, slots=True)
class StateChanged:
    """A process of a role has a new state.

    `exit_code` is the last one (negative for a signal), `pause` the seconds until a restart, `pid` None without a
    process.
    """

    role: str
    state: RoleState
    reason: str = ""
    restarts: int = 0
    pid: int | None = None
    exit_code: int | None = None
    pause: float | None = None
    at: float = field(default_factory=time.time)

    @property
    def known(self) -> KnownRole:
        return KnownRole(self.state.value, self.at, self.restarts, self.pid, self.reason, self.exit_code)


@dataclass(frozen=True, slots=True)
class RoleGone:
    """A role was taken out of the run, and has ended."""

    role: str


@dataclass(frozen=True, slots=True)
class LogLine:
    """One line of a role's log, a JSON object without its newline; `tail`: shown again because the role died."""

    role: str
    line: bytes
    tail: bool = False


@dataclass(frozen=True, slots=True)
class LinesDropped:
    """Log lines not shown because the reader was slow; all are in the log files."""

    count: int


@dataclass(frozen=True, slots=True)
class DrainStage:
    """These roles have `seconds` before they are killed."""

    roles: tuple[str, ...]
    seconds: float
    advice: str


@dataclass(frozen=True, slots=True)
class Notice:
    text: str
    error: bool = False
    hint: str = ""


Event: TypeAlias = StateChanged | RoleGone | LogLine | LinesDropped | DrainStage | Notice
OnEvent: TypeAlias = Callable[[Event], None]


class EventPump:
    """Carries events to a callback in a thread of its own; the end of the block waits for it.

    The first exception of the callback is logged, and the next event is delivered all the same. At most `capacity` log
    lines wait. The end waits `linger` seconds for a reader that takes nothing, longer for one that goes on reading.
    """

    def __init__(self, on_event: OnEvent, capacity: int = QUEUE_LINES, linger: float = 2.0) -> None:
        self._broken = False
        self._on_event = on_event
        self._capacity = capacity
        self._linger = linger
        self._queue: deque[Event] = deque()
        self._lines = 0
        self._dropped = 0
        self._delivered = 0
        self._closed = False
        self._wake = threading.Condition()
        self._thread = threading.Thread(target=self._run, name="events", daemon=True)

    def send(self, event: Event) -> None:
        """Queue an event; never blocks. A log line that finds the queue full is dropped and counted."""
        with self._wake:
            if isinstance(event, LogLine):
                if self._lines >= self._capacity:
                    self._dropped += 1
                    return
                self._lines += 1
            self._queue.append(event)
            self._wake.notify()

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        with self._wake:
            self._closed = True
            self._wake.notify()
        seen, rounds = -1, 0
        while self._thread.is_alive() and self._delivered > seen and rounds < _LONGEST_LINGER:
            seen, rounds = self._delivered, rounds + 1
            self._thread.join(self._linger)

    def _take(self) -> list[Event]:
        with self._wake:
            while not self._queue and not self._closed:
                self._wake.wait()
            taken: list[Event] = list(self._queue)
            if self._dropped:
                taken.append(LinesDropped(self._dropped))
            self._queue.clear()
            self._lines = self._dropped = 0
            return taken

    def _run(self) -> None:
        while events := self._take():
            for event in events:
                try:
                    self._on_event(event)
                except Exception:
                    if not self._broken:
                        logger.exception("an event cannot be shown")
                    self._broken = True
                self._delivered += 1
