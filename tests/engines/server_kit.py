"""A real server, spoken to with its dialect alone: tests do to it what no engine would do."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from streamrl.config import RunConfig
from streamrl.engine import Completion, PauseMode, Request
from streamrl.http import Call, HttpClient
from streamrl.servers.dialect import Dialect
from streamrl.servers.kinds import make_dialect
from streamrl.servers.process import ManagedServer, ServerSettings
from streamrl.weight_sync.tensors import Version
from tests.engines.conformance_kit import Heard

_names = itertools.count()


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
        """Sample one response. No name comes twice: SGLang aborts by name two seconds after a response has ended."""
        heard = heard or Heard()
        request = Request(name or f"request {next(_names)}", np.asarray(tokens, np.int32), limit)
        logprobs: list[float] = []
        finish, runs, prompt_tokens = None, None, 0
        async for event in self.client.stream(self.dialect.generation(request, version=version), 60):
            chunk = self.dialect.chunk(event, received=len(heard.tokens))
            heard(chunk.tokens, chunk.logprobs)
            logprobs += chunk.logprobs
            finish, runs = chunk.finish or finish, runs if chunk.runs is None else chunk.runs
            prompt_tokens = chunk.prompt_tokens or prompt_tokens
        assert finish is not None
        assert runs is not None
        ids, values = np.asarray(heard.tokens, np.int32), np.asarray(logprobs, np.float32)
        return Completion(ids, values, runs, finish, prompt_tokens, 0.0)

    async def begin(
        self, tokens: Sequence[int], limit: int, version: int, *, name: str = "", count: int = 20
    ) -> tuple[asyncio.Task[Completion], Heard]:
        """A request of which `count` tokens have been heard, and what is heard of it."""
        heard = Heard()
        task = asyncio.create_task(self.generate(tokens, limit, version, name=name, heard=heard))
        await heard.at_least(count)
        return task, heard

    async def apply(self, version: Version, mode: PauseMode = "keep") -> None:
        """As an engine would: look first, and stand still only for the replacement."""
        await self.calls(self.dialect.prefetch(version))
        await self.calls(self.dialect.pause(mode))
        try:
            await self.calls(self.dialect.update(version))
        finally:
            await self.calls(self.dialect.resume())


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
