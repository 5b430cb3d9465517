"""What the attempts for one sample know of each other, however deep in a reward they ask: who has failed it."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from contextvars import ContextVar
from typing import Final

_failed: Final[ContextVar[dict[str, None] | None]] = ContextVar("failed", default=None)


@contextlib.contextmanager
def attempts() -> Iterator[None]:
    """What is asked in this block, by this task and by those it starts, is asked for one sample (or one group)."""
    token = _failed.set({})
    try:
        yield
    finally:
        _failed.reset(token)


def failed_servers() -> dict[str, None]:
    """URLs of servers that have failed the sample, to be changed: the last failure is the last one.

    Outside of `attempts` nobody remembers: a new dict each time.
    """
    failed = _failed.get()
    return {} if failed is None else failed
