"""Which server of a reward model a request goes to: a state machine without a clock and without I/O.

```
UNCHECKED --health answers--> SERVING --faults in a row, or health missed--> EJECTED
                                 ^                                              |
                                 +--one request succeeds-- TRIAL <--health answers, pause over
```

A request takes `pick`, then `began`; whatever becomes of it, `ended` gives its slot back, once. A server that says
"not now" (429, 503) rests and stays what it is. One that is removed gets nothing new, ends what it has and is
forgotten.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

EJECT_AFTER: Final = 3
"""Faults, or missed health checks, in a row after which a server is ejected."""
FIRST_PAUSE: Final = 1.0
LONGEST_PAUSE: Final = 60.0
"""Longest ejection in seconds; it doubles from `FIRST_PAUSE` with each ejection without a success in between."""
FIRST_REST: Final = 0.25
"""Rest in seconds of a busy server that names no time; doubled up to `LONGEST_PAUSE`."""
RECENT: Final = 10.0
"""Seconds after a fault in which a server gets requests only when the others have no free slot."""


class RequestOutcome(StrEnum):
    """How a request ended, as the router sees it."""

    OK = "ok"
    """The server did what it should; also a request that it rightly refuses."""
    FAULT = "fault"
    """No answer in time, a broken connection, an error of its own, an answer that is none."""
    BUSY = "busy"
    """It said "not now"."""
    CANCELLED = "cancelled"
    """Nobody waited for the answer: it says nothing of the server."""


class PoolServerState(StrEnum):
    """Of a server."""

    UNCHECKED = "unchecked"
    SERVING = "serving"
    TRIAL = "trial"
    EJECTED = "ejected"


_WORKING: Final = frozenset({PoolServerState.SERVING, PoolServerState.TRIAL})


@dataclass(slots=True, eq=False)
class PoolServer:
    """A server as the router has it; others only read it.

    Attributes:
        leaving: it was removed and only ends its requests.
        work: cost of the requests in flight.
        picked: number of its last request among those of all servers.
        answered, failed: requests in all that it answered, or that ended with its fault.
        in_a_row: faults since the last success.
        missed: health checks in a row without an answer.
        busy: times in a row that it said "not now".
        ejections: in a row, without a success in between.
        until: when its ejection, or its rest, is over.
        faulted_at: time of the last fault, if no success came after it.
        why: the last fault; empty when there was none since the last success.
    """

    url: str
    state: PoolServerState = PoolServerState.UNCHECKED
    leaving: bool = False
    in_flight: int = 0
    work: int = 0
    picked: int = 0
    answered: int = 0
    failed: int = 0
    in_a_row: int = 0
    missed: int = 0
    busy: int = 0
    ejections: int = 0
    ejected_at: float = -math.inf
    until: float = -math.inf
    faulted_at: float = -math.inf
    answered_at: float = -math.inf
    why: str = ""


@dataclass(slots=True, eq=False)
class Claim:
    """A slot of a server that a request has taken: from `began` to `ended`."""

    server: PoolServer
    began: float
    cost: int = 1
    over: bool = False

    @property
    def url(self) -> str:
        """Of the server."""
        return self.server.url


class Router:
    """The servers of one reward model. All times are of one clock, in seconds."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._servers: dict[str, PoolServer] = {}
        self._ticks = 0

    @property
    def urls(self) -> frozenset[str]:
        """Servers that were added and not removed."""
        return frozenset(url for url, server in self._servers.items() if not server.leaving)

    @property
    def known(self) -> frozenset[str]:
        """`urls`, and those that were removed and still have requests."""
        return frozenset(self._servers)

    @property
    def slots(self) -> int:
        """Requests that all servers take at the same time as they are now; where none works, those of one."""
        return max(self._limit, sum(self._slots_of(server) for server in self._others()))

    def standings(self) -> list[PoolServer]:
        """How each server is, in the order in which they were added."""
        return list(self._servers.values())

    def follow(self, urls: Iterable[str]) -> tuple[list[str], list[str]]:
        """Add the servers that are new in the list and remove those that are gone; returns both.

        A server that comes back before its last request has ended keeps its state.
        """
        wanted = list(dict.fromkeys(urls))
        added = [url for url in wanted if url not in self.urls]
        removed = [url for url in self._servers if url not in wanted and not self._servers[url].leaving]
        for url in added:
            self.add(url)
        for url in removed:
            self.remove(url)
        return added, removed

    def add(self, url: str) -> None:
        """Add a server; it gets requests once its health was checked. A repeat changes nothing."""
        server = self._servers.setdefault(url, PoolServer(url))
        server.leaving = False

    def remove(self, url: str) -> None:
        """Give a server no more requests, and forget it after its last one. An unknown URL is ignored."""
        server = self._servers.get(url)
        if server is not None:
            server.leaving = True
            self._forget(server)

    def pick(self, now: float, exclude: Collection[str] = ()) -> str | None:
        """The server that a request should go to: the one with the least work; None when none has a free slot now.

        Those with a recent fault come last, the one whose fault is longest ago first among them.
        """
        able = [server for server in self._others(exclude) if now >= server.until and self._has_slot(server)]
        if not able:
            return None

        def rank(server: PoolServer) -> tuple[float, int, int]:
            suspect = server.faulted_at if now - server.faulted_at < RECENT else -math.inf
            return suspect, server.work, server.picked

        return min(able, key=rank).url

    def waits(self, now: float, exclude: Collection[str] = ()) -> bool:
        """Whether waiting helps: a server outside of `exclude` works, and has no room or rests for the moment."""
        return any(True for _ in self._others(exclude)) and self.pick(now, exclude) is None

    def busy(self, exclude: Collection[str] = ()) -> bool:
        """Whether a server outside of `exclude` serves and does not rest: a request only has to wait for a slot."""
        return any(server.state is PoolServerState.SERVING and not server.busy for server in self._others(exclude))

    def wakes(self, now: float, exclude: Collection[str] = ()) -> float | None:
        """When the first rest of a server outside of `exclude` ends; None when none rests."""
        return min((server.until for server in self._others(exclude) if server.until > now), default=None)

    def began(self, url: str, now: float, cost: int = 1) -> Claim:
        """Count a request at a server that `pick` named; `KeyError`: there is no such server."""
        server = self._servers[url]
        self._ticks += 1
        server.picked = self._ticks
        server.in_flight += 1
        server.work += cost
        return Claim(server, now, cost)

    def ended(
        self, claim: Claim, outcome: RequestOutcome, now: float, why: str = "", rest: float | None = None
    ) -> PoolServerState | None:
        """Give the slot back and update the server by how its request ended. A repeat changes nothing.

        Returns:
            The new state of the server when this changed it, else None.
        """
        if claim.over:
            return None
        claim.over = True
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

    def quiet(self, now: float, seconds: float) -> list[str]:
        """Servers whose health should be checked: no request of theirs succeeded within the last `seconds`."""
        return [
            server.url
            for server in self._servers.values()
            if not server.leaving
            and (server.state is not PoolServerState.SERVING or now - server.answered_at >= seconds)
            and (server.state is not PoolServerState.EJECTED or now >= server.until)
        ]

    def checked(self, url: str, now: float, *, healthy: bool, why: str = "") -> PoolServerState | None:
        """Learn from a health check of a server; an unknown one does nothing.

        Returns:
            The new state of the server when this changed it, else None.
        """
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

    def _others(self, exclude: Collection[str] = ()) -> Iterable[PoolServer]:
        for server in self._servers.values():
            if server.state in _WORKING and not server.leaving and server.url not in exclude:
                yield server

    def _has_slot(self, server: PoolServer) -> bool:
        return server.in_flight < self._slots_of(server)

    def _slots_of(self, server: PoolServer) -> int:
        return 1 if server.state is PoolServerState.TRIAL else self._limit

    def _answered(self, server: PoolServer, claim: Claim, now: float) -> None:
        server.answered += 1
        server.answered_at = now
        if claim.began < server.ejected_at:
            return  # the request began before the ejection, so its success says nothing about the server now
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
