"""What `streamrl up` shows while a run goes on: a live screen, plain lines, or the logs of all roles.

A viewer is a context manager whose `on_event` is called with the supervisor's events in a thread of their own.
"""

from __future__ import annotations

import logging
import sys
import threading
import time
from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Final, Self

from typing_extensions import override

from streamrl.commands import output
from streamrl.monitor.board import Board
from streamrl.monitor.lines import clock, duration, log_line, number, percent, printable
from streamrl.monitor.tail import record_of
from streamrl.runtime.events import DrainStage, Event, LinesDropped, LogLine, Notice, RoleGone, StateChanged

if TYPE_CHECKING:
    from rich.live import Live

logger = logging.getLogger(__name__)

PLAIN_SECONDS: Final = 5.0
LIVE_SECONDS: Final = 0.5
_LOUD: Final = frozenset({"warning", "error", "critical"})
_BAD_STATES: Final = frozenset({"backoff", "failed"})
_COLOURS: Final = (36, 33, 32, 35, 34, 96, 93, 92, 95, 94)


class Viewer(ABC):
    """Keeps the board, and passes every event on to `show`."""

    def __init__(self, board: Board) -> None:
        self.board = board

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        del error

    def on_event(self, event: Event) -> None:
        if isinstance(event, StateChanged):
            self.board.role(event.role, event.known)
        elif isinstance(event, RoleGone):
            self.board.forget(event.role)
        elif isinstance(event, LinesDropped):
            self.board.event(f"{event.count} log lines not shown; they are in the log files")
        text, bad = describe(event)
        if isinstance(event, DrainStage):
            self.board.footer = event.advice
        if text:
            self.board.event(text, bad=bad)
        self.show(event, text, bad=bad)

    @abstractmethod
    def show(self, event: Event, text: str, *, bad: bool) -> None:
        """Show an event; `text` is its one-line description, empty for what only full logs show."""


def describe(event: Event) -> tuple[str, bool]:
    """One line and whether it is bad news; empty for log lines below a warning and plain state changes."""
    if isinstance(event, Notice):
        return f"{event.text}{f' ({event.hint})' if event.hint else ''}", event.error
    if isinstance(event, DrainStage):
        return f"draining {', '.join(event.roles)}: up to {event.seconds:.0f} s ({event.advice})", False
    if isinstance(event, RoleGone):
        return f"{event.role} left the run", False
    if isinstance(event, StateChanged) and event.state.value in _BAD_STATES:
        if event.pause is None:  # the supervisor tells the reason itself when a role has failed for good
            return f"{event.role} {event.state.value}", True
        return f"{event.role} {event.state.value}: {event.reason}, again in {event.pause:.1f} s", True
    if isinstance(event, LogLine) and not event.tail:
        record = record_of(event.line)
        if record.get("level") in _LOUD:
            # The supervisor's own line says what ended a role.
            details = ("server", "why") if record["level"] == "warning" else ("server",)
            named = " ".join(f"{key} {record[key]}" for key in ("group", "sample") if record.get(key) is not None)
            what = str(record.get("event", "")) + (f" ({named})" if named else "")
            words = [what, *(_ends(record[key]) for key in details if record.get(key))]
            return printable(f"{event.role}: {', '.join(words)}"), record["level"] != "warning"
    return "", False


def _ends(value: object) -> str:
    """The first line of a text and, if there are more, the last: the files have the log between them."""
    lines = str(value).strip().splitlines() or [""]
    return lines[0] if len(lines) == 1 else f"{lines[0]} ... {lines[-1].strip()}"


class LogViewer(Viewer):
    @override
    def show(self, event: Event, text: str, *, bad: bool) -> None:
        del text, bad
        if isinstance(event, LogLine):
            if not event.tail:
                self._print(event.role, record_of(event.line))
        elif isinstance(event, StateChanged):
            words = f"{event.state.value}{f': {event.reason}' if event.reason else ''}"
            self._print(event.role, {"at": event.at, "event": words})
        else:
            self._print("supervisor", {"event": describe(event)[0]})

    def _print(self, role: str, record: dict[str, object]) -> None:
        at = record.get("at")
        width = max([len("supervisor"), *(len(name) for name, _ in self.board.sorted_roles())])
        line = log_line(role, float(at) if isinstance(at, (int, float)) else 0.0, record, width)
        if output.wants_colour(sys.stdout):
            head, bar, rest = line.partition(" | ")
            line = f"\x1b[{_COLOURS[sum(role.encode()) % len(_COLOURS)]}m{head}{bar}\x1b[0m{rest}"
        output.write(line)


class _Ticking(Viewer):
    """A viewer with a thread of its own that refreshes and shows at a fixed pace."""

    seconds: float

    def __init__(self, board: Board) -> None:
        super().__init__(board)
        self._broken = False
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="screen", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._stop.set()
        self._thread.join()
        self._look()
        super().__exit__(*error)

    def _run(self) -> None:
        while not self._stop.wait(self.seconds):
            self._look()

    def _look(self) -> None:
        """Refresh and show. The first failure is logged; the next look may succeed."""
        try:
            self.board.refresh()
            self.tick()
        except Exception:
            if not self._broken:
                logger.exception("the screen failed")
                output.note("the screen failed (see logs/supervisor.jsonl); the run goes on")
            self._broken = True

    @abstractmethod
    def tick(self) -> None:
        """Show the board."""


class PlainViewer(_Ticking):
    """For places without a terminal."""

    seconds = PLAIN_SECONDS

    @override
    def show(self, event: Event, text: str, *, bad: bool) -> None:
        if isinstance(event, StateChanged) and event.state.value == "ready":
            text = f"{event.role} ready"
        if text:
            output.write(f"{'!' if bad else ' '} {clock(time.time())} {text}")

    @override
    def tick(self) -> None:
        if self.board.progress.steps or self.board.snapshot is not None:
            output.write(plain_line(self.board))


def plain_line(board: Board) -> str:
    progress = board.progress
    parts = [f"{duration(time.time() - board.started):>6}"]
    if progress.steps:
        step = progress.steps[-1]
        goal = f"/{board.goal.steps}" if board.goal.steps else ""
        parts.append(f"step {step.step}{goal} v{step.version}")
        parts.append(f"reward {number(step.reward)} loss {number(step.loss)}")
    points = board.accuracy()
    if points:
        version, accuracy = points[-1]
        parts.append(f"accuracy {accuracy:.3f} {progress.accuracy.several(version)}".rstrip() + f" (v{version})")
    if tokens := sum((stale := board.recent_staleness()).values()):
        parts.append(f"stale {sum(age * count for age, count in stale.items()) / tokens:.1f}")
    if board.snapshot is not None:
        lags = " ".join(f"{stream.name} {stream.lag}" for stream in board.snapshot.train.streams)
        parts.append(f"waiting {lags}")
    parts += [
        f"{pace.name} {number(pace.tokens_per_second)} tok/s waits {percent(pace.waits)}" for pace in board.paces()
    ]
    for name, known in board.sorted_roles():
        if known.state not in {"ready", "stopped"}:
            since = f" {duration(time.time() - known.since)}" if known.state == "starting" else ""
            parts.append(f"{name} {known.state}{since}")
    if board.snapshot is not None:
        shown = board.snapshot.roles.items()
        parts += [f"{name} blocked" for name, fields in shown if fields.get("state") == "blocked"]
        if board.snapshot.train.dead:
            parts.append(f"{board.snapshot.train.dead} dead letters")
    if board.restarts:
        parts.append(f"{board.restarts} restarts")
    parts += [f"{name}: {printable(trouble)}" for name, trouble in board.troubles()]
    if cause := board.stalled():
        parts.append(f"STALLED: {cause}")
    elif (stage := board.verdict().stage) not in {"none", "unknown"}:
        parts.append(f"bottleneck {stage}")
    return " | ".join(parts)


class LiveViewer(_Ticking):
    seconds = LIVE_SECONDS
    _live: Live

    def __enter__(self) -> Self:
        from rich.live import Live

        self._console = output.console()
        self._live = Live(console=self._console, auto_refresh=False, transient=False)
        self._live.start()
        return super().__enter__()

    def __exit__(self, *error: object) -> None:
        self.board.footer = "The run has ended"
        try:
            super().__exit__(*error)
        finally:
            self._live.stop()

    @override
    def show(self, event: Event, text: str, *, bad: bool) -> None:
        """The next redraw shows it."""

    @override
    def tick(self) -> None:
        from streamrl.monitor.screen import render

        self._live.update(render(self.board, self._console.width), refresh=True)
