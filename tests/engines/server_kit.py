"""A real server, spoken to with its dialect alone: tests do to it what no engine would do."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import uuid
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import psutil

from streamrl.config import RunConfig
from streamrl.engine import Completion, Request
from streamrl.http import Call, HttpClient
from streamrl.servers.dialect import BUSY, Dialect
from streamrl.servers.kinds import make_dialect
from streamrl.servers.process import ManagedServer, ServerSettings
from streamrl.weight_sync.tensors import Version
from tests.engines.conformance_kit import Heard, run_config

ROOT = Path(__file__).parents[2]
MARK = "OWNER_OF_TEST"
OWNER = """
import asyncio, sys
sys.path.insert(0, {root!r})
from tests.engines.{kit} import managed

async def main():
    print(await managed(*{arguments!r}).start(), flush=True)
    await asyncio.sleep(3600)

asyncio.run(main())
"""


@dataclass
class Live:
    """One running server."""

    dialect: Dialect
    client: HttpClient

    async def calls(self, calls: Sequence[Call]) -> list[Any]:
        """Send each call once, after the success of the one before."""
        return [await self.client.call(call, 60, retry=False) for call in calls]

    async def generate(
        self, tokens: Sequence[int], limit: int, version: int, *, name: str = "", heard: Heard | None = None
    ) -> Completion:
        """Sample one response. A name comes once and begins no other: SGLang aborts all names that begin with one."""
        heard = heard or Heard()
        request = Request(name or uuid.uuid4().hex, np.asarray(tokens, np.int32), limit)
        logprobs: list[float] = []
        finish, runs = None, None
        async for event in self.client.stream(self.dialect.generation(request, version=version, salt="live"), 60):
            chunk = self.dialect.chunk(event, received=len(heard.tokens))
            heard(chunk.tokens, chunk.logprobs)
            logprobs += chunk.logprobs
            finish, runs = chunk.finish or finish, runs if chunk.runs is None else chunk.runs
        assert finish is not None
        assert runs is not None
        ids, values = np.asarray(heard.tokens, np.int32), np.asarray(logprobs, np.float32)
        return Completion(ids, values, runs, finish, 0.0)

    async def begin(
        self, tokens: Sequence[int], limit: int, version: int, *, name: str = "", count: int = 20
    ) -> tuple[asyncio.Task[Completion], Heard]:
        """A request of which `count` tokens have been heard, and what is heard of it."""
        heard = Heard()
        task = asyncio.create_task(self.generate(tokens, limit, version, name=name, heard=heard))
        await heard.at_least(count)
        return task, heard

    async def prefetch(self, version: Version) -> str:
        """Have it fetch and check; what it says against the version, empty when nothing."""
        while True:
            answers = await self.calls(self.dialect.prefetch(version))
            said = "; ".join(filter(None, map(self.dialect.read_prefetch, answers)))
            if said != BUSY:
                return said
            await asyncio.sleep(0.05)

    async def apply(self, version: Version) -> None:
        """As an engine would: look first, and stand still only for the replacement."""
        assert not await self.prefetch(version)
        await self.calls(self.dialect.pause)
        try:
            await self.calls(self.dialect.update(version, str(version.number)))
        finally:
            await self.calls(self.dialect.resume)


@dataclass
class Owned:
    """A server that another process has started, which stands for a role."""

    url: str
    owner: asyncio.subprocess.Process
    mark: str

    def processes(self) -> list[str]:
        """What there is of the server."""
        found = []
        for process in psutil.process_iter():
            with suppress(psutil.Error):
                ours = process.environ().get(MARK) == self.mark and process.pid != self.owner.pid
                if ours and process.status() != psutil.STATUS_ZOMBIE:
                    found.append(f"{process.pid} {process.name()}")
        return found

    async def all_gone(self) -> None:
        """Wait until nothing of it is left."""
        async with asyncio.timeout(30):
            while self.processes():  # noqa: ASYNC110 - nobody tells when a process has gone
                await asyncio.sleep(0.05)


@asynccontextmanager
async def owned(kit: str, log: Path, *arguments: str) -> AsyncIterator[Owned]:
    """The server that `managed` of a kit makes of these arguments, by a process of its own."""
    code = OWNER.format(root=str(ROOT), kit=kit, arguments=arguments)
    environ = {**os.environ, MARK: str(log)}
    command = [sys.executable, "-c", code]
    owner = await asyncio.create_subprocess_exec(*command, stdout=subprocess.PIPE, env=environ)
    try:
        assert owner.stdout is not None
        url = (await asyncio.wait_for(owner.stdout.readline(), 900)).decode().strip()
        assert url, log.read_text()[-3000:]
        yield Owned(url, owner, str(log))
    finally:
        if owner.returncode is None:
            owner.kill()
        await owner.wait()


def managed(kind: str, folder: str, engine: str) -> ManagedServer:
    """A server of a run, not yet started; `engine` is JSON, the further keys of that section."""
    config = run_config(kind, Path(folder), **json.loads(engine))
    return ManagedServer(make_dialect(config), ServerSettings.of_engine(config), Path(folder), "server", seed=7)


@asynccontextmanager
async def served(config: RunConfig, folder: Path) -> AsyncIterator[Live]:
    """A server that lives as long as the block."""
    dialect = make_dialect(config)
    server = ManagedServer(dialect, ServerSettings.of_engine(config), folder, "server", seed=7)
    client = HttpClient(await server.start())
    try:
        yield Live(dialect, client)
    finally:
        await client.close()
        await server.stop()
