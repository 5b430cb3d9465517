"""Waiting for what processes do, in tests without an event loop."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

_T = TypeVar("_T")


def until(condition: Callable[[], _T], what: str, seconds: float = 90, pause: float = 0.1) -> _T:
    """Ask until the answer is true, and return it; AssertionError with `what` after so many seconds."""
    deadline = time.monotonic() + seconds
    while not (found := condition()):
        assert time.monotonic() < deadline, f"waited {seconds:g} s for: {what}"
        time.sleep(pause)
    return found
