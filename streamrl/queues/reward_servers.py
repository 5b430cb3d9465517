"""The servers of a run's reward models: configured, added by commands, or started by streamrl.

A server that streamrl starts is a role (`reward_model.NAME.N`). Its heartbeat holds the URL and whether the server
sleeps, and vanishes with the role. Servers added or removed by commands stay so until the opposite command.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final
from urllib.parse import urlsplit

from streamrl.config.rewards import REWARD_MODEL_ROLE
from streamrl.queues.ledgers import Ledgers
from streamrl.queues.replies import pairs, text

ASLEEP: Final = "asleep"
READY: Final = "ready"
_LOOPBACK: Final = frozenset({"127.0.0.1", "localhost", "::1"})


@dataclass(frozen=True, slots=True)
class RewardServer:
    """A server of a reward model. `name` is the role that started it, else its URL. Asked only while `awake`."""

    name: str
    url: str
    awake: bool = True


class RewardServers:
    def __init__(self, ledgers: Ledgers) -> None:
        self._connection = ledgers.connection
        self._train = ledgers.train.keys
        self._roles = ledgers.roles

    async def present(self, model: str, configured: Sequence[str] = ()) -> list[RewardServer]:
        """Servers of a model that this host can reach, including sleeping ones and the `configured` URLs.

        Left out: servers that are starting, whose role died, or on the loopback interface of another host.
        """
        enlisted, roles = await asyncio.gather(
            self._enlisted(model),
            self._roles.read(f"{REWARD_MODEL_ROLE}.{model}."),
        )
        started = [
            RewardServer(name, fields["url"], fields.get("server") != ASLEEP)
            for name, fields in roles.items()
            if "url" in fields and _reachable(fields["url"], fields.get("host", ""))
        ]
        removed = {name for name, there in enlisted.items() if not there}
        known = {server.url: server for server in [*(RewardServer(url, url) for url in configured), *started]}
        started_by_us = f"{REWARD_MODEL_ROLE}."
        back = {name for name, there in enlisted.items() if there and not name.startswith(started_by_us)}
        added = [RewardServer(url, url) for url in sorted(back - set(known))]
        return [server for server in [*known.values(), *added] if not {server.name, server.url} & removed]

    async def removed(self, model: str) -> set[str]:
        return {name for name, there in (await self._enlisted(model)).items() if not there}

    async def enlist(self, model: str, name: str, *, present: bool) -> bool:
        """Add a server by its URL, or remove one by URL or role; False if nothing changes.

        A removed server that streamrl started keeps running but is not asked.
        """
        return bool(await self._connection.call("enlist", [self._train.reward_servers(model)], [name, int(present)]))

    async def _enlisted(self, model: str) -> dict[str, bool]:
        """Servers that people added (True) or removed. Old runs have numbers behind the signs, and a counter `#`."""
        fields = pairs(await self._connection.read("HGETALL", self._train.reward_servers(model)))
        return {text(name): sign[:1] == b"+" for name, sign in fields.items() if sign[:1] in {b"+", b"-"}}


def _reachable(url: str, host: str) -> bool:
    return host == socket.gethostname() or urlsplit(url).hostname not in _LOOPBACK
