"""The HTTP side of the gateway.

```
GET  /v1            {}                        what this is: run, worker, how many wait, limits
POST /v1/lease      {count, wait, seconds}    samples, each with a lease; waits for the first
POST /v1/renew      {leases}                  they last on; answers those that are lost
POST /v1/release    {leases}                  back in front of the others, which is no fault of theirs
POST /v1/scores     {scores}                  scores or failures; answers those that are lost
```
Errors are `{"version": 1, "error": {"code", "message", "hint"}}`. Without a token only programs of this host are
served, and no browsers: a web page could otherwise make one post to a loopback address.
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import logging
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, Final
from urllib.parse import urlsplit

import orjson
from aiohttp import web

from streamrl.config.base import is_loopback
from streamrl.consumers.gateway import messages
from streamrl.consumers.gateway.messages import Refusal
from streamrl.consumers.gateway.offers import Offers, SampleOffer

logger = logging.getLogger(__name__)
MAX_POLLS: Final = 256
"""Requests that wait for samples at the same time."""
_ANSWER_BYTES: Final = 16 << 20
_READ_SECONDS: Final = 30.0
_BUSY_SECONDS: Final = 1

_Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class Gateway:
    """Serves the samples on offer; made and used in one event loop.

    Attributes:
        heard: loop time of the last request of a program that fetches or scores samples.
    """

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
        """Return the application."""
        app = web.Application(middlewares=[_explain, self._guard], client_max_size=self._body_bytes)
        app.add_routes(
            [
                web.get("/v1", self._show),
                web.post("/v1/lease", self._lease),
                web.post("/v1/renew", self._renew),
                web.post("/v1/release", self._release),
                web.post("/v1/scores", self._scores),
            ]
        )
        app.on_shutdown.append(self._shut)
        return app

    def add(self, offer: SampleOffer) -> None:
        """Offer a sample to whoever waits."""
        self._offers.add(offer)
        self._more.set()

    def _expire(self) -> None:
        """End the leases that are over, wake those who wait for samples, and look again when the next lease ends."""
        loop = asyncio.get_running_loop()
        if self._offers.expire(loop.time()):
            self._more.set()
        if self._timer is not None:
            self._timer.cancel()
        end = self._offers.next_end()
        self._timer = None if end is None or self._closing else loop.call_at(end, self._expire)

    async def _shut(self, app: web.Application) -> None:
        """Let the requests that wait go home with nothing."""
        del app
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
                raise Refusal(401, "token", "the token is missing or wrong", "send `Authorization: Bearer TOKEN`")
        elif "Origin" in request.headers or not _names_this_host(request.host):
            logger.warning("gateway asked by a browser or under a name", extra={"peer": request.remote})
            raise Refusal(
                403,
                "not_local",
                "without a token only programs of this host are served, by a loopback address, and no browsers",
                "give the gateway a token: reward_worker.gateway_token_file",
            )
        if request.method == "POST":  # whoever only looks takes no samples
            self.heard = asyncio.get_running_loop().time()
        return await handler(request)

    async def _show(self, request: web.Request) -> web.StreamResponse:
        del request
        limits = {
            "count": messages.MAX_COUNT,
            "wait": messages.MAX_WAIT,
            "seconds": [messages.MIN_LEASE, messages.MAX_LEASE],
            "body_bytes": self._body_bytes,
        }
        offers = self._offers
        counts = {name: getattr(offers, name) for name in ("waiting", "leased", "taken", "failed", "lost")}
        return _answer({**self._about, **counts, "seconds": self._seconds, "limits": limits})

    async def _lease(self, request: web.Request) -> web.StreamResponse:
        asked = messages.parse(await _body(request), messages.LeaseRequest)
        if self._polls >= MAX_POLLS:
            raise Refusal(503, "busy", f"{MAX_POLLS} requests wait for samples already", "ask for more at once")
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

    async def _next(self, request: web.Request, asked: messages.LeaseRequest) -> list[SampleOffer]:
        """Wait for at least one sample; none when the time is over, the program has gone, or this server ends."""
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
        asked = messages.parse(await _body(request), messages.LeasesRequest)
        self._expire()
        lost = self._offers.renew(asked.leases, asyncio.get_running_loop().time())
        return _answer(_sorted("renewed", asked.leases, lost))

    async def _release(self, request: web.Request) -> web.StreamResponse:
        asked = messages.parse(await _body(request), messages.LeasesRequest)
        self._expire()
        lost = self._offers.release(asked.leases)
        self._more.set()
        return _answer(_sorted("released", asked.leases, lost))

    async def _scores(self, request: web.Request) -> web.StreamResponse:
        """All are looked at before the first is taken: a request with a mistake changes nothing."""
        asked = messages.parse(await _body(request), messages.ScoresRequest)
        messages.refuse_repeats([posted.lease for posted in asked.scores])
        ends = [messages.end_of(posted, number) for number, posted in enumerate(asked.scores)]
        self._expire()
        leases = [posted.lease for posted in asked.scores]
        lost = [lease for lease, end in zip(leases, ends, strict=True) if not self._offers.settle(lease, end)]
        return _answer(_sorted("taken", leases, lost))


@web.middleware
async def _explain(request: web.Request, handler: _Handler) -> web.StreamResponse:
    """Make JSON of every error."""
    try:
        return await handler(request)
    except Refusal as refusal:
        return _error(refusal)
    except web.HTTPException as error:
        code = error.reason.lower().replace(" ", "_")
        hint = "see docs/guides/gateway.md" if error.status != 413 else "post fewer scores at once"
        allow = {"Allow": error.headers["Allow"]} if "Allow" in error.headers else {}
        return _error(Refusal(error.status, code, f"{request.method} {request.path}: {error.reason}", hint), allow)
    except Exception:
        logger.exception("the gateway failed at a request", extra={"path": request.path})
        return _error(Refusal(500, "internal", "the gateway failed; its log says why"))


def _error(refusal: Refusal, headers: Mapping[str, str] | None = None) -> web.Response:
    about = {401: {"WWW-Authenticate": "Bearer"}, 503: {"Retry-After": str(_BUSY_SECONDS)}}.get(refusal.status, {})
    said = {"code": refusal.code, "message": refusal.message, "hint": refusal.hint}
    return _answer({"error": said}, refusal.status, {**about, **(headers or {})})


def _answer(data: Mapping[str, Any], status: int = 200, headers: Mapping[str, str] | None = None) -> web.Response:
    return web.Response(
        body=orjson.dumps({"version": messages.VERSION, **data}),
        status=status,
        content_type="application/json",
        headers={"Cache-Control": "no-store", **(headers or {})},
    )


def _sorted(done: str, leases: list[str], lost: list[str]) -> dict[str, list[str]]:
    gone = set(lost)
    return {done: [lease for lease in leases if lease not in gone], "lost": lost}


async def _body(request: web.Request) -> bytes:
    try:
        async with asyncio.timeout(_READ_SECONDS):
            return await request.read()
    except TimeoutError as error:
        raise Refusal(408, "slow", f"the body did not come within {_READ_SECONDS:g} s") from error


def _names_this_host(host: str) -> bool:
    """Whether a Host header names a loopback address: a page that made its own name lead here does not."""
    try:
        return is_loopback(urlsplit(f"//{host}").hostname or "")
    except ValueError:
        return False
