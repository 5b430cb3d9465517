"""Which server of a reward model a request goes to: a state machine without a clock and without I/O.

```
UNCHECKED --health answers--> SERVING --faults in a row, or health missed--> EJECTED
                                 ^                                              |
                                 +--one request succeeds-- TRIAL <--health answers, pause over
```

A request calls `pick`, then `began`, and finally `ended`, once, which gives the slot back. A server that answers "not
now" (429, 503) rests and keeps its state. A removed server gets no new requests and is forgotten after its last one.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

EJECT_AFTER: Final = 3
"""Faults, or missed health checks, in a row after which a server is ejected."""
FIRST_PAUSE: Final = 1.0
LONGEST_PAUSE: Final = 60.0
"""Longest ejection in seconds. It starts at `FIRST_PAUSE` and doubles with each ejection without a success between."""
FIRST_REST: Final = 0.25
"""Rest in seconds of a busy server that names no time; doubles up to `LONGEST_PAUSE`."""
RECENT: Final = 10.0
"""Seconds after a fault in which a server gets requests only when the others have no free slot."""


class RequestOutcome(StrEnum):
    OK = "ok"
    """An answer, or a refusal because the request itself is wrong."""
    FAULT = "fault"
    """No answer in time, a broken connection, an error of the server, or an unreadable answer."""
    BUSY = "busy"
    """The server answered "not now"."""
    CANCELLED = "cancelled"
    """The client stopped waiting, which says nothing about the server."""


class PoolServerState(StrEnum):
    UNCHECKED = "unchecked"
    SERVING = "serving"
    TRIAL = "trial"
    EJECTED = "ejected"


_WORKING: Final = frozenset({PoolServerState.SERVING, PoolServerState.TRIAL})


@dataclass(slots=True, eq=False)
class PoolServer:
    """A server. Only the router changes it."""

    url: str
    state: PoolServerState = PoolServerState.UNCHECKED
    leaving: bool = False  # removed; finishes its requests
    in_flight: int = 0
    work: int = 0  # cost of the requests in flight
    picked: int = 0  # number of its last request, counted over all servers
    failed: int = 0  # all faults
    in_a_row: int = 0  # faults since the last success
    missed: int = 0  # failed health checks in a row
    busy: int = 0  # times in a row that it answered "not now"
    ejections: int = 0  # without a success between
    ejected_at: float = -math.inf
    until: float = -math.inf  # end of its ejection or rest
    faulted_at: float = -math.inf  # last fault without a later success
    answered_at: float = -math.inf
    why: str = ""  # last fault since the last success


@dataclass(slots=True, eq=False)
class Claim:
    server: PoolServer
    began: float
    cost: int

    @property
    def url(self) -> str:
        return self.server.url


class Router:
    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._servers: dict[str, PoolServer] = {}
        self._ticks = 0

    @property
    def urls(self) -> frozenset[str]:
        return frozenset(url for url, server in self._servers.items() if not server.leaving)

    @property
    def known(self) -> frozenset[str]:
        """`urls`, and removed servers that still have requests."""
        return frozenset(self._servers)

    @property
    def slots(self) -> int:
        """Requests that all working servers take at once; if none works, those of one."""
        return max(self._limit, sum(self._slots_of(server) for server in self._others()))

    def standings(self) -> list[PoolServer]:
        return list(self._servers.values())

    def follow(self, urls: Iterable[str]) -> tuple[list[str], list[str]]:
        """Make `urls` the servers; returns new and removed ones.

        A new server gets requests after its first health check. One that comes back before its last request has ended
        keeps its state.
        """
        wanted = list(dict.fromkeys(urls))
        added = [url for url in wanted if url not in self.urls]
        removed = [url for url, server in self._servers.items() if url not in wanted and not server.leaving]
        for url in added:
            self._servers.setdefault(url, PoolServer(url)).leaving = False
        for url in removed:
            self._servers[url].leaving = True
            self._forget(self._servers[url])
        return added, removed

    def pick(self, now: float, exclude: Collection[str] = ()) -> str | None:
        """The server with the least work that has a free slot, or None. Servers with a recent fault come last."""
        able = [
            server
            for server in self._others(exclude)
            if now >= server.until and server.in_flight < self._slots_of(server)
        ]
        if not able:
            return None

        def rank(server: PoolServer) -> tuple[float, int, int]:
            suspect = server.faulted_at if now - server.faulted_at < RECENT else -math.inf
            return suspect, server.work, server.picked

        return min(able, key=rank).url

    def works(self, exclude: Collection[str] = ()) -> bool:
        """Whether waiting for a server outside of `exclude` helps: it works, even if it is full or rests."""
        return any(True for _ in self._others(exclude))

    def lacks_slots(self, exclude: Collection[str] = ()) -> bool:
        """Whether a server outside of `exclude` serves and does not rest, so that a request only lacks a free slot."""
        return any(server.state is PoolServerState.SERVING and not server.busy for server in self._others(exclude))

    def first_rest_ends(self, now: float, exclude: Collection[str] = ()) -> float | None:
        """When the first server outside of `exclude` ends its rest; None if none rests."""
        return min((server.until for server in self._others(exclude) if server.until > now), default=None)

    def began(self, url: str, now: float, cost: int = 1) -> Claim:
        server = self._servers[url]
        self._ticks += 1
        server.picked = self._ticks
        server.in_flight += 1
        server.work += cost
        return Claim(server, now, cost)

    def ended(
        self, claim: Claim, outcome: RequestOutcome, now: float, why: str = "", rest: float | None = None
    ) -> PoolServerState | None:
        """Give the slot back, once, and update the server; returns its new state if it changed."""
        server = claim.server
        before = server.state
        server.in_flight -= 1
        server.work -= claim.cost
        if outcome is RequestOutcome.OK:
            self._answered(server, claim, now)
        elif outcome is RequestOutcome.FAULT:
            self._failed(server, claim, now, why)
        elif outcome is RequestOutcome.BUSY:
            self._rest(server, now, why, rest)
        self._forget(server)
        return None if server.state is before else server.state

    def to_check(self, now: float, seconds: float) -> list[str]:
        """Servers that need a health check: no request succeeded within `seconds`."""
        return [
            server.url
            for server in self._servers.values()
            if not server.leaving
            and (server.state is not PoolServerState.SERVING or now - server.answered_at >= seconds)
            and (server.state is not PoolServerState.EJECTED or now >= server.until)
        ]

    def checked(self, url: str, now: float, *, healthy: bool, why: str = "") -> PoolServerState | None:
        server = self._servers.get(url)
        if server is None:
            return None
        before = server.state
        if not healthy:
            self._missed(server, now, why)
        elif server.state is PoolServerState.UNCHECKED:
            server.state, server.missed, server.why = PoolServerState.SERVING, 0, ""
        else:
            server.missed = 0
            if server.state is PoolServerState.EJECTED and now >= server.until:
                server.state = PoolServerState.TRIAL
        return None if server.state is before else server.state

    def _others(self, exclude: Collection[str] = ()) -> Iterator[PoolServer]:
        for server in self._servers.values():
            if server.state in _WORKING and not server.leaving and server.url not in exclude:
                yield server

    def _slots_of(self, server: PoolServer) -> int:
        return 1 if server.state is PoolServerState.TRIAL else self._limit

    def _answered(self, server: PoolServer, claim: Claim, now: float) -> None:
        server.answered_at = now
        if claim.began < server.ejected_at:
            return  # the request began before the ejection and says nothing about the server now
        server.in_a_row = server.missed = server.busy = 0
        if server.state is PoolServerState.TRIAL:
            server.state = PoolServerState.SERVING
        server.ejections, server.why, server.faulted_at = 0, "", -math.inf

    def _failed(self, server: PoolServer, claim: Claim, now: float, why: str) -> None:
        server.failed += 1
        server.faulted_at, server.why = now, why
        if claim.began < server.ejected_at or server.state not in _WORKING:
            return
        server.in_a_row += 1
        if server.state is PoolServerState.TRIAL or server.in_a_row >= EJECT_AFTER:
            self._eject(server, now)

    def _rest(self, server: PoolServer, now: float, why: str, rest: float | None) -> None:
        pause = FIRST_REST * 2.0 ** min(server.busy, 30) if rest is None else rest
        server.busy += 1
        server.until = max(server.until, now + min(LONGEST_PAUSE, max(0.0, pause)))
        server.why = why

    def _missed(self, server: PoolServer, now: float, why: str) -> None:
        server.missed += 1
        server.why = why
        if server.state in _WORKING and server.missed >= EJECT_AFTER:
            self._eject(server, now)

    def _eject(self, server: PoolServer, now: float) -> None:
        server.state, server.ejected_at = PoolServerState.EJECTED, now
        server.until = now + min(LONGEST_PAUSE, FIRST_PAUSE * 2.0 ** min(server.ejections, 30))
        server.ejections += 1
        server.in_a_row = server.missed = server.busy = 0

    def _forget(self, server: PoolServer) -> None:
        if server.leaving and not server.in_flight and self._servers.get(server.url) is server:
            del self._servers[server.url]
