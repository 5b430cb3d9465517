"""Requests and tokens per minute of a reward model: token buckets of one worker, which has its part of the quota.

A request asks for its turn, is sent, and settles: it gives back the tokens that it did not use. Each of the two
buckets (requests, tokens) holds a twentieth of a minute's quota (`AT_ONCE`) and is filled with the rest evenly over a
minute, so no interval of a minute sees more than the quota. They are empty at first, so a worker that is started again
exceeds nothing. A request larger than a bucket waits for a full bucket; later ones wait until the excess is made up
for.

The time of a turn is fixed when a request asks: it sleeps once, in order, and looks at nothing meanwhile.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from streamrl.config import RewardModelConfig
from streamrl.errors import RewardUnavailable

AT_ONCE: Final = 0.05
"""Part of a minute's quota that a bucket holds and that goes out at once after a pause."""
_MINUTE_MS: Final = 60_000
_REFILLED: Final = 1 - AT_ONCE
CAPACITY_MS: Final = int(_MINUTE_MS * AT_ONCE / _REFILLED)
"""Milliseconds that fill an empty bucket. Sizes of requests are in milliseconds, too: the time to refill them."""
_FRACTION: Final = 1000


def _refill(size: int, quota: float) -> float:
    """Milliseconds for `size` of a quota for a minute, so that whole requests of this size never exceed it."""
    whole = size * (quota // size) or quota
    return size * _MINUTE_MS / (_REFILLED * whole)


@dataclass(frozen=True, slots=True)
class Quota:
    requests: int | None
    tokens: int | None

    @classmethod
    def of(cls, model: RewardModelConfig) -> Quota:
        return cls(model.requests_per_minute, model.tokens_per_minute)

    def cost(self, tokens: int, workers: int = 1) -> tuple[float, float]:
        """Milliseconds that refill one request, and `tokens` tokens, in the part of one of so many workers."""
        request = _refill(1, self.requests / workers) if self.requests else 0.0
        return request, _refill(tokens, self.tokens / workers) if self.tokens and tokens else 0.0

    def within(self, seconds: float, tokens: int) -> int | None:
        """Requests of `tokens` tokens that can be sent within `seconds`, at least 1; None: any number."""
        cost = max(self.cost(tokens))
        return max(1, math.floor(_FRACTION * seconds / cost)) if cost else None


_Full = tuple[float, float]
"""When each bucket will be full if nothing more is taken. One that is full at F holds CAPACITY_MS - (F - t) at t."""


@dataclass(eq=False, slots=True)
class RateTurn:
    tokens: int
    costs: tuple[float, float]
    begin: float
    settled: bool = False

    def after(self, full: _Full) -> _Full:
        return max(full[0], self.begin) + self.costs[0], max(full[1], self.begin) + self.costs[1]


class RateLimit:
    """The limit of one of `workers` that share the quota evenly; for one event loop."""

    def __init__(self, model: str, quota: Quota, workers: int = 1, clock: Callable[[], float] = time.monotonic) -> None:
        self._workers = self._least = workers
        self._model, self._quota, self._clock = model, quota, clock
        full = 1000 * clock() + CAPACITY_MS
        self._gone: _Full = (full, full)  # after the requests that went out
        self._all: _Full | None = self._gone  # after those in the line as well; None: one has left it
        self._line: dict[RateTurn, None] = {}

    def share(self, workers: int) -> None:
        """Divide the quota of later requests among so many workers, if they are more than at first."""
        self._workers = max(self._least, workers)

    async def take(self, tokens: int, deadline: float) -> RateTurn:
        """Wait for the turn of a request of `tokens` tokens, for at most `deadline` seconds.

        The caller calls `settle` at the end of the request. A cancelled wait costs nothing. `RewardUnavailable`: no
        turn within that time, and nothing was taken.
        """
        now = 1000 * self._clock()
        turn = self._place(tokens, now, deadline)
        try:
            await asyncio.sleep((turn.begin - now) / 1000)
        except BaseException:
            del self._line[turn]
            self._all = None
            raise
        del self._line[turn]
        self._gone = turn.after(self._gone)
        return turn

    def _place(self, tokens: int, now: float, deadline: float) -> RateTurn:
        costs = self._quota.cost(tokens, self._workers)
        if self._all is None:
            self._all = self._gone
            for turn in self._line:
                self._all = turn.after(self._all)
        last = next(reversed(self._line)).begin if self._line else 0.0
        pairs = zip(self._all, costs, strict=True)
        begin = max(now, last, *(full + min(cost, CAPACITY_MS) - CAPACITY_MS for full, cost in pairs))
        if begin - now > 1000 * deadline:
            raise RewardUnavailable(
                f"the rate limit of reward model {self._model} is used up: the next request may go out in"
                f" {(begin - now) / 1000:.1f} s",
                f"reward_models.{self._model}.requests_per_minute and tokens_per_minute bound all workers together;"
                " a longer deadline of the reward, or a lower concurrency, lets samples wait",
            )
        turn = RateTurn(tokens, costs, begin)
        self._all = turn.after(self._all)
        self._line[turn] = None
        return turn

    def settle(self, turn: RateTurn, tokens: int) -> None:
        """Give back the tokens that a request did not use. A repeat does nothing."""
        back = turn.costs[1] * (1 - tokens / max(1, turn.tokens))
        if back and not turn.settled:
            self._gone = (self._gone[0], self._gone[1] - back)
            self._all = None
        turn.settled = True


def limit_of(name: str, model: RewardModelConfig, workers: int) -> RateLimit | None:
    """The limit of one of so many workers for the entry `name` of `reward_models`."""
    quota = Quota.of(model)
    return None if quota == Quota(None, None) else RateLimit(name, quota, workers)
