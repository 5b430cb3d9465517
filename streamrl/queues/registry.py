"""The living roles of a run."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping

from streamrl.queues.connection import Connection
from streamrl.queues.keys import Keys
from streamrl.queues.replies import pairs, text


class RoleRegistry:
    def __init__(self, connection: Connection, keys: Keys) -> None:
        self._connection = connection
        self._keys = keys

    async def beat(self, name: str, fields: Mapping[str, str | int | float], ttl: float) -> None:
        """Replace the fields of a role (at least one); they vanish after `ttl` seconds. Works when Redis is full.

        With `host`, `started` and `beat` among them, it is known later when this process and its host died.
        """
        flat = [part for pair in fields.items() for part in pair]
        keys, life = [self._keys.role(name), self._keys.roles], ("", 0)
        if "started" in fields:
            keys.append(self._keys.hosts)
            up = float(fields["beat"]) - float(fields["started"])
            life = (f"{fields['host']} {name} {fields['started']}", int(up * 1000))
        await self._connection.call("beat", keys, [name, int(ttl * 1000), *life, *flat])

    async def first_life(self, name: str, nonce: str) -> bool:
        """Whether this process, known by its nonce, is the first of the role in the run, on whatever host."""
        await self._connection.read("HSETNX", self._keys.lives, name, nonce)
        first: bytes = await self._connection.read("HGET", self._keys.lives, name)
        return first == nonce.encode()

    async def read(self, prefix: str = "") -> dict[str, dict[str, str]]:
        """Fields of living roles whose names begin with `prefix`: of all names ever used, those that have any."""
        names = map(text, await self._connection.read("SMEMBERS", self._keys.roles))
        known = sorted(name for name in names if name.startswith(prefix))
        found = await asyncio.gather(*(self._connection.read("HGETALL", self._keys.role(name)) for name in known))
        return {
            name: {text(key): text(value) for key, value in pairs(fields).items()}
            for name, fields in zip(known, found, strict=True)
            if fields
        }
