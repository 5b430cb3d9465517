"""A process that takes turns in a rate limit and prints the server's time after each: `URL MODEL QUOTA COUNT`."""

from __future__ import annotations

import asyncio
import sys

from streamrl.config import RedisConfig
from streamrl.consumers.models.rate_limit import Quota, RateLimit, RedisStore
from streamrl.queues.connection import open_connection
from streamrl.queues.keys import Keys


async def main(url: str, model: str, quota: int, count: int) -> None:
    async with open_connection(RedisConfig(url=url), url) as connection:
        limit = RateLimit(model, Quota(quota, None), RedisStore(connection, Keys("test"), model))

        async def one() -> None:
            turn = await limit.take(0, 600.0)
            seconds, micros = await connection.read("TIME")
            print(turn.id, int(seconds) * 1000 + int(micros) // 1000, sep="|")

        await asyncio.gather(*(one() for _ in range(count)))


asyncio.run(main(sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4])))
