"""Requests that wait for a server, and which one each gets. `choose` is pure."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

from streamrl.config import RunConfig
from streamrl.producers.group.pool import Member, ServerPool
from streamrl.producers.group.request import RoutedRequest

_AFFINITIES: Final = 10_000
_MEMORY: Final = 0.05
"""Weight of the newest response in the expected length."""
FULL: Final = 0.9
"""Cache use from which a server gets nothing while others have room."""
_BLOCK: Final = 16
"""Tokens of one block of a prefix cache; a shorter prefix is not kept by it."""


@dataclass(frozen=True, slots=True)
class Place:
    """A server with room for one more request."""

    tokens: int  # in flight: prompts, and of each response the expected length, or the present one when longer
    limit: int  # requests at the same time; servers of unequal size get unequal shares
    cache_use: float = 0.0  # 0 to 1

    @property
    def burden(self) -> float:
        return self.tokens / self.limit


def choose(places: Sequence[Place], *, cost: int, shared: int, together: int, before: int | None = None) -> int:
    """Return the index of the place for a request.

    The least busy one, those with a full cache last. A request whose prefix is at `before` stays there while that costs
    less than what it waits for: the server may be busier than the least busy one by as much as a whole group.

    Args:
        places: at least one.
        cost: tokens of the request, prompt and expected response.
        shared: tokens that it has in common with the requests that went to `before`.
        together: requests that usually share a prefix.
        before: where requests with the same prefix went; None when that place has no room, or there was none.
    """
    best = min(range(len(places)), key=lambda at: (places[at].cache_use >= FULL, places[at].burden))
    if before is None or shared < _BLOCK:
        return best
    kept = places[before]
    if kept.cache_use >= FULL > places[best].cache_use:
        return best
    return before if kept.burden - places[best].burden <= together * cost / kept.limit else best


class Affinities:
    """Where requests went last, by affinity (empty: none); of very many, the oldest are forgotten.

    `GROUP/SAMPLE` is the affinity of a sample with several turns. It begins where its group is, and stays there.
    """

    def __init__(self) -> None:
        self._names: OrderedDict[str, str] = OrderedDict()

    def get(self, key: str) -> str | None:
        return self._names.get(key) or self._names.get(key.partition("/")[0])

    def set(self, key: str, name: str) -> None:
        for each in filter(None, {key, key.partition("/")[0]}):
            self._names[each] = name
            self._names.move_to_end(each)
            if len(self._names) > _AFFINITIES:
                self._names.popitem(last=False)


class LoadBalancer:
    """The queue of a group: in order of arrival, past requests that no server may take yet."""

    def __init__(self, config: RunConfig, pool: ServerPool) -> None:
        self._together = config.sampling.responses
        self._pool = pool
        pool.changed = self.place
        self._queue: dict[RoutedRequest, asyncio.Future[Member | None]] = {}
        self._placed: dict[RoutedRequest, Member] = {}
        self._affinities = Affinities()
        self._expected = float(config.sampling.max_new_tokens)
        self._failure: Exception | None = None
        self._busy = 0.0
        self._busy_since: float | None = None

    def __len__(self) -> int:
        return len(self._queue)

    @property
    def busy_seconds(self) -> float:
        since = self._busy_since
        return self._busy if since is None else self._busy + asyncio.get_running_loop().time() - since

    def server_of(self, request: RoutedRequest) -> Member | None:
        return self._placed.get(request)

    async def wait(self, request: RoutedRequest) -> Member | None:
        """Return the server given to a request; None when it was aborted before, `Unreachable` when the group died."""
        if self._failure is not None:
            raise self._failure
        place: asyncio.Future[Member | None] = asyncio.get_running_loop().create_future()
        self._queue[request] = place
        self.place()
        try:
            return await place
        except asyncio.CancelledError:
            self.release(request)
            raise
        finally:
            del self._queue[request]

    def release(self, request: RoutedRequest) -> None:
        if (server := self._placed.pop(request, None)) is not None:
            server.release(request)
        for member in self._pool.members:
            if member.reserved is request:
                member.reserved = None
        self._clock()
        self.place()

    def place(self) -> None:
        for request, place in self._queue.items():
            if not any(member.has_room or member.reserved is not None for member in self._pool.members):
                return
            if place.done():
                continue
            member = self._choose_alone(request) if request.alone else self._choose(request)
            if member is not None:
                member.take(request)
                self._placed[request] = member
                place.set_result(member)
                self._clock()

    def abort(self, which: Callable[[RoutedRequest], bool]) -> int:
        chosen = [place for request, place in self._queue.items() if not place.done() and which(request)]
        for place in chosen:
            place.set_result(None)
        return len(chosen)

    def fail(self, error: Exception) -> None:
        self._failure = error
        for place in self._queue.values():
            if not place.done():
                place.set_exception(error)

    def learn(self, length: int) -> None:
        self._expected += _MEMORY * (length - self._expected)

    def _choose(self, request: RoutedRequest) -> Member | None:
        free = [
            member
            for member in self._pool.members
            # the versions of one response never go back
            if member.has_room and self._pool.allows(member) and member.pair[1] >= request.partial.version
        ]
        if not free:
            return None
        key = request.request.affinity
        before = self._affinities.get(key)
        at = choose(
            [Place(self._tokens_on(member), member.limit, member.load.cache_use) for member in free],
            cost=request.tokens(self._expected),
            shared=len(request.request.tokens),
            together=self._together,
            before=next((at for at, member in enumerate(free) if member.name == before), None),
        )
        self._affinities.set(key, free[at].name)
        return free[at]

    def _choose_alone(self, request: RoutedRequest) -> Member | None:
        """Reserve the least busy server for a suspect request, and return that server once it is empty."""
        mine = next((member for member in self._pool.serving if member.reserved is request), None)
        if mine is None:
            free = [member for member in self._pool.members if member.has_room and self._pool.allows(member)]
            if not free:
                return None
            mine = min(free, key=lambda member: len(member.requests))
            mine.reserved = request
        return None if mine.requests else mine

    def _tokens_on(self, member: Member) -> int:
        return sum(request.tokens(self._expected) for request in member.requests)

    def _clock(self) -> None:
        now = asyncio.get_running_loop().time()
        if self._busy_since is not None:
            self._busy += now - self._busy_since
        self._busy_since = now if any(member.requests for member in self._pool.members) else None
