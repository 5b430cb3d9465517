"""How long the steps of a coroutine hold the event loop: from one wait to the next."""

from __future__ import annotations

import time
from collections.abc import Callable, Coroutine, Generator
from typing import Any, Generic, TypeVar

_R = TypeVar("_R")


class Timed(Generic[_R]):
    """`await Timed(coroutine, limit, held)` is `await coroutine`, and calls `held(seconds)` for a step over `limit`.

    Args:
        coroutine: awaited once. Cancellation and exceptions pass as they are.
        limit: seconds that one step may take.
        held: told of each step that took longer, in the event loop.
    """

    __slots__ = ("_coroutine", "_held", "_limit")

    def __init__(self, coroutine: Coroutine[Any, Any, _R], limit: float, held: Callable[[float], None]) -> None:
        self._coroutine = coroutine
        self._limit = limit
        self._held = held

    def __await__(self) -> Generator[Any, Any, _R]:
        value: Any = None
        error: BaseException | None = None
        while True:
            began = time.perf_counter()
            try:
                waits_for = self._coroutine.send(value) if error is None else self._coroutine.throw(error)
            except StopIteration as end:
                result: _R = end.value
                return result
            finally:
                if (spent := time.perf_counter() - began) > self._limit:
                    self._held(spent)
            value, error = None, None
            try:
                value = yield waits_for
            except GeneratorExit:
                self._coroutine.close()
                raise
            except BaseException as thrown:  # noqa: BLE001 (handed on to what is awaited)
                error = thrown
