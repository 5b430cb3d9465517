"""Requests and tokens per minute of a reward model: token buckets of one worker, which has its part of the quota.

A request asks for its turn, is sent, and settles: it gives back the tokens that it did not use. Each of the two
buckets (requests, tokens) holds a twentieth of a minute's quota (`AT_ONCE`) and is filled with the rest evenly over a
minute, so no interval of a minute sees more than the quota. They are empty at first, so a worker that is started again
exceeds nothing. A request larger than a bucket waits for a full bucket; later ones wait until the excess is made up
for.

Requests wait in one line, and only its head looks at the buckets: once for its time, and again when tokens come back.
"""

from __future__ import annotations

import asyncio
import contextlib
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
    settled: bool = False


class RateLimit:
    """The limit of one of `workers` that share the quota evenly; for one event loop."""

    def __init__(self, model: str, quota: Quota, workers: int = 1, clock: Callable[[], float] = time.monotonic) -> None:
        self._workers = self._least = workers
        self._model, self._quota, self._clock = model, quota, clock
        full = 1000 * clock() + CAPACITY_MS
        self._gone: _Full = (full, full)  # after the requests that went out
        self._ahead = (0.0, 0.0)  # costs of those in the line
        self._line = asyncio.Lock()  # its holder is the head
        self._returned = asyncio.Event()

    def share(self, workers: int) -> None:
        """Divide the quota of later requests among so many workers, if they are more than at first."""
        self._workers = max(self._least, workers)

    async def take(self, tokens: int, deadline: float) -> RateTurn:
        """Wait for the turn of a request of `tokens` tokens, for at most `deadline` seconds.

        The caller calls `settle` at the end of the request. A cancelled wait costs nothing. `RewardUnavailable`: no
        turn within that time, and nothing was taken; raised at once if the estimates of those in line say so.
        """
        turn = RateTurn(tokens, self._quota.cost(tokens, self._workers))
        wait = self._wait(turn, self._ahead)
        self._ahead = _plus(self._ahead, turn.costs)
        try:
            if wait > 1000 * deadline:
                raise TimeoutError
            async with asyncio.timeout(deadline), self._line:
                while (wait := self._wait(turn)) > 0:
                    self._returned.clear()
                    with contextlib.suppress(TimeoutError):
                        async with asyncio.timeout(wait / 1000):
                            await self._returned.wait()
                now = 1000 * self._clock()
                self._gone = _plus((max(self._gone[0], now), max(self._gone[1], now)), turn.costs)
        except TimeoutError as error:
            raise RewardUnavailable(
                f"the rate limit of reward model {self._model} is used up: the next request may go out in"
                f" {wait / 1000:.1f} s",
                f"reward_models.{self._model}.requests_per_minute and tokens_per_minute bound all workers together;"
                " a longer deadline of the reward, or a lower concurrency, lets samples wait",
            ) from error
        finally:
            self._ahead = _plus(self._ahead, turn.costs, -1)
        return turn

    def _wait(self, turn: RateTurn, ahead: _Full = (0.0, 0.0)) -> float:
        """Milliseconds until a request may go out, after others that cost `ahead`."""
        now = 1000 * self._clock()
        buckets = zip(self._gone, ahead, turn.costs, strict=True)
        filled = (max(full - now, 0) + more + min(cost, CAPACITY_MS) for full, more, cost in buckets)
        return max(0.0, max(filled) - CAPACITY_MS)

    def settle(self, turn: RateTurn, tokens: int) -> None:
        """Give back the tokens that a request did not use. A repeat does nothing."""
        back = turn.costs[1] * (1 - tokens / max(1, turn.tokens))
        if back and not turn.settled:
            self._gone = _plus(self._gone, (0.0, back), -1)
            self._returned.set()
        turn.settled = True


def _plus(pair: _Full, other: _Full, times: int = 1) -> _Full:
    return pair[0] + times * other[0], pair[1] + times * other[1]


def limit_of(name: str, model: RewardModelConfig, workers: int) -> RateLimit | None:
    """The limit of one of so many workers for the entry `name` of `reward_models`."""
    quota = Quota.of(model)
    return None if quota == Quota(None, None) else RateLimit(name, quota, workers)
