"""The HTTP side of the gateway: JSON objects, version 1.

```
GET  /v1            {}                        what this is: run, worker, how many wait, limits
POST /v1/lease      {count, wait, seconds}    leases samples; waits for the first
POST /v1/renew      {leases}                  prolongs leases; answers which are lost
POST /v1/release    {leases}                  puts samples back in front of the others; answers which are lost
POST /v1/scores     {scores}                  takes scores or failures; answers which are lost
```
Errors are `{"version": 1, "error": {"code", "message", "hint"}}`. Unknown fields of a request are an error. Without a
token, only programs of this host are served, and no browsers: a web page could otherwise post to a loopback address.
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Annotated, Any, Final, TypeVar

import msgspec
import orjson
from aiohttp import web

from streamrl.consumers.gateway.offers import MAX_LEASE, MIN_LEASE, Offers, ProgramFailed, SampleOffer
from streamrl.consumers.reward import Score
from streamrl.errors import DataError, StreamrlError
from streamrl.listening import names_this_host

logger = logging.getLogger(__name__)
VERSION: Final = 1
MAX_POLLS: Final = 256
"""Requests that wait for samples at the same time."""
_MAX_COUNT: Final = 256
"""Samples in one answer, and leases or scores in one request."""
_MAX_WAIT: Final = 60.0
_MAX_PARTS: Final = 64
_MAX_WHY: Final = 1000
_MAX_DETAIL: Final = 16_384
_ANSWER_BYTES: Final = 16 << 20
_READ_SECONDS: Final = 30.0

_Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
_Ids = Annotated[list[Annotated[str, msgspec.Meta(max_length=64)]], msgspec.Meta(min_length=1, max_length=_MAX_COUNT)]
_Names = Annotated[str, msgspec.Meta(min_length=1, max_length=64)]
_Parts = Annotated[dict[_Names, float], msgspec.Meta(max_length=_MAX_PARTS)]


class _Refusal(StreamrlError):
    def __init__(self, status: int, code: str, message: str, hint: str = "") -> None:
        super().__init__(message, hint)
        self.status = status
        self.code = code


class _LeaseRequest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    version: int = VERSION
    count: Annotated[int, msgspec.Meta(ge=1, le=_MAX_COUNT)] = 1
    wait: Annotated[float, msgspec.Meta(ge=0, le=_MAX_WAIT)] = 20.0
    seconds: Annotated[float, msgspec.Meta(ge=MIN_LEASE, le=MAX_LEASE)] | None = None


class _LeasesRequest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    leases: _Ids
    version: int = VERSION


class _Posted(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    lease: Annotated[str, msgspec.Meta(max_length=64)]
    value: float | None = None
    parts: _Parts = {}
    tokens: Annotated[int, msgspec.Meta(ge=0)] = 0
    error: Annotated[str, msgspec.Meta(min_length=1)] | None = None
    detail: str = ""
    retry: bool = True


class _ScoresRequest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    scores: Annotated[list[_Posted], msgspec.Meta(min_length=1, max_length=_MAX_COUNT)]
    version: int = VERSION


_Request = TypeVar("_Request", _LeaseRequest, _LeasesRequest, _ScoresRequest)


class Gateway:
    """Serves the samples on offer, in one event loop. `heard`: loop time of the last request of a program."""

    def __init__(
        self, offers: Offers, seconds: float, body_bytes: int, token: str | None, about: Mapping[str, Any]
    ) -> None:
        self.heard = asyncio.get_running_loop().time()
        self._offers = offers
        self._seconds = seconds
        self._body_bytes = body_bytes
        self._token = None if token is None else token.encode()
        self._about = about
        self._more = asyncio.Event()
        self._polls = 0
        self._closing = False
        self._timer: asyncio.TimerHandle | None = None

    def app(self) -> web.Application:
        app = web.Application(middlewares=[_explain, self._guard], client_max_size=self._body_bytes)
        app.router.add_get("/v1", self._show)
        app.router.add_post("/v1/lease", self._lease)
        app.router.add_post("/v1/renew", self._renew)
        app.router.add_post("/v1/release", self._release)
        app.router.add_post("/v1/scores", self._scores)
        app.on_shutdown.append(self._shut)
        return app

    def add(self, offer: SampleOffer) -> None:
        self._offers.add(offer)
        self._more.set()

    def _expire(self) -> None:
        loop = asyncio.get_running_loop()
        if self._offers.expire(loop.time()):
            self._more.set()
        if self._timer is not None:
            self._timer.cancel()
        end = self._offers.next_end()
        self._timer = None if end is None or self._closing else loop.call_at(end, self._expire)

    async def _shut(self, _: web.Application) -> None:
        self._closing = True
        self._expire()
        self._more.set()

    @web.middleware
    async def _guard(self, request: web.Request, handler: _Handler) -> web.StreamResponse:
        if self._token is not None:
            scheme, _, token = request.headers.get("Authorization", "").partition(" ")
            known = hmac.compare_digest(token.strip().encode(errors="replace"), self._token)
            if scheme.lower() != "bearer" or not known:
                logger.warning("gateway asked without the token", extra={"peer": request.remote})
                raise _Refusal(401, "token", "the token is missing or wrong", "send `Authorization: Bearer TOKEN`")
        elif "Origin" in request.headers or not names_this_host(request.host):
            logger.warning("gateway asked by a browser or under a name", extra={"peer": request.remote})
            raise _Refusal(
                403,
                "not_local",
                "without a token only programs of this host are served, by a loopback address, and no browsers",
                "give the gateway a token: reward_worker.gateway_token_file",
            )
        if request.method == "POST":  # a GET takes no samples
            self.heard = asyncio.get_running_loop().time()
        return await handler(request)

    async def _show(self, _: web.Request) -> web.StreamResponse:
        limits = {
            "count": _MAX_COUNT,
            "wait": _MAX_WAIT,
            "seconds": [MIN_LEASE, MAX_LEASE],
            "body_bytes": self._body_bytes,
        }
        return _answer({**self._about, **self._offers.counts(), "seconds": self._seconds, "limits": limits})

    async def _lease(self, request: web.Request) -> web.StreamResponse:
        asked = await _parsed(request, _LeaseRequest)
        if self._polls >= MAX_POLLS:
            raise _Refusal(503, "busy", f"{MAX_POLLS} requests wait for samples already", "ask for more at once")
        self._polls += 1
        try:
            given = await self._next(request, asked)
        finally:
            self._polls -= 1
        now = asyncio.get_running_loop().time()
        samples = [
            {"lease": offer.lease, "expires_in": round(offer.until - now, 3), "sample": orjson.Fragment(offer.body)}
            for offer in given
        ]
        return _answer({"samples": samples})

    async def _next(self, request: web.Request, asked: _LeaseRequest) -> list[SampleOffer]:
        """Wait for at least one sample. Returns none at the end of `wait`, or if the program or this server is gone."""
        loop = asyncio.get_running_loop()
        end = loop.time() + asked.wait
        seconds = self._seconds if asked.seconds is None else asked.seconds
        while True:
            now = loop.time()
            if request.transport is None or request.transport.is_closing():
                return []
            given = self._offers.lease(asked.count, seconds, now, _ANSWER_BYTES)
            if given or now >= end or self._closing:
                self._expire()
                return given
            self._more.clear()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout_at(end):
                    await self._more.wait()

    async def _renew(self, request: web.Request) -> web.StreamResponse:
        asked = await _parsed(request, _LeasesRequest)
        self._expire()
        return _done("renewed", asked.leases, self._offers.renew(asked.leases, asyncio.get_running_loop().time()))

    async def _release(self, request: web.Request) -> web.StreamResponse:
        asked = await _parsed(request, _LeasesRequest)
        self._expire()
        lost = self._offers.release(asked.leases)
        self._more.set()
        return _done("released", asked.leases, lost)

    async def _scores(self, request: web.Request) -> web.StreamResponse:
        """Check all scores before any is taken, so that a request with a mistake changes nothing."""
        asked = await _parsed(request, _ScoresRequest)
        ends: dict[str, Score | Exception] = {}
        for number, posted in enumerate(asked.scores):
            if posted.lease in ends:
                said = f"$.scores[{number}] has the lease of $.scores[{list(ends).index(posted.lease)}]"
                raise _Refusal(422, "invalid", said, "post one score for each lease")
            ends[posted.lease] = _end_of(posted, number)
        self._expire()
        lost = [lease for lease, end in ends.items() if not self._offers.settle(lease, end)]
        return _done("taken", list(ends), lost)


@web.middleware
async def _explain(request: web.Request, handler: _Handler) -> web.StreamResponse:
    try:
        return await handler(request)
    except _Refusal as refusal:
        return _error(refusal)
    except web.HTTPException as error:
        code = error.reason.lower().replace(" ", "_")
        hint = "see docs/guides/gateway.md" if error.status != 413 else "post fewer scores at once"
        allow = {"Allow": error.headers["Allow"]} if "Allow" in error.headers else {}
        return _error(_Refusal(error.status, code, f"{request.method} {request.path}: {error.reason}", hint), allow)
    except Exception:
        logger.exception("the gateway failed at a request", extra={"path": request.path})
        return _error(_Refusal(500, "internal", "the gateway failed; its log says why"))


def _error(refusal: _Refusal, headers: Mapping[str, str] | None = None) -> web.Response:
    about = {401: {"WWW-Authenticate": "Bearer"}, 503: {"Retry-After": "1"}}.get(refusal.status, {})
    said = {"code": refusal.code, "message": refusal.message, "hint": refusal.hint}
    return _answer({"error": said}, refusal.status, {**about, **(headers or {})})


def _answer(data: Mapping[str, Any], status: int = 200, headers: Mapping[str, str] | None = None) -> web.Response:
    return web.Response(
        body=orjson.dumps({"version": VERSION, **data}),
        status=status,
        content_type="application/json",
        headers={"Cache-Control": "no-store", **(headers or {})},
    )


def _done(verb: str, leases: Sequence[str], lost: Sequence[str]) -> web.Response:
    return _answer({verb: [lease for lease in leases if lease not in lost], "lost": lost})


async def _parsed(request: web.Request, kind: type[_Request]) -> _Request:
    try:
        async with asyncio.timeout(_READ_SECONDS):
            data = await request.read()
    except TimeoutError as error:
        raise _Refusal(408, "slow", f"the body did not come within {_READ_SECONDS:g} s") from error
    try:
        asked = msgspec.json.decode(data or b"{}", type=kind)
    except msgspec.ValidationError as error:
        inside = kind is _ScoresRequest and "`$.scores[" in str(error)
        fields = ", ".join((_Posted if inside else kind).__struct_fields__)
        raise _Refusal(422, "invalid", str(error), f"fields: {fields}; see docs/guides/gateway.md") from error
    except (msgspec.DecodeError, RecursionError) as error:
        raise _Refusal(400, "no_json", f"the body is not JSON: {error}", "send one JSON object") from error
    if asked.version != VERSION:
        raise _Refusal(422, "version", f"version {asked.version} of the gateway is unknown", f"this one is {VERSION}")
    return asked


def _end_of(posted: _Posted, number: int) -> Score | Exception:
    """The score that a program posted, or its failure as an exception; a `DataError` is not retried."""
    where = f"$.scores[{number}]"
    if (posted.value is None) == (posted.error is None):
        raise _Refusal(422, "invalid", f"{where} needs either `value` or `error`", "a failure has no value")
    if posted.value is None:
        said = f"the program says: {str(posted.error)[:_MAX_WHY]}"
        failed = ProgramFailed(said) if posted.retry else DataError(said)
        if posted.detail:
            failed.add_note(posted.detail[-_MAX_DETAIL:])  # notes are shown with the traceback
        return failed
    try:
        return Score(posted.value, posted.parts, posted.tokens)
    except ValueError as error:
        raise _Refusal(
            422, "invalid", f"{where}: {error}", "post `error` for a sample that cannot be scored"
        ) from error
