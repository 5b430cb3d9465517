"""Names code of users that holds the event loop of a replica, where all episodes stand still meanwhile."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import sys
import sysconfig
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Final, TypeAlias

logger = logging.getLogger(__name__)

NAMED_SECONDS: Final = 5.0
Tell: TypeAlias = Callable[[str, float], None]
_LIBRARIES: Final = (
    str(Path(__file__).parents[2]) + os.sep,
    "<frozen ",
    *(sysconfig.get_path(name) + os.sep for name in ("stdlib", "purelib", "platlib")),
)


@contextlib.contextmanager
def naming_what_blocks(tell: Tell | None = None, seconds: float = NAMED_SECONDS) -> Iterator[None]:
    """Log each line of a user's code that holds this event loop for `seconds`; `tell` hears of it in another thread."""
    ended = threading.Event()
    arguments = (ended, threading.get_ident(), asyncio.get_running_loop(), seconds, tell)
    threading.Thread(target=_watch, args=arguments, name="episode-watch", daemon=True).start()
    try:
        yield
    finally:
        ended.set()


def _watch(
    ended: threading.Event, thread: int, loop: asyncio.AbstractEventLoop, seconds: float, tell: Tell | None
) -> None:
    named: set[str] = set()
    turned, asked, told = threading.Event(), 0.0, 0.0
    turned.set()
    while not ended.wait(seconds / 10):
        now = time.monotonic()
        if turned.is_set():
            turned.clear()
            asked = now
            with contextlib.suppress(RuntimeError):  # the loop is closed: the process ends
                loop.call_soon_threadsafe(turned.set)
        elif now - asked >= seconds:
            place = _place(sys._current_frames().get(thread))  # noqa: SLF001 (the documented way to see other threads)
            if place and place not in named:
                named.add(place)
                extra = {"place": place, "seconds": round(now - asked, 1)}
                logger.error("an episode holds the event loop; sync tools run in threads", extra=extra)
            if place and tell is not None and now - told >= seconds / 2:
                told = now
                tell(f"an episode holds the event loop for {now - asked:.0f} s at {place}", now - asked)


def _place(frame: FrameType | None) -> str:
    """The innermost line outside of libraries; empty: no code of a user holds the loop."""
    while frame is not None and frame.f_code.co_filename.startswith(_LIBRARIES):
        frame = frame.f_back
    return "" if frame is None else f"{frame.f_code.co_filename}:{frame.f_lineno} in {frame.f_code.co_name}"
