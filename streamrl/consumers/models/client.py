"""One entry of `reward_models` as rewards ask it: a router over its servers, and an HTTP session for each.

A request goes to the server with the least work. A late answer, a broken connection, an error of the server and an
unreadable answer are faults of that server: the request goes to another one while there is time, and not back. The
next attempt for the same sample also prefers another server. A server that answers "not now" (429, 503) rests. A
refusal (400) ends the request, since every server would refuse it.

Above it, a judge asks for several votes (`judge.py`), and every reward makes several attempts (`consumers/calls.py`).
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final, NoReturn, TypeGuard, TypeVar

from typing_extensions import override

from streamrl.config import RewardModelConfig, RunConfig
from streamrl.consumers.calls import failed_servers
from streamrl.consumers.models.rate_limit import Quota, RateLimit, RateTurn, limit_of
from streamrl.consumers.models.router import Claim, PoolServer, PoolServerState, RequestOutcome, Router
from streamrl.consumers.reward import AskedModel, RewardContext
from streamrl.errors import RewardBusy, RewardUnavailable, StreamrlError, Unreachable, WireError, unwrapped
from streamrl.http import BadAnswer, BadRequest, Call, HttpClient, Lost, read_key, without
from streamrl.queues.ledgers import Ledgers
from streamrl.queues.reward_servers import RewardServer, RewardServers

logger = logging.getLogger(__name__)

LOOK_SECONDS: Final = 2.0
"""Seconds between two reads of the list of servers, and between health checks of servers without recent answers."""
_HEALTH_SECONDS: Final = 5.0
"""Longest time of a health check."""
_FAIR_SHARE: Final = 0.5
"""A missing answer is the fault of a server only if it had at least this part of the deadline."""
_CHOOSY: Final = 0.4
"""Part of the deadline in which a request waits for a server that has not failed its sample. Leaves at least
`_FAIR_SHARE` to the next server; otherwise no server could fail the sample, and it would wait forever."""
_WAITING_SHARE: Final = 0.5
"""Part of a reward's deadline that its samples may wait for the rate limit of their model."""
_SMOOTHING: Final = 0.1
"""Weight of the last answer in the moving average of answer times."""
_FIRST_PAUSE: Final = 0.1
"""Pause before a request asks servers again after all were away, doubled each time; three faults eject a server."""
_NOT_NOW: Final = frozenset({429, 503})
"""Statuses of a server that is busy."""
_UNAUTHORIZED: Final = 401
_WRONG_KEY: Final = frozenset({_UNAUTHORIZED, 403})
_NO_ROUTE: Final = frozenset({404, 405})
_WRONG_SERVER: Final = _NO_ROUTE | _WRONG_KEY | {501}
"""Statuses of a server with another model, without this route, or that wants another key."""

Answer = Mapping[str, Any]
_T = TypeVar("_T")


def refuses(error: BaseException | None) -> TypeGuard[BadAnswer | BadRequest]:
    return isinstance(error, BadAnswer | BadRequest) and error.status in _WRONG_SERVER


def _outcome_of(error: StreamrlError) -> RequestOutcome:
    if isinstance(error, BadAnswer) and error.status in _NOT_NOW:
        return RequestOutcome.BUSY
    if isinstance(error, BadRequest) and error.status not in _NO_ROUTE:
        return RequestOutcome.OK
    return RequestOutcome.FAULT


@dataclass(slots=True)
class _Request:
    call: Call
    seconds: float  # deadline
    end: float
    choosy_until: float  # until then it waits for a server that has not failed the sample
    tokens: int  # estimated cost
    before: list[str]  # failed earlier attempts for the sample, latest last; asked if no others work
    failed: set[str] = field(default_factory=set)  # failed this request, and are not asked again
    last: StreamrlError | None = None
    answered: bool = False  # a server answered and failed; otherwise they were away, which says nothing of the request
    rounds: int = 0  # how often all servers failed it without an answer
    turn: RateTurn | None = None  # unused turn of the rate limit

    def failed_at(self, url: str, error: StreamrlError) -> None:
        self.failed.add(url)
        of_sample = failed_servers()
        of_sample.pop(url, None)
        of_sample[url] = None
        self.last = error
        self.answered = self.answered or not (refuses(error) or (isinstance(error, Lost) and not error.late))


class ModelClient(AskedModel):
    """The servers of one `reward_models.NAME`, for one event loop. `watch` must run while it is used."""

    def __init__(
        self, name: str, config: RewardModelConfig, *, api_key: str | None = None, limit: RateLimit | None = None
    ) -> None:
        self.name = name
        self._config = config
        self._api_key = api_key
        self._limit = limit
        self._router = Router(config.concurrency)
        self._sessions: dict[str, HttpClient] = {}
        self._waiting: dict[asyncio.Future[None], bool] = {}
        self._health = _health_call(config.kind)
        self._mean_seconds = 0.0
        self._no_servers = False
        self._answered = False
        self._unhealthy: dict[str, BadAnswer] = {}
        self._refusing: dict[str, BadAnswer | BadRequest] = {}

    @property
    @override
    def config(self) -> RewardModelConfig:
        return self._config

    @property
    @override
    def slots(self) -> int:
        return self._router.slots

    @property
    @override
    def away(self) -> str:
        if self._no_servers:
            return f"reward model {self.name} has no server"
        rows = [row for row in self.standings() if not row.leaving]
        if any(row.state in {PoolServerState.SERVING, PoolServerState.TRIAL} or not row.why for row in rows):
            return ""
        return "; ".join(row.why for row in rows)

    @override
    async def call(self, path: str, body: Mapping[str, Any], *, deadline: float, tokens: int = 0) -> Answer:
        return await self.ask(path, body, lambda answer: answer, deadline=deadline, tokens=tokens)

    @override
    async def ask(
        self, path: str, body: Mapping[str, Any], read: Callable[[Answer], _T], *, deadline: float, tokens: int = 0
    ) -> _T:
        now = asyncio.get_running_loop().time()
        call, before = Call("POST", path, body, pooled=True), list(failed_servers())
        request = _Request(call, deadline, now + deadline, now + _CHOOSY * deadline, tokens, before)
        try:
            while (answer := await self._send(request, await self._claim(request), read)) is None:
                pass
            return answer[0]
        finally:
            self._settle(request, 0)

    def standings(self) -> list[PoolServer]:
        return self._router.standings()

    async def follow(self, urls: Iterable[str]) -> None:
        """Make `urls` the servers. Removed servers finish their requests."""
        added, removed = self._router.follow(urls)
        for url in added:
            logger.info("reward server added", extra={"model": self.name, "url": url})
        for url in removed:
            logger.info("reward server leaves", extra={"model": self.name, "url": url})
        for url in [url for url in self._sessions if url not in self._router.known]:
            await self._sessions.pop(url).close()
        if removed:
            self._wake(everybody=True)

    async def check(self) -> None:
        now = asyncio.get_running_loop().time()
        async with asyncio.TaskGroup() as tasks:
            for url in self._router.to_check(now, LOOK_SECONDS):
                tasks.create_task(self._check(url), name=f"health {url}")

    async def watch(self, ledgers: Ledgers | None) -> None:
        """Follow the list of servers (the last one, if it cannot be read) and check their health, until cancelled."""
        while True:
            try:
                if ledgers is None:
                    present = [RewardServer(url, url) for url in self._config.url]
                else:
                    present = await RewardServers(ledgers).present(self.name, self._config.url)
                    if self._limit is not None:  # workers may have joined
                        self._limit.share(len(await ledgers.roles.read("reward.")))
                self._no_servers = not present
                await self.follow(server.url for server in present if server.awake)
            except Unreachable as error:
                logger.warning("list of reward servers", extra={"model": self.name, "why": error.message})
            await self.check()
            await asyncio.sleep(LOOK_SECONDS)

    async def close(self) -> None:
        while self._sessions:
            await self._sessions.popitem()[1].close()

    async def _claim(self, request: _Request) -> Claim:
        """Wait for a server with a free slot, then for the rate limit, and take a slot after both."""
        loop = asyncio.get_running_loop()
        while True:
            now = loop.time()
            if now >= request.end:
                self._wake()
                self._too_late(request)
            if not self._answered and (denied := self._denied(request)) is not None:
                raise self._unavailable(request) from denied
            avoided = request.failed.union(request.before)
            url = self._router.pick(now, avoided)
            if url is not None:
                if await self._take_turn(request):
                    continue  # the slot may be taken by now
                return self._router.began(url, now, max(1, request.tokens))
            others = self._router.works(avoided)
            if request.before and (not others or now >= request.choosy_until):
                del request.before[0]
                continue
            if request.failed and not others:
                await self._all_failed(request)
                continue
            until = request.choosy_until if request.before else request.end
            if (wakes := self._router.first_rest_ends(now, avoided)) is not None:
                until = min(until, wakes)
            await self._wait(until - now, choosy=bool(avoided))

    async def _all_failed(self, request: _Request) -> None:
        """If no server answered, pause and let all be asked again; otherwise end the request."""
        if request.last is not None and request.answered:
            raise request.last
        request.failed.clear()
        now = asyncio.get_running_loop().time()
        if self._router.pick(now) is not None:
            pause = min(LOOK_SECONDS, _FIRST_PAUSE * 2**request.rounds, request.end - now)
            request.rounds += 1
            await asyncio.sleep(max(0.0, pause))

    async def _wait(self, seconds: float, *, choosy: bool) -> None:
        future = asyncio.get_running_loop().create_future()
        self._waiting[future] = choosy
        try:
            async with asyncio.timeout(seconds):
                await future
        except TimeoutError:
            pass
        except asyncio.CancelledError:
            if future.done() and not future.cancelled():
                self._wake()  # passes the slot on
            raise
        finally:
            self._waiting.pop(future, None)

    def _wake(self, *, everybody: bool = False) -> None:
        """Let waiting requests look again. For one free slot: all choosy ones, which may decline it, and one other."""
        others = 0
        for future, choosy in list(self._waiting.items()):
            if not future.done() and (everybody or choosy or not others):
                others += not choosy
                del self._waiting[future]
                future.set_result(None)

    async def _send(self, request: _Request, claim: Claim, read: Callable[[Answer], _T]) -> tuple[_T] | None:
        """Ask one server. None: the request goes on to another one."""
        loop = asyncio.get_running_loop()
        outcome, why, rest = RequestOutcome.CANCELLED, "", None
        try:
            found = (read(await self._answer(request, claim)),)
        except (BadAnswer, BadRequest, Lost, WireError) as error:
            error.message = without(error.message, self._api_key)
            error.args = (error.message, error.hint)
            outcome, why = _outcome_of(error), error.message
            if refuses(error):
                self._refusing[claim.url] = error
            if isinstance(error, Lost) and error.late:
                had, fair = loop.time() - claim.began, _FAIR_SHARE * request.seconds
                outcome = RequestOutcome.CANCELLED if had < max(fair, self._mean_seconds) else outcome
                if had < fair:
                    self._too_late(request, error)
            rest = error.rest if isinstance(error, BadAnswer) else None
            if outcome in {RequestOutcome.OK, RequestOutcome.CANCELLED}:
                raise
            if outcome is RequestOutcome.FAULT:
                request.failed_at(claim.url, error)
            return None
        else:
            outcome = RequestOutcome.OK
            self._answered = True
            self._refusing.pop(claim.url, None)
            seconds = loop.time() - claim.began
            self._mean_seconds += (_SMOOTHING if self._mean_seconds else 1.0) * (seconds - self._mean_seconds)
            return found
        finally:
            self._changed(claim.url, self._router.ended(claim, outcome, loop.time(), why, rest), why)
            self._wake()

    async def _answer(self, request: _Request, claim: Claim) -> Answer:
        """The answer of one server; settles its cost. Raises the errors of `HttpClient.call`."""
        used = request.tokens
        try:
            answer = await self._session(claim.url).call(request.call, request.end - claim.began, retry=False)
            if not isinstance(answer, dict):
                what = "text (its Content-Type names no JSON)" if isinstance(answer, str) else "no JSON object"
                said = without(str(answer), self._api_key)[:100]
                raise WireError(f"{claim.url}{request.call.path} answered {what}: {said!r}")
            used = used_tokens(answer, request.tokens)
        except (BadAnswer, Lost) as error:
            if error.status in _NOT_NOW if isinstance(error, BadAnswer) else not error.sent:
                used = 0
            raise
        finally:
            self._settle(request, used)
        return answer

    async def _take_turn(self, request: _Request) -> bool:
        """Wait for a turn in the rate limit. False, without waiting: it has one already, or needs none."""
        if self._limit is None or request.turn is not None:
            return False
        left = max(0.0, request.end - asyncio.get_running_loop().time())
        try:
            request.turn = await self._limit.take(request.tokens, left)
        except RewardUnavailable as error:
            raise RewardBusy(error.message, error.hint) from error
        finally:
            if request.turn is None:
                self._wake()  # passes the slot on
        return True

    def _settle(self, request: _Request, tokens: int) -> None:
        turn, request.turn = request.turn, None
        if turn is not None and self._limit is not None:
            self._limit.settle(turn, tokens)

    async def _check(self, url: str) -> None:
        why = ""
        try:
            await self._session(url).call(self._health, _HEALTH_SECONDS, retry=False)
        except (Unreachable, BadRequest, WireError) as error:
            why = error.message
            if isinstance(error, BadAnswer) and error.status == _UNAUTHORIZED:
                self._unhealthy[url] = error
                self._wake(everybody=True)
        if not why:
            self._unhealthy.pop(url, None)
        now = asyncio.get_running_loop().time()
        self._changed(url, self._router.checked(url, now, healthy=not why, why=why), why)

    def _changed(self, url: str, state: PoolServerState | None, why: str) -> None:
        if state is None:
            return
        if state is PoolServerState.EJECTED:
            logger.warning("reward server is out", extra={"model": self.name, "url": url, "why": why})
        else:
            logger.info("reward server", extra={"model": self.name, "url": url, "state": state.value})
        self._wake(everybody=True)

    def _session(self, url: str) -> HttpClient:
        if url not in self._sessions:
            self._sessions[url] = HttpClient(
                url,
                self._api_key,
                "check that the server runs and that this host can reach it; see its log",
                key_option=f"reward_models.{self.name}.api_key_file",
                max_body=self._config.max_answer,
            )
        return self._sessions[url]

    def _cause(self, request: _Request) -> StreamrlError | None:
        """The cause to report. A refusal only if all servers refuse, since others may still be loading.

        A failed health check for a wrong key counts as a refusal, because that server gets no requests.
        """
        if request.last is not None and not refuses(request.last):
            return request.last
        refusals = [self._refusing.get(url) or self._unhealthy.get(url) for url in self._router.urls]
        return refusals[0] if refusals and all(refusals) else None

    def _denied(self, request: _Request) -> BadAnswer | BadRequest | None:
        found = [self._unhealthy.get(url) or self._refusing.get(url) for url in self._router.urls]
        asked = all(url in self._unhealthy or url in request.failed for url in self._router.urls)
        wrong = [error for error in found if error is not None and error.status in _WRONG_KEY]
        return wrong[0] if wrong and asked and len(wrong) == len(found) else None

    def _too_late(self, request: _Request, late: Lost | None = None) -> NoReturn:
        """End a request at its deadline. `late`: error of a server that had too little time."""
        if request.last is not None and request.answered:
            raise request.last
        raise self._unavailable(request) from self._cause(request) or late

    def _unavailable(self, request: _Request) -> RewardUnavailable:
        if self._router.lacks_slots(request.failed):
            return RewardBusy(
                f"the servers of reward model {self.name} had no free slot for a request in most of"
                f" {request.seconds:.1f} s",
                f"more servers, a higher reward_models.{self.name}.concurrency if they can take it, or a longer"
                " deadline",
            )
        rows = self.standings()
        known = "; ".join(f"{row.url} is {row.state.value}{row.why and ': '}{row.why}" for row in rows) or "it has none"
        return RewardUnavailable(
            f"no server of reward model {self.name} could be asked in time ({known})",
            f"`streamrl reward servers ls {self.name}` shows them, `streamrl reward servers add` adds one",
        )


def used_tokens(answer: Answer, otherwise: int = 0) -> int:
    usage = answer.get("usage")
    total = usage.get("total_tokens") if isinstance(usage, Mapping) else None
    return total if type(total) is int and total >= 0 else otherwise


def _health_call(kind: str) -> Call:
    """A request that a ready server answers. With kind openai and template, any status but 401 will do."""
    if kind == "vllm":
        return Call("GET", "/health")
    if kind == "sglang":
        return Call("GET", "/ready")
    return Call("GET", "/v1/models" if kind == "openai" else "/", optional=True)


@contextlib.asynccontextmanager
async def open_models(config: RunConfig, ledgers: Ledgers | None = None) -> AsyncIterator[Mapping[str, ModelClient]]:
    """Open every entry of `reward_models`, by name, and watch its servers for the length of this block.

    `ledgers` list more servers, and the workers that share the rate limits. None, outside of a run: only configured
    servers, and limits of this process alone. `ConfigError`: a key file cannot be read.
    """
    clients = {}
    workers = 1 if ledgers is None else config.reward_worker.replicas
    for name, model in config.reward_models.items():
        key = await asyncio.to_thread(read_key, f"reward_models.{name}.api_key_file", model.api_key_file)
        clients[name] = ModelClient(name, model, api_key=key, limit=limit_of(name, model, workers))
    try:
        with unwrapped():
            async with asyncio.TaskGroup() as tasks:
                watches = [
                    tasks.create_task(client.watch(ledgers), name=f"servers of {name}")
                    for name, client in clients.items()
                ]
                yield clients
                for watch in watches:
                    watch.cancel()
    finally:
        for client in clients.values():
            await client.close()


def slots_within_rate(context: RewardContext, model: RewardModelConfig, tokens: int, requests: int = 1) -> int | None:
    """Samples that one worker may send within half of the deadline under the model's rate limit; None: no limit."""
    quota = Quota.of(model)
    most = quota.within(_WAITING_SHARE * context.deadline, tokens)
    return None if most is None else max(1, most // (requests * context.config.reward_worker.replicas))
