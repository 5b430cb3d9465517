"""Who holds the event loop: a reward that computes, or sleeps, where it should await.

A step that took long and ended is counted by the calls themselves (`steps.py`). This watch names what has not ended,
while it lasts, from a thread; what keeps even threads from running (a C function that never lets go of the interpreter)
is in the stacks that the supervisor asks for before it kills the worker (`supervisor.liveness_deadline`).
"""

from __future__ import annotations

import asyncio
import linecache
import logging
import sys
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from types import FrameType
from typing import Final

from streamrl.consumers.calls import HELD_SECONDS, RewardCalls
from streamrl.consumers.memory import source_of
from streamrl.consumers.reward import RewardSample

logger = logging.getLogger(__name__)

SECONDS: Final = 5.0
"""How long the event loop stands still before whoever holds it is named."""
_TICK: Final = 0.5
_LINES: Final = 8
CALL: Final = RewardCalls._call.__code__  # noqa: SLF001 (its frame says who is called, and for what)


class LoopWatch:
    """Names the reward that holds the event loop for longer than `seconds`, once each time, in the log.

    Args:
        calls: the rewards of this process.
        seconds: that the loop may stand still.
        tell: is told who holds it, and where, again and again while it lasts, from a thread.
    """

    def __init__(
        self, calls: Sequence[RewardCalls], seconds: float = SECONDS, tell: Callable[[str], None] | None = None
    ) -> None:
        self._calls = calls
        self._tell = tell
        self._threads = any(call.reward.blocking and not call.reward.instant for call in calls)
        self._seconds = seconds
        self._ticked = time.monotonic()

    async def run(self) -> None:
        """Watch the running event loop until cancelled."""
        ended = threading.Event()
        arguments = (ended, threading.get_ident())
        threading.Thread(target=self._look, args=arguments, name="loop-watch", daemon=True).start()
        try:
            while True:
                self._ticked = time.monotonic()
                computed, counted = self._computed(), self._counted()
                await asyncio.sleep(_TICK)
                late = time.monotonic() - self._ticked - _TICK
                # Without computing in other threads it is the machine that is busy, and no reward's fault.
                if late > HELD_SECONDS and self._computed() - computed > HELD_SECONDS:
                    self._suspect(late, counted)
        finally:
            ended.set()

    def _computed(self) -> float:
        """Seconds that the other threads of this process have computed; 0 where no reward runs in one."""
        return time.process_time() - time.thread_time() if self._threads else 0.0

    def _counted(self) -> int:
        return sum(calls.figures.blocked for calls in self._calls)

    def _suspect(self, late: float, counted: int) -> None:
        """The loop stood still; when no async reward was counted for it, a sync one keeps the interpreter to itself."""
        if self._counted() != counted:
            return
        running = [calls for calls in self._calls if calls.reward.blocking and calls.in_flight]
        if len(running) == 1:
            running[0].held_loop(late)
        elif running:
            names = ", ".join(calls.reward.name for calls in running)
            extra = {"seconds": round(late, 3), "rewards": names}
            logger.warning("the event loop stood still while sync rewards ran", extra=extra)

    def _look(self, ended: threading.Event, thread: int) -> None:
        named = 0.0
        while not ended.wait(self._seconds / 4):
            ticked = self._ticked
            stood = time.monotonic() - ticked
            if stood < self._seconds or (ticked == named and self._tell is None):
                continue
            frame = sys._current_frames().get(thread)  # noqa: SLF001 (the documented way to see another thread)
            found = held_by(frame)
            if frame is None or found is None:
                continue
            if self._tell is not None:
                calls = next((one for one in self._calls if one.reward.name == found["reward"]), None)
                place = place_of(frame, source_of(calls) if calls is not None else None)
                self._tell(f"{found['reward']} holds the event loop for {stood:.0f} s at {place}")
            if ticked == named:
                continue
            named = ticked
            extra = {**found, "seconds": round(stood, 1), "stack": _stack(frame)}
            logger.error("a reward holds the event loop", extra=extra)


def held_by(frame: FrameType | None) -> dict[str, str | int] | None:
    """The reward, group and sample for which a stack is running; None when it is none's."""
    while frame is not None and frame.f_code is not CALL:
        frame = frame.f_back
    if frame is None:
        return None
    found = frame.f_locals
    subject = found["subject"]
    sample = subject if isinstance(subject, RewardSample) else subject[0]
    return {"reward": found["self"].reward.name, "group": sample.gid, "sample": sample.index}


def place_of(frame: FrameType, file: str | None) -> str:
    """File, line and source of the innermost frame of a call that is in `file`, else of the innermost frame."""
    found: FrameType | None = frame
    while found is not None and found.f_code.co_filename != file and found.f_code is not CALL:
        found = found.f_back
    shown = frame if found is None or found.f_code is CALL else found
    name, line = shown.f_code.co_filename, shown.f_lineno
    return f"{name}:{line} in {shown.f_code.co_name}: {linecache.getline(name, line).strip()}"


def _stack(frame: FrameType) -> str:
    lines = traceback.extract_stack(frame)[-_LINES:]
    return " > ".join(f"{line.filename}:{line.lineno} {line.name}" for line in lines)
