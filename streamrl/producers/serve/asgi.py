"""The ASGI application around an engine: routes, errors as JSON, who may come in (messages.py lists the routes)."""

from __future__ import annotations

import asyncio
import hmac
import ipaddress
import logging
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import Any, Final, TypeVar, cast

import msgspec
import numpy as np
import orjson
from starlette.applications import Starlette
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from streamrl.engine import Engine
from streamrl.engine import Request as Prompt
from streamrl.errors import DataError, Refused, StreamrlError, Unreachable, WeightsError
from streamrl.producers.serve import messages
from streamrl.producers.serve.deliveries import Deliveries
from streamrl.producers.serve.leases import PauseLeases
from streamrl.producers.serve.streams import ResponseStream

logger = logging.getLogger(__name__)
MAX_BODY: Final = 16 << 20

_M = TypeVar("_M", bound=msgspec.Struct)


class BadMessage(StreamrlError):
    """A request that is no message of ours.

    Attributes:
        status: of HTTP.
    """

    def __init__(self, message: str, hint: str = "", status: int = 400) -> None:
        super().__init__(message, hint)
        self.status = status


class EngineApp:
    """Serves one engine. All of it belongs to one event loop.

    Args:
        engine: started.
        about: what `GET /about` answers.
        deliveries: bring versions of the weights near.
        key: that every request must bear; None: none.
    """

    def __init__(self, engine: Engine, about: Mapping[str, Any], deliveries: Deliveries, key: str | None) -> None:
        self._engine = engine
        self._about = about
        self._deliveries = deliveries
        self._key = key
        self._leases = PauseLeases()
        self._leased = asyncio.Event()
        self._weights = asyncio.Lock()
        self._run = ""

    def app(self) -> ASGIApp:
        """Return the application."""
        calls: Mapping[str, tuple[type[msgspec.Struct], Callable[..., Awaitable[Any]]]] = {
            "/abort": (messages.Abort, self._abort),
            "/pause": (messages.Pause, self._pause),
            "/resume": (messages.Resume, self._resume),
            "/weights/prefetch": (messages.Weights, self._prefetch),
            "/weights/update": (messages.Weights, self._update),
            "/sleep": (messages.Sleep, self._sleep),
            "/wake": (messages.Wake, self._wake),
            "/adapters/load": (messages.LoadAdapter, self._load_adapter),
            "/adapters/unload": (messages.UnloadAdapter, self._unload_adapter),
        }
        looks = {"/about": self._tell, "/ready": self._health, "/health": self._health, "/figures": self._figures}
        routes = [Route(path, _answering(kind, work), methods=["POST"]) for path, (kind, work) in calls.items()]
        routes += [Route(path, _looking(work), methods=["GET"]) for path, work in looks.items()]
        routes.append(Route("/generate", _Generating(self._engine)))
        return _Guard(Starlette(routes=routes, exception_handlers={HTTPException: _no_route}), self._key)

    async def watch_leases(self) -> None:
        """Resume the engine when the last pause has run out; for as long as it is served.

        Raises:
            Unreachable: the engine died.
        """
        loop = asyncio.get_running_loop()
        while True:
            end = self._leases.next_end()
            try:
                async with asyncio.timeout_at(end):
                    await self._leased.wait()
            except TimeoutError:
                pass
            self._leased.clear()
            late = self._leases.expire(loop.time())
            if late:
                logger.warning("who paused the engine is silent: it goes on", extra={"owners": late})
                if not self._leases:
                    await self._engine.resume()

    async def _tell(self, _: Request) -> Mapping[str, Any]:
        return self._about

    async def _health(self, _: Request) -> Mapping[str, Any]:
        await self._engine.health()
        return {"status": "ok"}

    async def _figures(self, request: Request) -> Mapping[str, Any]:
        self._leases.renew(request.query_params.get("owner", ""), asyncio.get_running_loop().time())
        load = self._engine.load()
        return {
            "running": load.running,
            "waiting": load.waiting,
            "cache_use": load.cache_use,
            "tokens_sampled": load.tokens_sampled,
            "preemptions": load.preemptions,
            "busy_seconds": load.busy_seconds,
            "capacity": load.capacity,
            "version": load.version,
            "paused": bool(self._leases),
        }

    async def _abort(self, message: messages.Abort, _: Request) -> Mapping[str, Any]:
        return {"ended": await self._engine.abort(message.id)}

    async def _pause(self, message: messages.Pause, _: Request) -> Mapping[str, Any]:
        loop = asyncio.get_running_loop()
        self._leases.take(message.owner, message.seconds, loop.time())
        self._leased.set()
        await self._engine.pause(message.mode)
        self._leases.renew(message.owner, loop.time())
        return {}

    async def _resume(self, message: messages.Resume, _: Request) -> Mapping[str, Any]:
        self._leases.give_back(message.owner)
        if not self._leases:
            await self._engine.resume()
        return {"paused": bool(self._leases)}

    async def _prefetch(self, message: messages.Weights, request: Request) -> Mapping[str, Any]:
        async with self._weights:
            self._check_run(message)
            await self._deliveries.prefetch(message, same_host=_same_host(request))
        return {}

    async def _update(self, message: messages.Weights, request: Request) -> Mapping[str, Any]:
        async with self._weights:
            self._check_run(message)
            await self._engine.apply(await self._deliveries.take(message, same_host=_same_host(request)))
            self._run = message.run
        return {"version": self._engine.load().version}

    def _check_run(self, message: messages.Weights) -> None:
        if self._run not in {"", message.run}:
            raise WeightsError(
                f"this server holds weights of run {self._run!r}, these are of {message.run!r}",
                "a server serves one run: start it again for another",
            )

    async def _sleep(self, message: messages.Sleep, _: Request) -> Mapping[str, Any]:
        await self._engine.sleep(cast("Any", message.level))
        return {}

    async def _wake(self, message: messages.Wake, _: Request) -> Mapping[str, Any]:
        await self._engine.wake(message.tags)
        return {}

    async def _load_adapter(self, message: messages.LoadAdapter, _: Request) -> Mapping[str, Any]:
        try:
            await self._engine.load_adapter(message.name, Path(message.folder))
        except Refused as error:
            # what says "not a thing of this server" to any client
            raise BadMessage(error.message, error.hint, 405) from error
        return {}

    async def _unload_adapter(self, message: messages.UnloadAdapter, _: Request) -> Mapping[str, Any]:
        await self._engine.unload_adapter(message.name)
        return {}


class _Generating:
    """`POST /generate`."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["method"] != "POST":
            await failure(BadMessage("POST it", status=405))(scope, receive, send)
            return
        try:
            message = await _read(Request(scope, receive), messages.Generate)
        except ClientDisconnect:
            return
        except BadMessage as error:
            await failure(error)(scope, receive, send)
            return
        prompt = Prompt(
            message.id,
            np.asarray(message.tokens, dtype=np.int32),
            message.max_new_tokens,
            message.temperature,
            message.adapter,
        )
        response = ResponseStream(self._engine, prompt, message.interval)
        try:
            refusal = await response.refusal()
            if refusal is None:
                await response.run(receive, send, describe)
            else:
                await failure(refusal)(scope, receive, send)
        finally:
            await response.cancel()


class _Guard:
    """Turns away who does not bear the key, browsers, and bodies that are too large."""

    def __init__(self, app: ASGIApp, key: str | None) -> None:
        self._app = app
        self._expected = None if key is None else f"Bearer {key}".encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and (problem := self._problem(Headers(scope=scope), scope["method"])):
            await failure(problem)(scope, receive, send)
            return
        await self._app(scope, receive, send)

    def _problem(self, headers: Headers, method: str) -> BadMessage | None:
        if self._expected is None:
            # any page that a browser on this machine shows can send requests to a port of it
            if "origin" in headers:
                return BadMessage("no requests of web pages without a key", "start it with --api-key-file", 403)
        elif not hmac.compare_digest(headers.get("authorization", "").encode(), self._expected):
            return BadMessage("the key is missing or wrong", "send it as a bearer token", 401)
        if method == "POST" and headers.get("content-type", "").partition(";")[0].strip() != "application/json":
            return BadMessage("the body must be application/json", status=415)
        length = headers.get("content-length", "0")
        if not length.isdecimal() or int(length) > MAX_BODY:
            return _too_large()
        return None


def _answering(kind: type[_M], work: Callable[[_M, Request], Awaitable[Any]]) -> Callable[..., Awaitable[Response]]:
    async def endpoint(request: Request) -> Response:
        try:
            return _json(await work(await _read(request, kind), request))
        except Exception as error:  # noqa: BLE001 - the client reads it
            return failure(error)

    return endpoint


def _looking(work: Callable[[Request], Awaitable[Any]]) -> Callable[..., Awaitable[Response]]:
    async def endpoint(request: Request) -> Response:
        try:
            return _json(await work(request))
        except Exception as error:  # noqa: BLE001 - the client reads it
            return failure(error)

    return endpoint


async def _read(request: Request, kind: type[_M]) -> _M:
    body = bytearray()
    async for data in request.stream():
        body += data
        if len(body) > MAX_BODY:
            raise _too_large()
    try:
        return msgspec.json.decode(body, type=kind)
    except (msgspec.DecodeError, RecursionError) as error:
        raise BadMessage(f"not a message for {request.url.path}: {error}") from error


def describe(error: Exception) -> dict[str, Any]:
    """Return the event or body that says what went wrong."""
    kind, _ = _meaning(error)
    if kind == "internal":
        logger.error("a request failed for a reason of our own", exc_info=error)
    message = error.message if isinstance(error, StreamrlError) else f"{type(error).__name__}: {error}"
    hint = error.hint if isinstance(error, StreamrlError) else ""
    return {"error": {"kind": kind, "message": message, "hint": hint}}


def failure(error: Exception) -> Response:
    """Return the answer that says what went wrong."""
    return _json(describe(error), _meaning(error)[1])


def _meaning(error: Exception) -> tuple[messages.ErrorKind, int]:
    if isinstance(error, BadMessage):
        return ("forbidden" if error.status in {401, 403} else "request"), error.status
    if isinstance(error, DataError):
        return "data", 400
    if isinstance(error, WeightsError):
        return "weights", 422
    if isinstance(error, Refused):
        return "refused", 409
    if isinstance(error, Unreachable):
        return "dead", 500
    if isinstance(error, ValueError) and not isinstance(error, StreamrlError):
        return "request", 409  # a request of this id is in flight
    return "internal", 500


async def _no_route(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    return failure(BadMessage(f"{request.method} {request.url.path}: {error.detail}", status=error.status_code))


def _json(body: Any, status: int = 200) -> Response:
    return Response(orjson.dumps(body), status, media_type="application/json")


def _too_large() -> BadMessage:
    return BadMessage(f"a body of more than {MAX_BODY} bytes", status=413)


def _same_host(request: Request) -> bool:
    """Whether the client is on this host: it came over loopback, or from the very address that it came to."""
    if request.client is None:
        return False
    try:
        loopback = ipaddress.ip_address(request.client.host).is_loopback
    except ValueError:
        return False
    server = request.scope.get("server")
    return loopback or (server is not None and server[0] == request.client.host)
