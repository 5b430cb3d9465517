"""The board of a run: what each living role says of itself."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping

from streamrl.queues import replies
from streamrl.queues.connection import Connection
from streamrl.queues.keys import Keys


class RoleBoard:
    """What each role says of itself: a hash with a time to live for each, so the silent ones vanish."""

    def __init__(self, connection: Connection, keys: Keys) -> None:
        self._connection = connection
        self._keys = keys

    async def beat(self, name: str, fields: Mapping[str, str | int | float], ttl: float) -> None:
        """Replace the fields of a role (at least one); they vanish `ttl` seconds later. Works when Redis is full."""
        flat = [part for pair in fields.items() for part in pair]
        keys = [self._keys.role(name), self._keys.roles]
        await self._connection.call("beat", keys, [name, int(ttl * 1000), *flat])

    async def read(self, prefix: str = "") -> dict[str, dict[str, str]]:
        """Fields of all roles that are alive, by name; of those alone whose names begin with `prefix`."""
        known = [name.decode(errors="replace") for name in await self._connection.read("SMEMBERS", self._keys.roles)]
        names = sorted(name for name in known if name.startswith(prefix))
        found = await asyncio.gather(*(self._connection.read("HGETALL", self._keys.role(name)) for name in names))
        return {
            name: {
                key.decode(errors="replace"): value.decode(errors="replace")
                for key, value in replies.pairs(fields).items()
            }
            for name, fields in zip(names, found, strict=True)
            if fields
        }
