"""What is in a run now: its living roles, and the servers of reward models that people added or removed."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final

from streamrl.queues.connection import Connection
from streamrl.queues.keys import Keys
from streamrl.queues.replies import pairs, text

_COUNTER: Final = b"#"


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
        """Fields of living roles whose names begin with `prefix`."""
        found = await _living(self._connection, self._keys.roles, self._keys.role, prefix)
        return {name: {text(key): text(value) for key, value in fields.items()} for name, fields in found.items()}


@dataclass(frozen=True, slots=True)
class Enlisted:
    """A server that a person added or removed; `number` counts the added ones from 1, 0: from the configuration."""

    present: bool  # False: removed
    number: int


async def read_enlisted(connection: Connection, key: str) -> dict[str, Enlisted]:
    fields = pairs(await connection.read("HGETALL", key))
    return {
        text(name): Enlisted(value[:1] == b"+", int(value[1:]))
        for name, value in fields.items()
        if name != _COUNTER and value[:1] in (b"+", b"-") and value[1:].isdigit()
    }


async def _living(
    connection: Connection, names: str, key: Callable[[str], str], prefix: str = ""
) -> dict[str, dict[bytes, bytes]]:
    """`names` is the set of all names ever used; expired hashes are left out."""
    known = sorted(name for name in map(text, await connection.read("SMEMBERS", names)) if name.startswith(prefix))
    found = await asyncio.gather(*(connection.read("HGETALL", key(name)) for name in known))
    return {name: pairs(fields) for name, fields in zip(known, found, strict=True) if fields}
