"""`AgentEndpoint`: the HTTP server of a replica's agents.

```
POST /v1/chat/completions     OpenAI, streaming and not            chat_completions.py
POST /v1/responses            OpenAI, streaming and not            responses.py
POST /v1/messages             Anthropic, streaming and not         anthropic.py
POST /v1/messages/count_tokens
GET  /v1/models
POST /v1/streamrl/reward      {"reward": 0.5} for the episode; with "turn": N for a sampled turn
```
The key of a request (`Authorization: Bearer KEY`, or `x-api-key`) says which sample it belongs to. A streamed answer is
sampled first, and then sent as its events; until then comments keep clients and proxies from taking it for dead.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from typing import Any, Final

import msgspec
import orjson
from aiohttp import web

from streamrl.errors import DataError
from streamrl.listening import listen
from streamrl.producers.episodes.clock import EpisodeOver
from streamrl.producers.episodes.endpoint.anthropic import AnthropicMessages
from streamrl.producers.episodes.endpoint.calls import MODEL, OVERFLOW, AgentApi, CallRefused, decoded, event
from streamrl.producers.episodes.endpoint.chat_completions import ChatCompletions
from streamrl.producers.episodes.endpoint.door import AgentDoor, Gone, PendingCall
from streamrl.producers.episodes.endpoint.responses import Responses
from streamrl.producers.episodes.session import ContextOverflow, SampledTurn

logger = logging.getLogger(__name__)
MAX_REWARD_BYTES: Final = 1 << 12
_READ_SECONDS: Final = 30.0
_PING_SECONDS: Final = 5.0
_STREAM: Final = {"Content-Type": "text/event-stream; charset=utf-8", "Cache-Control": "no-store"}
_REMEMBERED: Final = 4096  # keys of ended samples that are told apart from wrong ones
_Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class _Reward(msgspec.Struct, forbid_unknown_fields=True):
    reward: float
    turn: int | None = None


class AgentEndpoint:
    """Made in `open`, which serves for as long as its block; `url` has no path."""

    def __init__(self) -> None:
        self.url = ""
        self._doors: dict[str, AgentDoor] = {}
        self._ended: deque[str] = deque(maxlen=_REMEMBERED)

    @classmethod
    @contextlib.asynccontextmanager
    async def open(cls, host: str) -> AsyncIterator[AgentEndpoint]:
        """Serve on a free port of `host`. CannotCreate: it cannot listen there."""
        endpoint = cls()
        hint = "set episode.agent.host to an address of this host"
        async with listen(endpoint._app(), host, 0, what="agents", hint=hint) as url:
            endpoint.url = url
            yield endpoint

    @contextlib.contextmanager
    def serving(self, door: AgentDoor) -> Iterator[str]:
        key = f"sk-streamrl-{secrets.token_urlsafe(24)}"
        self._doors[key] = door
        try:
            yield key
        finally:
            del self._doors[key]
            self._ended.append(key)

    def _app(self) -> web.Application:
        app = web.Application(middlewares=[_explain])
        for path, api in _APIS.items():
            app.router.add_post(path, self._count if path == _COUNT else self._asking(api))
        app.router.add_get("/v1/models", self._models)
        app.router.add_get("/v1/models/{name:.+}", self._models)
        app.router.add_post("/v1/streamrl/reward", self._reward)
        return app

    def _door(self, request: web.Request) -> AgentDoor:
        """The sample of a request, which is found before its body is read. Either header may hold its key."""
        scheme, _, token = request.headers.get("Authorization", "").partition(" ")
        keys = (token.strip() if scheme.lower() == "bearer" else "", request.headers.get("x-api-key", ""))
        for key in keys:
            if key in self._doors:
                return self._doors[key]
        if any(key in self._ended for key in keys):
            raise CallRefused(410, "the episode of this key has ended", "episode_over")
        logger.warning("agent endpoint asked with a wrong key", extra={"peer": request.remote})
        raise CallRefused(401, "the API key is missing or wrong: use OPENAI_API_KEY", "invalid_api_key")

    def _asking(self, api: AgentApi) -> _Handler:
        async def answer(request: web.Request) -> web.StreamResponse:
            door, gone = self._door(request), _gone(request)
            async with door.place(gone):
                body = await _body(request, door.most_bytes)
                call = api.read(body, door.ignored)
                asked = door.ask(call, request.path.encode() + b"\n" + body, request.headers, gone)
                stream = web.StreamResponse(headers=_STREAM)
                while not (await asyncio.wait([asked.task], timeout=_PING_SECONDS if call.stream else None))[0]:
                    with contextlib.suppress(ConnectionError):
                        await stream.prepare(request)
                        await stream.write(api.ping)
            try:
                turns = _turns(asked)
            except CallRefused as refused:
                if not stream.prepared:
                    raise
                with contextlib.suppress(ConnectionError):
                    await stream.write_eof(event(api.error(refused), "error"))
                return stream
            said = api.answer(call, turns, f"{door.name}-{turns[0].number}")
            response = stream if call.stream else _answer(said)
            with contextlib.suppress(ConnectionError):  # the client has left, and may ask again
                await response.prepare(request)
                await response.write_eof(b"".join(api.events(call, said)) if call.stream else b"")
                asked.heard = True
            return response

        return answer

    async def _count(self, request: web.Request) -> web.StreamResponse:
        door = self._door(request)
        async with door.place(_gone(request)):
            body = await _body(request, door.most_bytes)
            return _answer({"input_tokens": await door.count(_APIS[_COUNT].read(body, door.ignored), body)})

    async def _models(self, request: web.Request) -> web.StreamResponse:
        self._door(request)
        name = request.match_info.get("name")
        model = {"id": name or MODEL, "object": "model", "created": 0, "owned_by": "streamrl"}
        return _answer(model if name else {"object": "list", "data": [model]})

    async def _reward(self, request: web.Request) -> web.StreamResponse:
        door = self._door(request)
        asked = decoded(await _body(request, MAX_REWARD_BYTES), _Reward)
        door.reward(asked.reward, asked.turn)
        return _answer({"object": "reward"})


_COUNT: Final = "/v1/messages/count_tokens"
_APIS: Final[dict[str, AgentApi]] = {
    "/v1/chat/completions": ChatCompletions(),
    "/v1/responses": Responses(),
    "/v1/messages": AnthropicMessages(),
    _COUNT: AnthropicMessages(),
}


def _turns(asked: PendingCall) -> list[SampledTurn]:
    if asked.task.cancelled():
        raise CallRefused(410, "the episode of this key has ended", "episode_over")
    try:
        return asked.task.result()
    except ContextOverflow as over:
        raise CallRefused(400, over.message, OVERFLOW) from over
    except EpisodeOver as over:
        raise CallRefused(410, over.message, "episode_over") from over
    except DataError as error:
        raise CallRefused(400, error.message) from error
    except Exception as error:
        raise CallRefused(503, f"the policy cannot answer: {type(error).__name__}", "engine_failed") from error


def _gone(request: web.Request) -> Gone:
    transport = request.transport  # not the request, which holds its body
    return lambda: transport is None or transport.is_closing()


async def _body(request: web.Request, most: int) -> bytes:
    try:
        async with asyncio.timeout(_READ_SECONDS):
            return await request.clone(client_max_size=most).read()
    except web.HTTPRequestEntityTooLarge as error:
        raise CallRefused(413, f"the body may have at most {most} bytes", "too_large") from error
    except TimeoutError as error:
        raise CallRefused(408, f"the body did not come within {_READ_SECONDS:g} s", "slow") from error


@web.middleware
async def _explain(request: web.Request, handler: _Handler) -> web.StreamResponse:
    try:
        return await handler(request)
    except CallRefused as error:
        refused = error
    except DataError as error:
        refused = CallRefused(400, error.message)
    except web.HTTPException as error:
        refused = CallRefused(error.status, f"{request.method} {request.path}: {error.reason}", "not_found")
    except Exception:
        logger.exception("the agent endpoint failed at a request", extra={"path": request.path})
        refused = CallRefused(500, "the endpoint failed; the log of the replica says why", "internal")
    api = _APIS.get(request.path, _APIS["/v1/chat/completions"])
    headers = {"WWW-Authenticate": "Bearer"} if refused.status == 401 else {}
    return _answer(api.error(refused), refused.status, headers)


def _answer(data: Any, status: int = 200, headers: dict[str, str] | None = None) -> web.Response:
    return web.Response(
        body=orjson.dumps(data),
        status=status,
        content_type="application/json",
        headers={"Cache-Control": "no-store", **(headers or {})},
    )
