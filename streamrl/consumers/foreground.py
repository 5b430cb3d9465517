"""Rewards in a command that a person waits for: what blocks is named, ends at its deadline, and ends at Ctrl-C.

A reward that computes or sleeps where it should await holds the event loop, and with it every deadline and the end that
asyncio makes of Ctrl-C. A thread looks where it is; a signal that this process sends to itself ends the call.
"""

from __future__ import annotations

import contextlib
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from types import FrameType
from typing import Any, Final

from streamrl.consumers.calls import CallEnded, RewardCalls
from streamrl.consumers.memory import source_of
from streamrl.consumers.reward import RewardSample
from streamrl.consumers.steps import Timed
from streamrl.consumers.threads import CallThreads
from streamrl.consumers.watch import CALL, SECONDS, place_of

_END: Final = signal.SIGVTALRM
"""Sent to the main thread to end a call: rewards use SIGALRM themselves, and nobody uses this one."""
_LOOK_SECONDS: Final = 0.25
_STEP: Final = Timed.__await__.__code__
_WORK: Final = CallThreads._work.__code__  # noqa: SLF001 (its frame says what runs in a thread)


@dataclass(frozen=True, slots=True)
class _Running:
    """A call that is on the stack of a thread; `began` is when it, or its step in the event loop, did."""

    key: int
    calls: RewardCalls
    subject: Any
    began: float
    holds_loop: bool


class Foreground:
    """Watches the rewards of a command.

    Args:
        calls: the rewards.
        say: is told what has been running for `seconds`, from a thread, once for each line.
        seconds: after which a call is named.
    """

    def __init__(self, calls: Sequence[RewardCalls], say: Callable[[str], None], seconds: float = SECONDS) -> None:
        self._calls = calls
        self._say = say
        self._seconds = seconds
        self._stopping = False
        self._loop_thread = 0
        self._interrupted_before: Callable[[int, FrameType | None], Any] | None = None
        self._since: dict[int, float] = {}
        self._named: set[tuple[str, str]] = set()

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        """Watch the event loop of this thread; calls are ended only where it is the main thread."""
        ended = threading.Event()
        self._loop_thread = threading.get_ident()
        threading.Thread(target=self._look, args=(ended,), name="foreground", daemon=True).start()
        in_main = threading.current_thread() is threading.main_thread()
        before = signal.getsignal(signal.SIGINT)
        if in_main:
            signal.signal(_END, self._end)
            if callable(before):
                self._interrupted_before = before
                signal.signal(signal.SIGINT, self._interrupt)
        try:
            yield
        finally:
            ended.set()
            if in_main:
                signal.signal(_END, signal.SIG_IGN)  # one may be under way
                signal.signal(signal.SIGINT, before)

    def _interrupt(self, number: int, frame: FrameType | None) -> None:
        """Ctrl-C: let asyncio cancel the command, and end the call that keeps it from doing so."""
        self._stopping = True
        assert self._interrupted_before is not None
        self._interrupted_before(number, frame)
        self._end(number, frame)

    def _end(self, _number: int, frame: FrameType | None) -> None:
        """End the call that is on the stack of the main thread, when it is time; raises inside of the reward."""
        running = self._on_loop(frame)
        if running is None or frame is None:
            return
        if self._stopping:
            raise CallEnded("was interrupted")
        seconds = time.perf_counter() - running.began
        if seconds >= running.calls.deadline:
            raise CallEnded(f"held the event loop for {seconds:.0f} s, at {place_of(frame, source_of(running.calls))}")

    def _look(self, ended: threading.Event) -> None:
        while not ended.wait(_LOOK_SECONDS):
            frames = sys._current_frames()  # noqa: SLF001 (the documented way to see other threads)
            found = [(frame, self._on_loop(frame) or self._in_thread(frame)) for frame in frames.values()]
            running = [(frame, call) for frame, call in found if call is not None]
            keys = {call.key for _, call in running}
            self._since = {key: since for key, since in self._since.items() if key in keys}
            for frame, call in running:
                seconds = time.perf_counter() - call.began
                if seconds >= self._seconds:
                    self._name(frame, call, seconds)
                late = seconds >= call.calls.deadline or self._stopping
                if call.holds_loop and late and self._loop_thread == threading.main_thread().ident:
                    signal.pthread_kill(self._loop_thread, _END)

    def _on_loop(self, frame: FrameType | None) -> _Running | None:
        """The call that holds the event loop, from the stack of its thread."""
        began: float | None = None
        while frame is not None and frame.f_code is not CALL:
            if frame.f_code is _STEP:
                began = frame.f_locals.get("began")
            frame = frame.f_back
        if frame is None:
            return None
        found, key = frame.f_locals, id(frame)
        began = self._since.setdefault(key, time.perf_counter()) if began is None else began
        return _Running(key, found["self"], found["subject"], began, holds_loop=True)

    def _in_thread(self, frame: FrameType | None) -> _Running | None:
        """The call of a sync reward that runs in a thread."""
        while frame is not None and frame.f_code is not _WORK:
            frame = frame.f_back
        job = frame.f_locals if frame is not None else {}
        calls = next((calls for calls in self._calls if calls.reward.call == job.get("call")), None)
        if calls is None:
            return None
        key = id(job["future"])
        return _Running(key, calls, job["argument"], self._since.setdefault(key, time.perf_counter()), holds_loop=False)

    def _name(self, frame: FrameType, call: _Running, seconds: float) -> None:
        place = place_of(frame, source_of(call.calls))
        if (call.calls.reward.name, place) in self._named:
            return
        self._named.add((call.calls.reward.name, place))
        sample = call.subject if isinstance(call.subject, RewardSample) else call.subject[0]
        who = f"{call.calls.reward.name}, sample {sample.index} of group {sample.gid}"
        what = "holds the event loop" if call.holds_loop else "has been running"
        hint = "; await what takes long, or make it a sync reward, which runs in a thread" if call.holds_loop else ""
        self._say(f"{who}: {what} for {seconds:.0f} s at {place} (deadline {call.calls.deadline:g} s){hint}")
