"""`streamrl engines serve` as a real process, and clients of it."""

from __future__ import annotations

import asyncio
import itertools
import os
import signal
import socket
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np
import orjson

from streamrl.config import RunConfig
from streamrl.producers.engines import Completion, Request
from streamrl.producers.group.server import ServerEngine
from streamrl.servers.native import NativeDialect
from streamrl.weight_sync.tensors import Version
from tests.engines import tiny

KEY = "a-key-that-only-tests-know"


def free_port() -> int:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        return int(taken.getsockname()[1])


class Served:
    """A server process."""

    def __init__(self, model: Path, log: Path, *arguments: str, key: Path | None = None, **environ: str) -> None:
        self.model, self.key = model, key
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.log = log
        argv = [sys.executable, "-m", "streamrl", "engines", "serve", str(model), "--port", str(self.port)]
        argv += ["--set", "engine.threads=1", "--set", "engine.device=cpu", "--set", "model.context=512", *arguments]
        argv += ["--no-api-key"] if key is None else ["--api-key-file", str(key)]
        with log.open("wb") as output:
            self.process = subprocess.Popen(
                argv,
                stdout=output,
                stderr=subprocess.STDOUT,
                env=os.environ | {"HF_HUB_OFFLINE": "1"} | environ,
                start_new_session=True,
            )

    async def ready(self) -> None:
        async with asyncio.timeout(100), aiohttp.ClientSession() as session:
            while True:
                assert self.process.poll() is None, self.log.read_text()
                try:
                    async with session.get(self.url + "/ready", headers=self.headers):
                        return
                except aiohttp.ClientError:
                    await asyncio.sleep(0.05)

    @property
    def headers(self) -> dict[str, str]:
        return {} if self.key is None else {"Authorization": f"Bearer {KEY}"}

    def config(self, **changes: Any) -> RunConfig:
        values: dict[str, Any] = {
            "name": "mine",
            "model": {"path": str(self.model), "context": 512},
            "engine": {"kind": "hf", "url": [self.url], "api_key_file": self.key, "stream_interval": 4},
            "weights": {"deadline": 30},
        }
        for name, section in changes.items():
            values[name] = values.get(name, {}) | section
        return RunConfig.model_validate(values)

    @asynccontextmanager
    async def engine(self, **changes: Any) -> AsyncIterator[ServerEngine]:
        config = self.config(**changes)
        made = ServerEngine(NativeDialect(config), config, url=self.url)
        try:
            await made.start()
            yield made
        finally:
            await made.close()

    async def wait_end(self) -> int:
        return await asyncio.to_thread(self.process.wait, 60)

    def kill(self) -> None:
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()


TOKEN = "the token of the weights"


@asynccontextmanager
async def serving(folder: Path) -> AsyncIterator[Served]:
    """A server with a key and with the token of the weights, on a tiny model."""
    tiny.make_model(folder / "model")
    (folder / "key").write_text(KEY)
    (folder / "token").write_text(TOKEN)
    server = Served(
        folder / "model", folder / "log", key=folder / "key", STREAMRL_WEIGHTS_TOKEN_FILE=str(folder / "token")
    )
    try:
        await server.ready()
        yield server
    finally:
        server.kill()


class Versions:
    """Makes versions with growing numbers, for a server that is shared by many tests."""

    def __init__(self) -> None:
        self._numbers = itertools.count(1)

    def number(self) -> int:
        return next(self._numbers)

    def make(self, folder: Path, seed: int) -> tuple[Version, Any]:
        """A version in files, and its model."""
        weights = tiny.random_weights(seed)
        return tiny.make_version(folder, self.number(), weights), tiny.build(weights)


def completion_of(events: Sequence[Any]) -> Completion:
    """What the events of a response say."""
    last = events[-1]
    return Completion(
        np.asarray([token for event in events for token in event["tokens"]], np.int32),
        np.asarray([value for event in events for value in event["logprobs"]], np.float32),
        [(first, number) for first, number in last["runs"]],
        last["finish"],
        last["prompt_tokens"],
        0.0,
    )


class Client:
    """Raw HTTP."""

    def __init__(self, served: Served, session: aiohttp.ClientSession) -> None:
        self._url, self.session = served.url, session

    async def post(self, path: str, body: Any, **options: Any) -> tuple[int, Any]:
        async with self.session.post(self._url + path, json=body, **options) as response:
            return response.status, await response.json()

    async def get(self, path: str, **options: Any) -> tuple[int, Any]:
        async with self.session.get(self._url + path, **options) as response:
            return response.status, await response.json()

    @asynccontextmanager
    async def stream(self, name: str, limit: int = 450, **more: Any) -> AsyncIterator[AsyncIterator[Any]]:
        """Ask for a response; its events."""
        body = {"id": name, "tokens": [9, 10, 11], "max_new_tokens": limit, **more}
        async with self.session.post(self._url + "/generate", json=body) as response:
            assert response.status == 200, await response.text()
            yield _events(response)

    async def figures(self, owner: str = "") -> Any:
        return (await self.get("/figures", params={"owner": owner}))[1]

    async def until(self, condition: Callable[[Any], bool]) -> None:
        async with asyncio.timeout(60):
            while not condition(await self.figures()):  # noqa: ASYNC110 - the server tells nobody
                await asyncio.sleep(0.02)


async def _events(response: aiohttp.ClientResponse) -> AsyncIterator[Any]:
    async for line in response.content:
        if line.startswith(b"data: "):
            yield orjson.loads(line[6:])


@asynccontextmanager
async def client_of(served: Served) -> AsyncIterator[Client]:
    async with aiohttp.ClientSession(headers=served.headers) as session:
        yield Client(served, session)


async def caught(client: Client, attempts: int = 20) -> tuple[str, Any, list[Any]]:
    """A response that was paused in mid-flight by `owner`, its open stream, and what came before."""
    for attempt in range(attempts):
        name = f"caught{attempt}-{os.urandom(4).hex()}"
        stream = client.stream(name)
        events = await stream.__aenter__()
        first = [await anext(events)]
        await client.post("/pause", {"owner": "catcher", "seconds": 600})
        if (await client.figures())["running"]:
            return name, (stream, events), first
        await client.post("/resume", {"owner": "catcher"})
        await stream.__aexit__(None, None, None)
    raise AssertionError("every response ended before the pause")


def request(name: str, length: int = 3, limit: int = 20, seed: int = 0) -> Request:
    tokens = np.random.default_rng(seed).integers(8, 320, length).astype(np.int32)
    return Request(name, tokens, limit)
