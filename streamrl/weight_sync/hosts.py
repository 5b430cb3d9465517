"""Which server is asked for the files of a version: the least busy neighbour that has it, else the learner's host."""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, Protocol

RELAY_FIELD: Final = "weights_relay"
"""Field of a role on the board of roles: URL under which it serves what it has fetched."""
_FIRST_PAUSE: Final = 0.05
_LONGEST_PAUSE: Final = 5.0


class Board(Protocol):
    """What is needed of the board of roles (streamrl.queues RoleRegistry)."""

    async def read(self) -> dict[str, dict[str, str]]:
        """Fields of all roles that are alive, by name."""
        ...


async def neighbours(board: Board, own_name: str) -> list[str]:
    """Return the URLs of all relays but the own one."""
    found = await board.read()
    return sorted(
        fields[RELAY_FIELD] for name, fields in found.items() if name != own_name and fields.get(RELAY_FIELD, "")
    )


@dataclass
class Host:
    """One server.

    Attributes:
        url: without a slash at its end.
        relay: a neighbour, which is tried before the learner's host.
        busy: transfers that run there, as it said last.
        failures: in a row.
        rests_until: monotonic time before which it is left alone.
        banned: it is not asked for this version again.
    """

    url: str
    relay: bool
    busy: int = 0
    failures: int = 0
    rests_until: float = 0.0
    banned: bool = False


class Hosts:
    """The servers of one fetch. Pure but for the jitter: the clock is an argument.

    Args:
        sources: URLs of the learner's host, from the manifest.
        relays: neighbours that have the version, with the transfers that run there.
    """

    def __init__(self, sources: list[str], relays: Mapping[str, int]) -> None:
        self._all = {url: Host(url, relay=False) for url in sources}
        self.add(relays)

    def add(self, relays: Mapping[str, int]) -> None:
        """Take neighbours into account that have the version by now; a ban stays."""
        for url, busy in relays.items():
            self._all.setdefault(url, Host(url, relay=True)).busy = busy

    def pick(self, now: float) -> Host | None:
        """Return the server to ask, None when all of them rest for a while."""
        ready = [host for host in self._all.values() if not host.banned and host.rests_until <= now]
        return min(ready, key=lambda host: (not host.relay, host.busy), default=None)

    def pause(self, now: float) -> float:
        """Seconds until a server may be asked again."""
        return max(
            0.001, min((host.rests_until - now for host in self._all.values() if not host.banned), default=0.001)
        )

    @property
    def exhausted(self) -> bool:
        """Whether no server is left."""
        return all(host.banned for host in self._all.values())

    def failed(self, host: Host, now: float, *, longest: float = _LONGEST_PAUSE) -> None:
        """Leave a server alone for a while, twice as long after each failure, with jitter."""
        host.failures += 1
        pause = min(longest, _FIRST_PAUSE * 2 ** min(host.failures, 10))
        host.rests_until = now + random.uniform(pause / 2, pause)  # noqa: S311

    def ban_relays(self, urls: list[str]) -> None:
        """Do not ask these neighbours again; the learner's host is asked again, because nobody else may have it."""
        for url in urls:
            host = self._all.get(url)
            if host is not None and host.relay:
                host.banned = True

    def worked(self, host: Host) -> None:
        """Forget the failures of a server that sent something, however the transfer ended; a rest stays."""
        host.failures = 0
