"""An engine as an HTTP application: routes, errors as JSON, access control (messages.py lists the routes)."""

from __future__ import annotations

import asyncio
import hmac
import ipaddress
import logging
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Final, TypeAlias, TypeVar

import msgspec
import numpy as np
import orjson
from aiohttp import web
from typing_extensions import override

from streamrl.engine import Completion, Listener, Request, StreamingEngine
from streamrl.errors import DataError, Refused, StreamrlError, Unreachable, WeightsError
from streamrl.producers.serve import messages
from streamrl.producers.serve.deliveries import Deliveries

logger = logging.getLogger(__name__)
MAX_BODY: Final = 16 << 20

_M = TypeVar("_M", bound=msgspec.Struct)
Handler: TypeAlias = Callable[[web.Request], Awaitable[web.StreamResponse]]
Generate: TypeAlias = Callable[[Request, Listener], Coroutine[Any, Any, Completion]]


class BadMessage(StreamrlError):
    """A request that is not a valid message; `status` is that of HTTP."""

    def __init__(self, message: str, hint: str = "", status: int = 400) -> None:
        super().__init__(message, hint)
        self.status = status


@dataclass(slots=True)
class _Lease:
    seconds: float
    end: float


class PauseLeases:
    """Pauses by owner. The engine stands still while any owner holds one."""

    def __init__(self) -> None:
        self._leases: dict[str, _Lease] = {}

    def __bool__(self) -> bool:
        return bool(self._leases)

    def take(self, owner: str, seconds: float, now: float) -> None:
        """Hold a pause until `seconds` after the last request of its owner; a repeat starts anew."""
        self._leases[owner] = _Lease(seconds, now + seconds)

    def renew(self, owner: str, now: float) -> None:
        """Extend the pause of an owner that has sent a request; no-op without a pause."""
        lease = self._leases.get(owner)
        if lease is not None:
            lease.end = now + lease.seconds

    def give_back(self, owner: str) -> None:
        self._leases.pop(owner, None)

    def expire(self, now: float) -> list[str]:
        late = [owner for owner, lease in self._leases.items() if lease.end <= now]
        for owner in late:
            del self._leases[owner]
        return late

    def next_end(self) -> float | None:
        return min((lease.end for lease in self._leases.values()), default=None)


class _Unsent:
    """Tokens that a request has sampled and its client has not been sent."""

    def __init__(self, interval: int) -> None:
        self.due = asyncio.Event()
        self.sent = 0
        self._interval = interval
        self._tokens: list[int] = []
        self._logprobs: list[float] = []

    def hear(self, tokens: Sequence[int], logprobs: Sequence[float]) -> None:
        self._tokens += tokens
        self._logprobs += logprobs
        if len(self._tokens) >= self._interval:
            self.due.set()

    def take(self) -> dict[str, Any] | None:
        self.due.clear()
        if len(self._tokens) < self._interval:
            return None
        event = {"tokens": self._tokens, "logprobs": self._logprobs}
        self.sent += len(self._tokens)
        self._tokens, self._logprobs = [], []
        return event

    def last(self, done: Completion) -> dict[str, Any]:
        return {
            "tokens": done.tokens[self.sent :].tolist(),
            # as float64, so that JSON keeps the exact float32
            "logprobs": done.logprobs[self.sent :].astype(float).tolist(),
            "finish": done.finish,
            "runs": done.runs,
            "prompt_tokens": done.prompt_tokens,
            "cached_tokens": done.cached_tokens,
        }


class GenerationApp:
    """Serves generation alone; every request must bear `key`. All of it belongs to one event loop.

    `generate` samples one response, and may tell the listener of tokens while it does.
    """

    def __init__(self, generate: Generate, key: str | None) -> None:
        self._sample = generate
        self._expected = None if key is None else f"Bearer {key}".encode()

    def app(self) -> web.Application:
        """Return the application; its handlers have to be cancelled when their client leaves."""
        app = web.Application(middlewares=[self._guard], client_max_size=MAX_BODY)
        app.add_routes([web.post("/generate", self._generate), web.get("/ready", self._ready)])
        return app

    async def _ready(self, _: web.Request) -> web.StreamResponse:
        return _json({"status": "ok"})

    @web.middleware
    async def _guard(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """Reject requests without the key, from web pages, or with an invalid message."""
        try:
            self._check(request)
            return await handler(request)
        except web.HTTPException as error:
            said = f"{request.method} {request.path}: {error.reason}"
            return _failure(BadMessage(said, status=error.status))
        except BadMessage as error:
            return _failure(error)

    def _check(self, request: web.Request) -> None:
        if self._expected is None:
            # a web page open in a browser on this machine can send requests to its ports
            if "Origin" in request.headers:
                raise BadMessage("web pages need a key to send requests", "start it with --api-key-file", 403)
        else:
            given = request.headers.get("Authorization", "").encode(errors="surrogateescape")
            if not hmac.compare_digest(given, self._expected):
                raise BadMessage("the key is missing or wrong", "send it as a bearer token", 401)
        if request.method == "POST" and request.content_type != "application/json":
            raise BadMessage("the body must be application/json", status=415)
        if (request.content_length or 0) > MAX_BODY:
            raise BadMessage(f"a body of more than {MAX_BODY} bytes", status=413)

    async def _generate(self, request: web.Request) -> web.StreamResponse:
        """Stream one response as server-sent events; a client that hangs up aborts it."""
        message = await _read(request, messages.Generate)
        tokens = np.asarray(message.tokens, dtype=np.int32)
        prompt = Request(
            message.id,
            tokens,
            message.max_new_tokens,
            message.temperature,
            message.affinity,
            message.cache_version,
        )
        unsent = _Unsent(message.interval)
        sampling = asyncio.create_task(self._sample(prompt, unsent.hear), name=f"generate {message.id}")
        sampling.add_done_callback(lambda _: unsent.due.set())
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream", "Cache-Control": "no-store"})
        try:
            await asyncio.sleep(0)
            if sampling.done() and isinstance(refusal := sampling.exception(), Exception):
                return _failure(refusal)
            await response.prepare(request)
            while not sampling.done():
                await unsent.due.wait()
                if not sampling.done() and (event := unsent.take()) is not None:
                    await response.write(_event(event))
            try:
                last = unsent.last(sampling.result())
            except Unreachable:  # the connection breaks off: the client keeps what it has, and checks the server
                if request.transport is not None:
                    request.transport.close()
                return response
            except Exception as error:  # noqa: BLE001 - the client reads it
                last = _describe(error)
            await response.write(_event(last))
            await response.write_eof()
            return response
        finally:
            sampling.cancel()
            await asyncio.gather(sampling, return_exceptions=True)


class EngineApp(GenerationApp):
    """Serves one engine that has been started; every request must bear `key`.

    All of it belongs to one event loop. Controls run in `tasks` and continue when their client has left.
    """

    def __init__(
        self,
        engine: StreamingEngine,
        about: Mapping[str, Any],
        deliveries: Deliveries,
        key: str | None,
        tasks: asyncio.TaskGroup,
    ) -> None:
        super().__init__(engine.generate, key)
        self._engine = engine
        self._tasks = tasks
        self._running: set[asyncio.Task[web.StreamResponse]] = set()
        self._about = about
        self._deliveries = deliveries
        self._leases = PauseLeases()
        self._leased = asyncio.Event()
        self._weights = asyncio.Lock()
        self._run = ""

    @override
    def app(self) -> web.Application:
        calls: Mapping[str, tuple[type[msgspec.Struct], Callable[..., Awaitable[Any]]]] = {
            "/abort": (messages.Abort, self._abort),
            "/pause": (messages.Pause, self._pause),
            "/resume": (messages.Resume, self._resume),
            "/weights/prefetch": (messages.Weights, self._prefetch),
            "/weights/update": (messages.Weights, self._update),
            "/sleep": (messages.Sleep, lambda message, _: self._engine.sleep(message.level)),
            "/wake": (messages.Wake, lambda message, _: self._engine.wake(message.tags)),
        }
        looks = {"/about": self._tell, "/health": self._health, "/figures": self._figures}
        app = super().app()
        app.add_routes([web.post(path, self._control(kind, work)) for path, (kind, work) in calls.items()])
        app.add_routes([web.get(path, self._look(work)) for path, work in looks.items()])
        return app

    @override
    async def _ready(self, request: web.Request) -> web.StreamResponse:
        return await _answer(self._health(request))

    def _control(self, kind: type[_M], work: Callable[[_M, web.Request], Awaitable[Any]]) -> Handler:
        async def handle(request: web.Request) -> web.StreamResponse:
            message = await _read(request, kind)
            control = self._tasks.create_task(_answer(work(message, request)))
            self._running.add(control)
            control.add_done_callback(self._running.discard)
            return await asyncio.shield(control)

        return handle

    def cancel_controls(self) -> None:
        for control in self._running:
            control.cancel()

    def _look(self, work: Callable[[web.Request], Awaitable[Any]]) -> Handler:
        async def handle(request: web.Request) -> web.StreamResponse:
            return await _answer(work(request))

        return handle

    async def watch_leases(self) -> None:
        """Resume the engine whenever the last pause has expired; `Unreachable` when the engine died."""
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
                logger.warning(
                    "a pause expired because its owner is silent: the engine resumes", extra={"owners": late}
                )
                if not self._leases:
                    await self._engine.resume()

    async def _tell(self, _: web.Request) -> Mapping[str, Any]:
        return self._about

    async def _health(self, _: web.Request) -> Mapping[str, Any]:
        await self._engine.health()
        return {"status": "ok"}

    async def _figures(self, request: web.Request) -> Mapping[str, Any]:
        self._leases.renew(request.query.get("owner", ""), asyncio.get_running_loop().time())
        return {**asdict(self._engine.load()), "paused": bool(self._leases)}

    async def _abort(self, message: messages.Abort, _: web.Request) -> Mapping[str, Any]:
        return {"ended": await self._engine.abort(message.id)}

    async def _pause(self, message: messages.Pause, _: web.Request) -> None:
        loop = asyncio.get_running_loop()
        self._leases.take(message.owner, message.seconds, loop.time())
        self._leased.set()
        await self._engine.pause()
        self._leases.renew(message.owner, loop.time())

    async def _resume(self, message: messages.Resume, _: web.Request) -> Mapping[str, Any]:
        self._leases.give_back(message.owner)
        if not self._leases:
            await self._engine.resume()
        return {"paused": bool(self._leases)}

    async def _prefetch(self, message: messages.Weights, request: web.Request) -> None:
        async with self._weights:
            self._check_run(message)
            await self._deliveries.prefetch(message, same_host=_same_host(request))

    async def _update(self, message: messages.Weights, request: web.Request) -> Mapping[str, Any]:
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


async def _read(request: web.Request, kind: type[_M]) -> _M:
    try:
        return msgspec.json.decode(await request.read(), type=kind)
    except (msgspec.DecodeError, RecursionError) as error:
        raise BadMessage(f"not a message for {request.path}: {error}") from error


async def _answer(work: Awaitable[Any]) -> web.Response:
    try:
        return _json(await work or {})
    except Exception as error:  # noqa: BLE001 - the client reads it
        return _failure(error)


def _event(event: Mapping[str, Any]) -> bytes:
    return b"data: " + orjson.dumps(event) + b"\n\n"


def _describe(error: Exception) -> dict[str, Any]:
    kind, _ = _meaning(error)
    if kind == "internal":
        logger.error("a request failed with an internal error", exc_info=error)
    message = error.message if isinstance(error, StreamrlError) else f"{type(error).__name__}: {error}"
    hint = error.hint if isinstance(error, StreamrlError) else ""
    return {"error": {"kind": kind, "message": message, "hint": hint}}


def _failure(error: Exception) -> web.Response:
    return _json(_describe(error), _meaning(error)[1])


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


def _json(body: Any, status: int = 200) -> web.Response:
    return web.Response(body=orjson.dumps(body), status=status, content_type="application/json")


def _same_host(request: web.Request) -> bool:
    """Whether the client is on this host: it came over loopback, or from the very address that it came to."""
    if request.remote is None or request.transport is None:
        return False
    try:
        loopback = ipaddress.ip_address(request.remote).is_loopback
    except ValueError:
        return False
    own = request.transport.get_extra_info("sockname")
    return loopback or (own is not None and own[0] == request.remote)
