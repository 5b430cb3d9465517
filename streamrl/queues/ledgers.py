"""Everything a role shares with the others: two ledgers, the weights, the roles, one connection."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from streamrl.config import RunConfig
from streamrl.queues import embedded, replies
from streamrl.queues.connection import Connection, open_connection
from streamrl.queues.enlisted import ServerList
from streamrl.queues.foreign import read_ours
from streamrl.queues.keys import Keys
from streamrl.queues.ledger import Ledger
from streamrl.queues.turn import DeviceTurn

_DOORBELL_SECONDS = 2.0


class WeightsStream:
    """The published versions of the weights: numbers with their manifests, newest last."""

    def __init__(self, connection: Connection, keys: Keys) -> None:
        self._connection = connection
        self._keys = keys
        self._last = "0-0"

    async def newest(self) -> tuple[int, bytes] | None:
        """Number and manifest of the newest version; None before the first."""
        command = ("XREVRANGE", "+", "-", "COUNT", 1)
        rows = await read_ours(self._connection, self._keys.weights, command, (b"v",), (b"m",))
        if not rows:
            return None
        self._last = rows[0][0]
        return int(rows[0][1][b"v"]), rows[0][1][b"m"]

    async def after(self, version: int, seconds: float) -> tuple[int, bytes] | None:
        """The newest version above `version`; waits up to `seconds` for one, then None.

        Versions in between are skipped. When Redis went back, a version that was seen is gone until the next one.
        """
        loop = asyncio.get_running_loop()
        end = loop.time() + seconds
        while True:
            newest = await self.newest()
            if newest is not None and newest[0] > version:
                return newest
            # Waits are cut short because the doorbell misses what a Redis whose clock went back adds.
            left = min(_DOORBELL_SECONDS, end - loop.time())
            if left <= 0:
                return None
            milliseconds = max(1, int(left * 1000))
            command = ("XREAD", "COUNT", 1, "BLOCK", milliseconds, "STREAMS", self._keys.weights, self._last)
            await self._connection.block(*command, milliseconds=milliseconds)


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

    async def read(self) -> dict[str, dict[str, str]]:
        """Fields of all roles that are alive, by name."""
        names = sorted(name.decode() for name in await self._connection.read("SMEMBERS", self._keys.roles))
        found = await asyncio.gather(*(self._connection.read("HGETALL", self._keys.role(name)) for name in names))
        return {
            name: {key.decode(): value.decode(errors="replace") for key, value in replies.pairs(fields).items()}
            for name, fields in zip(names, found, strict=True)
            if fields
        }


@dataclass(frozen=True)
class Ledgers:
    """What `open_ledgers` yields."""

    train: Ledger
    evaluation: Ledger
    weights: WeightsStream
    roles: RoleBoard
    servers: ServerList
    turn: DeviceTurn
    connection: Connection


@contextlib.asynccontextmanager
async def open_ledgers(config: RunConfig, run_dir: Path) -> AsyncIterator[Ledgers]:
    """Connect to the Redis of a run and make the streams that are missing.

    Waits up to `redis.patience` for the server. Calls that wait at the end of the block get `Unreachable`.

    Raises:
        Unreachable: the server does not answer.
        ConfigError: URL, password, version or eviction policy are wrong.
    """
    train, held_out = Keys(config.name), Keys(config.name, evaluation=True)
    async with open_connection(config.redis, embedded.url(config.redis, run_dir)) as connection:
        ledgers = Ledgers(
            train=Ledger(connection, train, config.redis.fsync_period),
            evaluation=Ledger(connection, held_out, config.redis.fsync_period),
            weights=WeightsStream(connection, train),
            roles=RoleBoard(connection, train),
            servers=ServerList(connection, train),
            turn=DeviceTurn(connection, train, config.lease.seconds),
            connection=connection,
        )
        await ledgers.train.ensure()
        await ledgers.evaluation.ensure()
        yield ledgers
