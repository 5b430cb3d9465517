"""A server of a reward model that can do what real ones do on bad days. It speaks as vLLM's `/classify` does."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import orjson
from aiohttp import web

Act = str | Callable[[list[int]], str]
"""What the server does: a name of below, or a function of the token ids that returns one."""


def score_of(ids: Sequence[int]) -> float:
    """What a well server answers."""
    return round(sum((place + 1) * token for place, token in enumerate(ids)) % 1000 / 100, 4)


def answer_of(ids: Sequence[int]) -> dict[str, Any]:
    score = score_of(ids)
    return {"object": "list", "data": [{"index": 0, "label": "LABEL_0", "probs": [score], "num_classes": 1}]}


@dataclass
class FaultyServer:
    """One server.

    `acts` are taken one after the other, the last for ever. `asked` are the token ids of each request, `bodies` its
    whole body, `most` is how many were here at the same time. A request that hangs waits for `let_go`.
    """

    acts: list[Act] = field(default_factory=lambda: ["well"])
    port: int = 0
    key: str | None = None
    asked: list[list[int]] = field(default_factory=list)
    bodies: list[dict[str, Any]] = field(default_factory=list)
    here: int = 0
    most: int = 0
    let_go: asyncio.Event = field(default_factory=asyncio.Event)
    arrived: asyncio.Condition = field(default_factory=asyncio.Condition)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    async def has(self, count: int) -> None:
        """Wait until so many requests have come, ever."""
        async with asyncio.timeout(60), self.arrived:
            await self.arrived.wait_for(lambda: len(self.asked) >= count)

    async def handle(self, request: web.Request) -> web.StreamResponse:
        if self.key is not None and request.headers.get("Authorization") != f"Bearer {self.key}":
            return web.json_response({"error": "Unauthorized"}, status=401)
        body = orjson.loads(await request.read())
        ids = body.get("input") or body.get("input_ids") or []
        ids = list(ids.encode()) if isinstance(ids, str) else ids
        async with self.arrived:
            self.asked.append(ids)
            self.bodies.append(body)
            self.arrived.notify_all()
        act = self.acts[0] if len(self.acts) == 1 else self.acts.pop(0)
        self.here += 1
        self.most = max(self.most, self.here)
        try:
            return await self._act(act if isinstance(act, str) else act(ids), request, ids)
        finally:
            self.here -= 1

    async def health(self, _: web.Request) -> web.Response:
        return web.Response()

    async def _act(self, act: str, request: web.Request, ids: list[int]) -> web.StreamResponse:
        whole = orjson.dumps(answer_of(ids))
        match act:
            case "well":
                return web.Response(body=whole, content_type="application/json")
            case "text":
                return web.Response(body=whole, content_type="text/plain")
            case "held" | "hangs":
                await self.let_go.wait()
                return web.Response(body=whole, content_type="application/json")
            case "busy":
                return web.json_response({"error": "too many"}, status=429, headers={"Retry-After": "0.2"})
            case "closes":
                assert request.transport is not None
                request.transport.abort()
                return web.Response()
            case "half":
                return await self._broken_off(request, whole)
            case "echoes":
                sent = request.headers.get("Authorization")
                return web.json_response({"object": "error", "message": f"no such key: {sent}"})
            case _ if act.isdecimal():
                return web.json_response({"error": {"message": f"status {act}"}}, status=int(act))
        return web.Response(body=ODD[act], content_type="application/json")

    async def _broken_off(self, request: web.Request, whole: bytes) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "application/json", "Content-Length": str(len(whole))})
        await response.prepare(request)
        await response.write(whole[: len(whole) // 2])
        assert request.transport is not None
        request.transport.close()
        return response


ODD: dict[str, bytes] = {
    "half json": b'{"data": [{"probs": [0.2',
    "nan": b'{"data": [{"probs": [NaN]}]}',
    "null": b'{"data": [{"probs": [null]}]}',
    "text": b'{"data": [{"probs": ["0.5"]}]}',
    "true": b'{"data": [{"probs": [true]}]}',
    "huge number": b'{"data": [{"probs": [1e999]}]}',
    "no data": b'{"data": []}',
    "other data": b'{"data": [{"probs": [0.1]}, {"probs": [0.2]}]}',
    "wrong shape": b'{"data": {"probs": 0.5}}',
    "no list": b'{"data": [{"probs": 0.5}]}',
    "empty list": b'{"data": [{"probs": []}]}',
    "a list": b"[0.5]",
    "several": b'{"data": [{"probs": [0.1, 0.9]}]}',
    "error in 200": b'{"object": "error", "message": "out of memory"}',
    "too long": b'{"data": [{"probs": [0.5]}], "rest": "' + b"x" * (1 << 20) + b'"}',
}
"""Answers with status 200 that are no score."""


@contextlib.asynccontextmanager
async def listening(app: web.Application, port: int = 0) -> AsyncIterator[int]:
    """Serve an application on a free port, or on this one; yields the port."""
    runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", port).start()
    try:
        yield runner.addresses[0][1]
    finally:
        await runner.cleanup()


@contextlib.asynccontextmanager
async def serving(server: FaultyServer) -> AsyncIterator[FaultyServer]:
    """Listen on a free port, or on the one the server had before."""
    app = web.Application(client_max_size=64 << 20)
    app.router.add_post("/classify", server.handle)
    app.router.add_get("/health", server.health)
    async with listening(app, server.port) as server.port:
        try:
            yield server
        finally:
            server.let_go.set()


@contextlib.asynccontextmanager
async def gone(*acts: Act) -> AsyncIterator[FaultyServer]:
    """A server that is away, with a port of its own."""
    one = FaultyServer(list(acts or ["well"]))
    async with serving(one):
        pass
    yield one


@contextlib.asynccontextmanager
async def servers(*acts: Sequence[Act]) -> AsyncIterator[list[FaultyServer]]:
    """Several servers at once."""
    async with contextlib.AsyncExitStack() as stack:
        yield [await stack.enter_async_context(serving(FaultyServer(list(act)))) for act in acts]
