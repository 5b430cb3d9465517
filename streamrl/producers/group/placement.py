"""Requests that wait for a server, and which one each gets."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Callable
from typing import Final

from streamrl.config import RunConfig
from streamrl.producers.group.balance import Place, choose
from streamrl.producers.group.member import Member
from streamrl.producers.group.roster import Roster
from streamrl.producers.group.work import Work

_AFFINITIES: Final = 10_000
_MEMORY: Final = 0.05
"""Weight of the newest response in the expected length."""


class Placement:
    """The queue of a group: in order of arrival, but nobody waits for one that no server may take yet.

    Args:
        config: the run; `sampling` is read.
        roster: the servers.
        allows: whether the weights of a server allow a prompt.
    """

    def __init__(self, config: RunConfig, roster: Roster, allows: Callable[[Member], bool]) -> None:
        self._together = config.sampling.responses
        self._roster = roster
        self._allows = allows
        self._queue: list[Work] = []
        self._affinity: OrderedDict[str, str] = OrderedDict()
        self._expected = float(config.sampling.max_new_tokens)
        self._failure: Exception | None = None
        self._busy = 0.0
        self._busy_since: float | None = None

    def __len__(self) -> int:
        """Requests that wait."""
        return len(self._queue)

    @property
    def busy_seconds(self) -> float:
        """Seconds in which some server had a request; only grows."""
        since = self._busy_since
        return self._busy if since is None else self._busy + asyncio.get_running_loop().time() - since

    async def wait(self, work: Work) -> Member | None:
        """Return the server that a request has been given; None when it was aborted before.

        Raises:
            Unreachable: the group died.
        """
        if self._failure is not None:
            raise self._failure
        if work.aborting:
            return None
        work.place = asyncio.get_running_loop().create_future()
        self._queue.append(work)
        self.place()
        try:
            return await work.place
        except asyncio.CancelledError:
            self.release(work)
            raise
        finally:
            self._queue.remove(work)

    def release(self, work: Work) -> None:
        """A request has left its server, or wants none any more."""
        if work.member is not None:
            work.member.release(work)
            work.member = None
        for member in self._roster.members:
            if member.reserved is work:
                member.reserved = None
        self._clock()
        self.place()

    def place(self) -> None:
        """Give servers with room what waits."""
        for work in self._queue:
            if not any(member.room or member.reserved is not None for member in self._roster.members):
                return
            if work.place.done():
                continue
            member = self._choose_alone(work) if work.alone else self._choose(work)
            if member is not None:
                member.take(work)
                work.place.set_result(member)
                self._clock()

    def abort(self, which: Callable[[Work], bool]) -> int:
        """End requests that wait; return how many."""
        chosen = [work for work in self._queue if not work.place.done() and which(work)]
        for work in chosen:
            work.place.set_result(None)
        return len(chosen)

    def fail(self, error: Exception) -> None:
        """End all that wait with an error, and all that want to wait from now on."""
        self._failure = error
        for work in self._queue:
            if not work.place.done():
                work.place.set_exception(error)

    def learn(self, length: int) -> None:
        """Take the length of a response into account."""
        self._expected += _MEMORY * (length - self._expected)

    def _choose(self, work: Work) -> Member | None:
        free = [
            member
            for member in self._roster.members
            # the versions of one response never go back
            if member.room and self._allows(member) and member.pair[1] >= work.prefix.version
        ]
        if not free:
            return None
        key = work.request.affinity
        before = self._affinity.get(key) if key else None
        at = choose(
            [Place(self._tokens_on(member), member.limit, member.figures.cache_use) for member in free],
            cost=work.tokens(self._expected),
            shared=len(work.request.tokens),
            together=self._together,
            before=next((at for at, member in enumerate(free) if member.name == before), None),
        )
        if key:
            self._affinity[key] = free[at].name
            self._affinity.move_to_end(key)
            if len(self._affinity) > _AFFINITIES:
                self._affinity.popitem(last=False)
        return free[at]

    def _choose_alone(self, work: Work) -> Member | None:
        """Reserve the least busy server for a request under suspicion, and give it that once it is empty."""
        mine = next((member for member in self._roster.serving if member.reserved is work), None)
        if mine is None:
            free = [member for member in self._roster.members if member.room and self._allows(member)]
            if not free:
                return None
            mine = min(free, key=lambda member: len(member.works))
            mine.reserved = work
        return None if mine.works else mine

    def _tokens_on(self, member: Member) -> int:
        return sum(work.tokens(self._expected) for work in member.works)

    def _clock(self) -> None:
        now = asyncio.get_running_loop().time()
        if self._busy_since is not None:
            self._busy += now - self._busy_since
        self._busy_since = now if any(member.works for member in self._roster.members) else None
