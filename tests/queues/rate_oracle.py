"""The Lua scripts of the rate limit in Python, to compare them with on any order of calls."""

from __future__ import annotations

import math

from streamrl.consumers.models.rate_limit import CAPACITY_MS


class Buckets:
    """Both buckets and the line of one model, with the clock as an argument."""

    def __init__(self) -> None:
        self._seen = -math.inf
        self._levels: tuple[float, ...] = (CAPACITY_MS, CAPACITY_MS)
        self._waiting: dict[str, tuple[float, float]] = {}
        self._granted: dict[str, None] = {}

    def take(self, turn: str, costs: tuple[float, float], patience_ms: int, now: float) -> int:
        """See `RedisStore.take`; `now` is the clock in milliseconds."""
        levels = self._levels = _filled(self._levels, max(0.0, now - self._seen))
        self._seen = now
        if turn in self._granted:
            costs = (0.0, 0.0)
        wait = 0.0
        for one, cost in list({**self._waiting, turn: costs}.items()):
            more = max(0.0, *(min(part, CAPACITY_MS) - level for part, level in zip(cost, levels, strict=True)))
            wait += more
            levels = tuple(level - part for level, part in zip(_filled(levels, more), cost, strict=True))
            if wait == 0:
                self._waiting.pop(one, None)
                self._granted[one] = None
                self._levels = levels
            if one == turn:
                break
        if turn in self._granted:
            return 0
        if turn not in self._waiting and math.ceil(wait) > patience_ms:
            return -1 - math.ceil(wait)
        self._waiting.setdefault(turn, costs)
        return math.ceil(wait)

    def settle(self, turn: str, back: tuple[float, float]) -> None:
        """See `RedisStore.settle`."""
        if self._waiting.pop(turn, None) is None and turn in self._granted:
            del self._granted[turn]
            self._levels = tuple(level + part for level, part in zip(self._levels, back, strict=True))


def _filled(levels: tuple[float, ...], passed: float) -> tuple[float, ...]:
    return tuple(min(float(CAPACITY_MS), level + passed) for level in levels)
