"""The engine servers of a run: which were added or removed while it goes on, and how each of them is."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

import orjson

from streamrl.queues import replies
from streamrl.queues.connection import Connection
from streamrl.queues.keys import Keys

_COUNTER: Final = b"#"
REPORT_SECONDS: Final = 10.0
"""Seconds after which what a silent replica said of its servers vanishes."""


@dataclass(frozen=True, slots=True)
class Enlisted:
    """What a person said of a server.

    Attributes:
        present: added; False: removed.
        number: of those that were added, from 1; 0 for one that the run's configuration names.
    """

    present: bool
    number: int

    def owner(self, replicas: int) -> int:
        """Index of the replica that an added server belongs to."""
        return (self.number - 1) % replicas


async def read_enlisted(connection: Connection, key: str) -> dict[str, Enlisted]:
    """Read what the script `enlist` has written: servers by name."""
    fields = replies.pairs(await connection.read("HGETALL", key))
    return {
        name.decode(errors="replace"): Enlisted(value[:1] == b"+", int(value[1:]))
        for name, value in fields.items()
        if name != _COUNTER and value[:1] in (b"+", b"-") and value[1:].isdigit()
    }


class ServerList:
    """Engine servers by name: an external one's is its URL, a managed one's is `rollout.N.serverM`.

    Args:
        connection: to Redis.
        keys: of the run.
    """

    def __init__(self, connection: Connection, keys: Keys) -> None:
        self._connection = connection
        self._keys = keys

    async def enlisted(self) -> dict[str, Enlisted]:
        """Servers that were added or removed since the run began; those of the configuration alone are not here."""
        return await read_enlisted(self._connection, self._keys.engines)

    async def enlist(self, name: str, *, present: bool) -> bool:
        """Add or remove a server; False when it was so already."""
        return bool(await self._connection.call("enlist", [self._keys.engines], [name, int(present)]))

    async def report(self, replica: str, rows: Mapping[str, Mapping[str, Any]]) -> None:
        """Replace what a replica says of its servers; it vanishes `REPORT_SECONDS` later."""
        flat = [part for name, row in rows.items() for part in (name, orjson.dumps(row))]
        keys = [self._keys.server_report(replica), self._keys.servers]
        # never empty: a hash needs a field
        await self._connection.call("beat", keys, [replica, int(REPORT_SECONDS * 1000), _COUNTER, len(rows), *flat])

    async def reports(self) -> dict[str, dict[str, dict[str, Any]]]:
        """What living replicas say: replica to server to its figures."""
        names = sorted(
            name.decode(errors="replace") for name in await self._connection.read("SMEMBERS", self._keys.servers)
        )
        found = await asyncio.gather(
            *(self._connection.read("HGETALL", self._keys.server_report(name)) for name in names)
        )
        return {
            name: {server.decode(errors="replace"): row for server, row in _rows(replies.pairs(fields))}
            for name, fields in zip(names, found, strict=True)
            if fields
        }


def _rows(fields: Mapping[bytes, bytes]) -> Iterator[tuple[bytes, dict[str, Any]]]:
    """Figures of each server; what is none of ours is passed over."""
    for server, text in fields.items():
        with contextlib.suppress(orjson.JSONDecodeError):
            if server != _COUNTER and isinstance(row := orjson.loads(text), dict):
                yield server, row
