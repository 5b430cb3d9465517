"""Everything a role shares with the others: two ledgers, the weights, the roles, one connection."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from streamrl.config import RunConfig
from streamrl.queues import embedded
from streamrl.queues.connection import Connection, open_connection
from streamrl.queues.damage import blame_damage
from streamrl.queues.device_lock import DeviceLock
from streamrl.queues.keys import Keys
from streamrl.queues.ledger import Ledger
from streamrl.queues.registry import RoleRegistry
from streamrl.queues.replies import pairs, report_foreign

_DOORBELL_SECONDS: Final = 2.0
_MOST_FOREIGN: Final = 100
"""Foreign entries that one call removes."""


class WeightsStream:
    """The published versions of the weights: numbers with their manifests.

    The script that writes a version also writes its entry into the state of the ledger, behind the learner's fence. So
    a foreign entry is never taken for a version: it is removed, logged, and counted in the state (`foreign`).
    """

    def __init__(self, connection: Connection, keys: Keys) -> None:
        self._connection = connection
        self._keys = keys
        self._last = "0-0"

    async def newest(self) -> tuple[int, bytes] | None:
        """Number and manifest of the newest version; None before the first."""
        keys = [self._keys.weights, self._keys.state]
        entry, version, manifest, foreign = await self._connection.call("newest", keys, [_MOST_FOREIGN])
        if foreign:
            report_foreign(self._keys.weights, [pairs(fields) for fields in foreign])
        if not entry:
            return None
        self._last = entry.decode()
        return int(version), manifest

    async def after(self, version: int, seconds: float) -> tuple[int, bytes] | None:
        """The newest version above `version`; waits up to `seconds` for one, then None.

        Versions in between are skipped. If Redis went back, a version seen before is missing until the next one.
        """
        loop = asyncio.get_running_loop()
        end = loop.time() + seconds
        while True:
            newest = await self.newest()
            if newest is not None and newest[0] > version:
                return newest
            # Waits are short because XREAD misses entries that Redis adds after its clock went back.
            left = min(_DOORBELL_SECONDS, end - loop.time())
            if left <= 0:
                return None
            milliseconds = max(1, int(left * 1000))
            command = ("XREAD", "COUNT", 1, "BLOCK", milliseconds, "STREAMS", self._keys.weights, self._last)
            await self._connection.block(*command, milliseconds=milliseconds)


@dataclass(frozen=True)
class Ledgers:
    train: Ledger
    evaluation: Ledger
    weights: WeightsStream
    roles: RoleRegistry
    device_lock: DeviceLock
    connection: Connection


@contextlib.asynccontextmanager
async def open_ledgers(config: RunConfig, run_dir: Path) -> AsyncIterator[Ledgers]:
    """Connect to the Redis of a run and make missing streams; errors as of `open_connection`.

    LedgerDamaged replaces an error of the block that a damage of the run's keys explains.
    """
    train, held_out = Keys(config.name), Keys(config.name, evaluation=True)
    async with open_connection(config.redis, embedded.url(config.redis, run_dir)) as connection:
        ledgers = Ledgers(
            train=Ledger(connection, train, config.redis.fsync_period),
            evaluation=Ledger(connection, held_out, config.redis.fsync_period),
            weights=WeightsStream(connection, train),
            roles=RoleRegistry(connection, train),
            device_lock=DeviceLock(connection, train, config.lease.seconds),
            connection=connection,
        )
        try:
            await ledgers.train.ensure()
            await ledgers.evaluation.ensure()
            yield ledgers
        except (Exception, BaseExceptionGroup) as error:
            await blame_damage(connection, config.name, error)
            raise
