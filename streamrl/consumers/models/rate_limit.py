"""Requests and tokens per minute of a reward model, shared by all workers: token buckets in Redis.

A request waits in one line for its turn, is sent, and settles: it gives back the tokens that it did not use. Each of
the two buckets (requests, tokens) holds a twentieth of a minute's quota (`AT_ONCE`) and is filled with the rest evenly
over a minute, so no interval of a minute sees more than the quota. A request larger than a bucket waits for a full
bucket; later ones wait until the excess is made up for. Turns are given in order, so no request waits forever.

Time is that of the Redis server (`limit_take.lua`). If its clock goes back, what was filled since the last look is
lost, at most a second's worth while a request waits. If it jumps ahead, the buckets are just full.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import math
import secrets
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from streamrl.config import RewardModelConfig
from streamrl.errors import RewardUnavailable, Unreachable
from streamrl.queues.connection import Connection
from streamrl.queues.keys import Keys
from streamrl.queues.ledgers import Ledgers

logger = logging.getLogger(__name__)

AT_ONCE: Final = 0.05
"""Part of a minute's quota that a bucket holds and that goes out at once after a pause."""
_MINUTE_MS: Final = 60_000
_REFILLED: Final = 1 - AT_ONCE
CAPACITY_MS: Final = int(_MINUTE_MS * AT_ONCE / _REFILLED)
"""Milliseconds that fill an empty bucket. Sizes of requests are in milliseconds, too: the time to refill them."""
LOOK_SECONDS: Final = 1.0
"""Longest pause between two looks of a waiting request, since returned tokens may bring its turn forward."""
_SETTLE_SECONDS: Final = 2.0
_FRACTION: Final = 1000


@dataclass(frozen=True, slots=True)
class Quota:
    requests: int | None
    tokens: int | None

    @classmethod
    def of(cls, model: RewardModelConfig) -> Quota:
        return cls(model.requests_per_minute, model.tokens_per_minute)

    def cost(self, tokens: int) -> tuple[float, float]:
        """Milliseconds that refill one request, and `tokens` tokens."""
        request = _MINUTE_MS / (_REFILLED * self.requests) if self.requests else 0.0
        return request, tokens * _MINUTE_MS / (_REFILLED * self.tokens) if self.tokens else 0.0

    def within(self, seconds: float, tokens: int) -> int | None:
        """Requests of `tokens` tokens that can be sent within `seconds`, at least 1; None: any number."""
        cost = max(self.cost(tokens))
        return max(1, math.floor(_FRACTION * seconds / cost)) if cost else None


@dataclass(slots=True)
class RateTurn:
    id: str
    tokens: int
    settled: bool = False


class RedisStore:
    def __init__(self, connection: Connection, keys: Keys, model: str) -> None:
        self._connection = connection
        self._keys = keys.rate_limit(model)

    async def take(self, turn: str, costs: tuple[float, float], patience_ms: int) -> int:
        """Ask for a turn, or look again. Safe to repeat.

        0: the turn has come, and the costs are taken; positive: milliseconds to wait; negative: -1 - milliseconds, more
        than `patience_ms`, so the request is not in the line.
        """
        del costs  # the script reads them from the name of the turn
        return int(await self._connection.call("limit_take", self._keys, [turn, CAPACITY_MS, patience_ms]))

    async def settle(self, turn: str, back: tuple[float, float]) -> None:
        """Leave the line, or give back a part of both costs (negative: take more). A repeat does nothing."""
        await self._connection.call("limit_settle", self._keys, [turn, *back])


class LocalStore:
    """As `RedisStore`, outside of a run. A request's time is fixed when it asks; returned tokens help later ones."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._last = 0.0
        self._full_at: tuple[float, ...] = (0.0, 0.0)
        self._begins: dict[str, float] = {}

    async def take(self, turn: str, costs: tuple[float, float], patience_ms: int) -> int:
        now = self._clock() * 1000
        begin = self._begins.get(turn)
        if begin is None:
            # A bucket that will be full at F holds CAPACITY_MS - (F - t) at time t.
            pairs = zip(self._full_at, costs, strict=True)
            begin = max(now, self._last, *(full + min(cost, CAPACITY_MS) - CAPACITY_MS for full, cost in pairs))
            if begin - now > patience_ms:
                return -1 - math.ceil(begin - now)
            self._last = self._begins[turn] = begin
            self._full_at = tuple(max(full, begin) + cost for full, cost in zip(self._full_at, costs, strict=True))
        return max(0, math.ceil(begin - now))

    async def settle(self, turn: str, back: tuple[float, float]) -> None:
        if self._begins.pop(turn, None) is not None:
            self._full_at = tuple(full - part for full, part in zip(self._full_at, back, strict=True))


class RateLimit:
    def __init__(self, model: str, quota: Quota, store: RedisStore | LocalStore) -> None:
        self._model, self._quota, self._store = model, quota, store
        self._nonce = secrets.token_hex(8)
        self._numbers = itertools.count()

    async def take(self, tokens: int, deadline: float) -> RateTurn:
        """Wait for the turn of a request of `tokens` tokens, for at most `deadline` seconds.

        The caller calls `settle` at the end of the request. A cancelled wait leaves the line. `RewardUnavailable`: no
        turn within that time, and nothing was taken. `Unreachable`: Redis is away.
        """
        loop = asyncio.get_running_loop()
        end = loop.time() + deadline
        costs = self._quota.cost(tokens)
        turn = RateTurn(f"{self._nonce}:{next(self._numbers)} {costs[0]!r} {costs[1]!r}", tokens)
        try:
            async with asyncio.timeout(deadline):
                while wait := await self._store.take(turn.id, costs, int(1000 * (end - loop.time()))):
                    if wait < 0:
                        turn.settled = True
                        raise self._used_up(f"the next request may go out in {(-1 - wait) / 1000:.1f} s")
                    await asyncio.sleep(min(wait / 1000, LOOK_SECONDS))
        except TimeoutError as error:
            await self._settle(turn, costs)
            raise self._used_up(f"this request could not go out within {deadline:.1f} s") from error
        except BaseException:
            await self._settle(turn, costs)
            raise
        return turn

    async def settle(self, turn: RateTurn, tokens: int) -> None:
        """Give back the tokens that a request did not use. A repeat does nothing."""
        await self._settle(turn, (0.0, self._quota.cost(turn.tokens - tokens)[1]))

    async def _settle(self, turn: RateTurn, back: tuple[float, float]) -> None:
        """Settle once. If Redis is away, the costs stay taken, as for a process that died."""
        if turn.settled:
            return
        turn.settled = True
        try:
            async with asyncio.timeout(_SETTLE_SECONDS):
                await self._store.settle(turn.id, back)
        except (TimeoutError, Unreachable) as error:
            logger.info("rate limit not settled", extra={"model": self._model, "why": str(error) or "no answer"})

    def _used_up(self, why: str) -> RewardUnavailable:
        return RewardUnavailable(
            f"the rate limit of reward model {self._model} is used up: {why}",
            f"reward_models.{self._model}.requests_per_minute and tokens_per_minute bound all workers together;"
            " a longer deadline of the reward, or a lower concurrency, lets samples wait",
        )


def limit_of(name: str, model: RewardModelConfig, ledgers: Ledgers | None) -> RateLimit | None:
    """The limit of the entry `name` of `reward_models`; without `ledgers` it holds for this process alone."""
    quota = Quota.of(model)
    if quota == Quota(None, None):
        return None
    store = LocalStore() if ledgers is None else RedisStore(ledgers.connection, ledgers.train.keys, name)
    return RateLimit(name, quota, store)
