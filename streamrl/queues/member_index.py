"""Numbers for members of a role that others start without one: pods of a Deployment, tasks of a job array.

A member claims the lowest free number in Redis and renews it; the number of a dead one is free `TTL` seconds later.
One that was cut off for longer keeps its number, unless another member has taken it meanwhile.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Final

from streamrl.config import RunConfig
from streamrl.errors import DeadlineExceeded, Refused, unwrapped
from streamrl.queues import embedded
from streamrl.queues.connection import Connection, open_connection
from streamrl.queues.keys import Keys

TTL: Final = 30.0
"""Longer than a beat by far, so that a slow Redis takes no number away."""
_RENEW: Final = TTL / 6
_MOST: Final = 10_000


@contextlib.asynccontextmanager
async def claimed_index(kind: str, config: RunConfig, run_dir: Path) -> AsyncIterator[int]:
    """The number of this member for the block; it is free again afterwards.

    DeadlineExceeded: another member has it, because this one did not renew it in time. The block is cancelled then.
    """
    nonce = secrets.token_hex(8)
    async with open_connection(config.redis, embedded.url(config.redis, run_dir)) as connection:
        index = await _claim(connection, Keys(config.name), kind, nonce)
        key = Keys(config.name).member(kind, index)
        try:
            with unwrapped():
                async with asyncio.TaskGroup() as tasks:
                    renewing = tasks.create_task(_renew(connection, key, nonce), name="renew index")
                    yield index
                    renewing.cancel()
        finally:
            await connection.call("lock", [key], [nonce, 0])


async def _claim(connection: Connection, keys: Keys, kind: str, nonce: str) -> int:
    for index in range(_MOST):
        if await connection.read("EXISTS", keys.role(f"{kind}.{index}")):
            continue  # a living member that was given its number
        if await _take(connection, keys.member(kind, index), nonce):
            return index
    raise Refused(f"role {kind} has {_MOST} members", "give this one a number with --index")


async def _take(connection: Connection, key: str, nonce: str) -> bool:
    """Take a number that is free, or renew it; False if another member has it."""
    return bool(await connection.call("lock", [key], [nonce, int(TTL * 1000)]))


async def _renew(connection: Connection, key: str, nonce: str) -> None:
    while True:
        await asyncio.sleep(_RENEW)
        if not await _take(connection, key, nonce):
            raise DeadlineExceeded(
                f"this member reached Redis too late (after more than {TTL:g} s), and another one has its number",
                "start it again: it takes a free number",
            )
