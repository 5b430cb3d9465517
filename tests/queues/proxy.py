"""A proxy between a client and Redis that breaks the connection at a chosen moment: real sockets, real lost replies."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path


class Proxy:
    """Forwards bytes.

    `lose` makes it swallow the reply to the next request with a marker, and hang up; `hold` keeps requests back.
    """

    def __init__(self, upstream: Path) -> None:
        self._upstream = upstream
        self._marker: bytes | None = None
        self._held = b""
        self._wanted = 0
        self.lost = 0

    def lose(self, marker: bytes) -> None:
        """Let the next request that contains `marker` reach Redis and be executed; its reply never arrives."""
        self._marker = marker

    def hold(self, marker: bytes, count: int) -> None:
        """Keep requests with `marker`, and what follows, from Redis until there are `count` of them."""
        self._held, self._wanted = marker, count

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """One client connection."""
        redis_reader, redis_writer = await asyncio.open_unix_connection(self._upstream)
        armed = asyncio.Event()

        async def forward() -> None:
            kept = b""
            while data := await reader.read(1 << 16):
                kept += data
                if self._held and self._held in kept and kept.count(self._held) < self._wanted:
                    continue
                data, kept = kept, b""
                if self._marker is not None and self._marker in data:
                    self._marker = None
                    armed.set()
                redis_writer.write(data)
                await redis_writer.drain()

        async def back() -> None:
            while data := await redis_reader.read(1 << 16):
                if armed.is_set():
                    self.lost += 1
                    return
                writer.write(data)
                await writer.drain()

        tasks = [asyncio.create_task(forward()), asyncio.create_task(back())]
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            writer.close()
            redis_writer.close()


@contextlib.asynccontextmanager
async def open_proxy(upstream: Path, path: Path) -> AsyncIterator[Proxy]:
    """Listen on the unix socket `path`."""
    proxy = Proxy(upstream)
    server = await asyncio.start_unix_server(proxy.serve, path)
    try:
        yield proxy
    finally:
        server.close()
