"""A chat endpoint that says what a test wants, and can do what real ones do on bad days."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

import orjson
from aiohttp import web

from tests.consumers.models.faulty_server import listening

Saying = Callable[[dict[str, Any]], str | list[str]]
"""From the body of a request to the texts of its choices, or to a fault: a status, `closes`, or an error in a 200."""


def choice(text: str | None, finish: str = "stop", **message: Any) -> dict[str, Any]:
    return {"index": 0, "message": {"role": "assistant", "content": text, **message}, "finish_reason": finish}


@dataclass
class ChatServer:
    """One server; `bodies` are the requests it got. Without `says`, each vote is `Score: 7`."""

    says: Saying = lambda body: ["Score: 7"] * body.get("n", 1)
    finish: str = "stop"
    usage: int | None = 100
    key: str | None = None
    port: int = 0
    bodies: list[dict[str, Any]] = field(default_factory=list)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    async def handle(self, request: web.Request) -> web.StreamResponse:
        if self.key is not None and request.headers.get("Authorization") != f"Bearer {self.key}":
            return web.json_response({"error": "who are you?"}, status=401)
        body = orjson.loads(await request.read())
        self.bodies.append(body)
        said = self.says(body)
        if isinstance(said, str):
            return await self._fail(said, request)
        answer: dict[str, Any] = {"object": "chat.completion", "choices": [choice(text, self.finish) for text in said]}
        if self.usage is not None:
            answer["usage"] = {"prompt_tokens": 1, "completion_tokens": self.usage - 1, "total_tokens": self.usage}
        return web.json_response(answer)

    async def _fail(self, fault: str, request: web.Request) -> web.StreamResponse:
        if fault == "closes":
            assert request.transport is not None
            request.transport.abort()
        if fault.isdecimal():
            return web.json_response({"error": {"message": f"status {fault}"}}, status=int(fault))
        return web.json_response({"error": {"message": fault}})


@contextlib.asynccontextmanager
async def chatting(
    server: ChatServer, health: Callable[[web.Request], Awaitable[web.StreamResponse]] | None = None
) -> AsyncIterator[ChatServer]:
    """Listen on a free port; `health` answers `GET /v1/models`."""
    app = web.Application(client_max_size=64 << 20)
    if health is not None:
        app.router.add_get("/v1/models", health)
    app.router.add_post("/v1/chat/completions", server.handle)
    async with listening(app) as server.port:
        yield server


@contextlib.asynccontextmanager
async def chats(*says: Saying) -> AsyncIterator[list[ChatServer]]:
    """Several servers at once."""
    async with contextlib.AsyncExitStack() as stack:
        yield [await stack.enter_async_context(chatting(ChatServer(say))) for say in says]
