"""Names rewards that block the event loop, and rewards that are called while the memory of the worker grows.

A thread checks ten times a second which call is on the stack of the event loop, and whether the loop has turned since
the last check. A C function that never releases the interpreter stops this thread too; then the supervisor logs all
stacks after `supervisor.liveness_deadline` and kills the worker.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import linecache
import logging
import os
import signal
import sys
import sysconfig
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any, Final

from typing_extensions import override

from streamrl.consumers.calls import CallEnded, CallThreads, RewardCalls
from streamrl.consumers.reward import RewardSample

logger = logging.getLogger(__name__)

HELD_SECONDS: Final = 1.0
"""A reward that holds the event loop for longer than this is counted."""
NAMED_SECONDS: Final = 5.0
"""A reward that still holds the event loop after this time is named."""
_LOOK_SECONDS: Final = 0.1
_STACK_LINES: Final = 8
_CALL: Final = RewardCalls._call.__code__  # noqa: SLF001 (the locals of its frame tell reward and sample)
_WORK: Final = CallThreads._work.__code__  # noqa: SLF001 (the locals of its frame tell the job of a thread)
_OURS: Final = str(Path(__file__).parents[1]) + os.sep
_LIBRARIES: Final = (
    _OURS,
    "<frozen ",
    *(sysconfig.get_path(name) + os.sep for name in ("stdlib", "purelib", "platlib")),
)
_END: Final = signal.SIGVTALRM
"""Sent to the main thread to end a call. Rewards use SIGALRM themselves, and this signal is free."""
_MEMORY_SECONDS: Final = 1.0


# --- the event loop ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class RunningCall:
    """A call on the stack of a thread. `key` identifies it; `since` is the first look that saw it."""

    key: int
    calls: RewardCalls
    subject: Any
    since: float

    @property
    def sample(self) -> RewardSample:
        return self.subject if isinstance(self.subject, RewardSample) else self.subject[0]


class LoopWatch:
    """Counts and names rewards that hold the event loop. `tell` repeatedly gets a line after `seconds`."""

    def __init__(
        self, calls: Sequence[RewardCalls], tell: Callable[[str], None], seconds: float = NAMED_SECONDS
    ) -> None:
        self._calls = calls
        self._tell = tell
        self._seconds = seconds
        self._held: RunningCall | None = None
        self._named: set[tuple[Any, Any]] = set()
        self._told_at = 0.0
        self._turning = False
        self._turned_at = 0.0

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        ended = threading.Event()
        arguments = (ended, threading.get_ident(), asyncio.get_running_loop())
        threading.Thread(target=self._watch, args=arguments, name="reward-watch", daemon=True).start()
        try:
            yield
        finally:
            ended.set()

    def _watch(self, ended: threading.Event, thread: int, loop: asyncio.AbstractEventLoop) -> None:
        before, computed = time.monotonic(), time.process_time()
        while not ended.wait(_LOOK_SECONDS):
            frames = sys._current_frames()  # noqa: SLF001 (the documented way to see other threads)
            now = time.monotonic()
            kept = now - before - _LOOK_SECONDS
            # If this process used no processor time meanwhile, the machine is busy, and no reward is the cause.
            kept = kept if kept > HELD_SECONDS and time.process_time() - computed > HELD_SECONDS else 0.0
            self._look(frames.get(thread), now, kept)
            if not self._turning:
                self._turning = True
                with contextlib.suppress(RuntimeError):  # the loop is closed: the process ends
                    loop.call_soon_threadsafe(self._turn)
            self._check_threads(frames, now)
            before, computed = time.monotonic(), time.process_time()

    def _turn(self) -> None:
        self._turned_at, self._turning = time.monotonic(), False

    def _look(self, frame: FrameType | None, now: float, kept: float) -> None:
        """Inspect the stack of the event loop. `kept`: seconds in which even this thread could not run."""
        held, found = self._held, _call_on(frame)
        if held is not None and (not self._turning or found is None or found[0] != held.key):
            seconds = (now if self._turning else self._turned_at) - held.since
            if seconds > HELD_SECONDS:
                held.calls.held_loop(seconds)
            self._held = None
        if frame is not None and found is not None:
            self._held = self._held or RunningCall(*found, since=now - kept)
            self._lasts(self._held, frame, now - self._held.since)
        elif kept:
            self._suspect(kept)

    def _suspect(self, seconds: float) -> None:
        running = [calls for calls in self._calls if calls.reward.blocking and calls.in_flight]
        if len(running) == 1:
            running[0].held_loop(seconds)
        elif running:
            extra = {"seconds": round(seconds, 3), "rewards": ", ".join(calls.reward.name for calls in running)}
            logger.warning("the event loop stood still while sync rewards ran", extra=extra)

    def _lasts(self, call: RunningCall, frame: FrameType, seconds: float) -> None:
        if seconds < self._seconds:
            return
        name, sample, now = call.calls.reward.name, call.sample, time.monotonic()
        if now - self._told_at >= self._seconds / 4:
            self._told_at = now
            self._tell(f"{name} holds the event loop for {seconds:.0f} s at {_place(frame)}")
        if (call.key, call.since) not in self._named:
            self._named = {(call.key, call.since)}
            lines = traceback.extract_stack(frame)[-_STACK_LINES:]
            stack = " > ".join(f"{line.filename}:{line.lineno} {line.name}" for line in lines)
            extra = {"reward": name, "group": sample.group_id, "sample": sample.index, "seconds": round(seconds, 1)}
            logger.error("a reward holds the event loop", extra=extra | {"stack": stack})

    def _check_threads(self, frames: Mapping[int, FrameType], now: float) -> None:
        """Look at the stacks of all threads."""


class Foreground(LoopWatch):
    """The watch of an interactive command: a reward that blocks ends at its deadline, and at Ctrl-C.

    A signal from this process to itself ends the call. `tell` gets one line for each line of code that has been running
    for `seconds`, also for sync rewards in threads.
    """

    def __init__(
        self, calls: Sequence[RewardCalls], tell: Callable[[str], None], seconds: float = NAMED_SECONDS
    ) -> None:
        super().__init__(calls, tell, seconds)
        self._stopping = False
        self._signals = False
        self._since: dict[int, float] = {}
        self._interrupted_before: Callable[[int, FrameType | None], Any] | None = None

    @override
    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        self._signals = threading.current_thread() is threading.main_thread()  # signals reach no other thread
        before = signal.getsignal(signal.SIGINT)
        if self._signals:
            signal.signal(_END, self._end)
            if callable(before):
                self._interrupted_before = before
                signal.signal(signal.SIGINT, self._interrupt)
        try:
            with super().watching():
                yield
        finally:
            if self._signals:
                signal.signal(_END, signal.SIG_IGN)  # one may be pending
                signal.signal(signal.SIGINT, before)

    def _interrupt(self, number: int, frame: FrameType | None) -> None:
        self._stopping = True
        assert self._interrupted_before is not None
        self._interrupted_before(number, frame)
        self._end(number, frame)

    def _end(self, _number: int, frame: FrameType | None) -> None:
        """End the call on the stack of the main thread if its time is up. Raises inside of the reward."""
        found, held = _call_on(frame), self._held
        if found is None or frame is None:
            return
        if self._stopping:
            raise CallEnded("was interrupted")
        seconds = 0.0 if held is None or held.key != found[0] else time.monotonic() - held.since
        if held is not None and seconds >= held.calls.deadline:
            raise CallEnded(f"held the event loop for {seconds:.0f} s, at {_place(frame)}")

    @override
    def _lasts(self, call: RunningCall, frame: FrameType, seconds: float) -> None:
        hint = "; await what takes long, or make it a sync reward, which runs in a thread"
        self._name(call, frame, seconds, "holds the event loop", hint)
        if self._signals and (seconds >= call.calls.deadline or self._stopping):
            signal.pthread_kill(threading.main_thread().ident or 0, _END)

    @override
    def _check_threads(self, frames: Mapping[int, FrameType], now: float) -> None:
        running: dict[int, float] = {}
        for frame in frames.values():
            if (found := _call_in_thread(frame, self._calls)) is not None:
                running[found[0]] = since = self._since.get(found[0], now)
                self._name(RunningCall(*found, since=since), frame, now - since, "has been running")
        self._since = running

    def _name(self, call: RunningCall, frame: FrameType, seconds: float, what: str, hint: str = "") -> None:
        if seconds < self._seconds:
            return
        name, sample, place = call.calls.reward.name, call.sample, _place(frame)
        if (name, place) not in self._named:
            self._named.add((name, place))
            who = f"{name}, sample {sample.index} of group {sample.group_id}"
            self._tell(f"{who}: {what} for {seconds:.0f} s at {place} (deadline {call.calls.deadline:g} s){hint}")


def _call_on(frame: FrameType | None) -> tuple[int, RewardCalls, Any] | None:
    while frame is not None and frame.f_code is not _CALL:
        frame = frame.f_back
    return None if frame is None else (id(frame), frame.f_locals["self"], frame.f_locals["subject"])


def _call_in_thread(frame: FrameType | None, known: Sequence[RewardCalls]) -> tuple[int, RewardCalls, Any] | None:
    while frame is not None and frame.f_code is not _WORK:
        frame = frame.f_back
    job = frame.f_locals if frame is not None else {}
    calls = next((calls for calls in known if calls.reward.call == job.get("call")), None)
    return None if calls is None else (id(job["future"]), calls, job["argument"])


def _place(frame: FrameType) -> str:
    """File, line and source of the innermost frame outside of libraries; a reward in a library: where it is entered."""
    entered, shown = frame, frame
    while shown.f_code.co_filename.startswith(_LIBRARIES):
        if not shown.f_code.co_filename.startswith(_OURS):
            entered = shown
        if shown.f_code in (_CALL, _WORK) or shown.f_back is None:
            shown = entered
            break
        shown = shown.f_back
    code, line = shown.f_code, shown.f_lineno
    return f"{code.co_filename}:{line} in {code.co_name}: {linecache.getline(code.co_filename, line).strip()}"


# --- memory -----------------------------------------------------------------------------------------------------------


class MemoryWatch:
    """Names the rewards that were called while the process kept growing, in the log and in their figures.

    Only the smallest size of each window counts, so memory that is freed again does not. It warns after `windows`
    windows of `window` seconds, each above the one before, with `least` bytes of growth in all; then again at twice the
    size.
    With several rewards it cannot tell which one keeps the memory; `streamrl reward test` runs one alone.
    """

    def __init__(
        self, calls: Sequence[RewardCalls], window: float = 10.0, windows: int = 6, least: int = 64 << 20
    ) -> None:
        self._calls = [one for one in calls if not one.reward.instant]  # rules keep nothing
        self._window, self._least = window, least
        self._windows: deque[tuple[int, set[str]]] = deque(maxlen=windows)
        self._ended = dict.fromkeys((one.reward.name for one in self._calls), 0)
        self._called: set[str] = set()
        self._smallest = self._next_warning = 0
        self._ends: float | None = None

    async def run(self) -> None:
        while (size := resident_bytes()) is not None:
            self.look(time.monotonic(), size)
            await asyncio.sleep(_MEMORY_SECONDS)

    def look(self, now: float, size: int) -> None:
        for calls in self._calls:
            name, ended = calls.reward.name, calls.figures.ok + calls.figures.failures.total()
            if calls.in_flight or ended != self._ended[name]:
                self._called.add(name)
            self._ended[name] = ended
        if self._ends is not None and now < self._ends:
            self._smallest = min(self._smallest, size)
            return
        if self._ends is not None:
            self._windows.append((self._smallest, self._called))
            self._judge()
        self._ends, self._smallest, self._called = now + self._window, size, set()

    def _judge(self) -> None:
        sizes = [size for size, _ in self._windows]
        grew, rises = sizes[-1] - sizes[0], all(after > before for before, after in itertools.pairwise(sizes))
        if len(sizes) == self._windows.maxlen and rises and grew >= self._least and sizes[-1] >= self._next_warning:
            self._name(set().union(*(called for _, called in self._windows)), sizes[-1], grew)
            self._next_warning = 2 * sizes[-1]
            self._windows.clear()

    def _name(self, called: set[str], size: int, grew: int) -> None:
        rate = grew / (self._window * (len(self._windows) - 1))
        shown = {"resident_mib": size >> 20, "mib_per_second": round(rate / (1 << 20), 3)}
        if not called:
            logger.warning("memory of this worker grows, and not while rewards are called", extra=shown)
        for calls in self._calls:
            if (name := calls.reward.name) in called:
                others = ", ".join(sorted(called - {name}))
                calls.figures.leaks = f"the worker grows by {rate / 1e6:.3g} MB/s while it is called"
                calls.figures.leaks += f", with {others}" if others else ""
                extra = {"reward": name, "together_with": others, **shown}
                logger.warning("the worker grows while a reward is called", extra=extra)


def resident_bytes() -> int | None:
    try:
        pages = int(Path("/proc/self/statm").read_text().split()[1])
    except (OSError, IndexError, ValueError):
        return None
    return pages * os.sysconf("SC_PAGE_SIZE")
