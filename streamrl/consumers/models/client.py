"""One entry of `reward_models` as rewards ask it: a router in front of its servers, and one HTTP session for each.

A request goes to the server with the least to do. What fails there (no answer in time, a broken connection, an error of
the server, an answer that is none) is a fault of that server, and the request goes to another one, as long as there is
time; it never goes back to a server that has failed it. The next attempt for the same sample goes elsewhere, too, when
another server works and has room before long (`attempts`). A server that says "not now" (429, 503) rests. What a server
refuses (400) every server would refuse: that ends the request.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, NoReturn, TypeVar

from streamrl.config import RewardModelConfig
from streamrl.consumers.attempts import failed_servers
from streamrl.consumers.models.faults import NOT_NOW, is_away, outcome_of, refuses
from streamrl.consumers.models.rate_limit import RateLimit, Turn
from streamrl.consumers.models.router import Flight, Outcome, Router, Server, State
from streamrl.consumers.models.servers import RewardServer
from streamrl.errors import RewardBusy, RewardUnavailable, StreamrlError, Unreachable, WireError
from streamrl.http import BadAnswer, BadRequest, Call, HttpClient, Lost, without

logger = logging.getLogger(__name__)

LOOK_SECONDS: Final = 2.0
"""Seconds between two looks at the list of servers, and at the health of those that no request says anything of."""
HEALTH_SECONDS: Final = 5.0
"""Longest time of a health check."""
_FAIR_SHARE: Final = 0.5
"""Part of the time of a request that a server has to have had before it is its fault that there was no answer."""
_CHOOSY: Final = 0.4
"""Part of the time of a request in which it waits for a server that has not failed the sample. What is left is more
than `_FAIR_SHARE`, so that a server that gets it then can fail it, and the wait does not come again for ever."""
_NEWS: Final = 0.1
"""Weight of the last answer in the time that answers usually take."""
_FIRST_PAUSE: Final = 0.1
_WHO_ARE_YOU: Final = 401
_WRONG_KEY: Final = (_WHO_ARE_YOU, 403)

Answer = Mapping[str, Any]
_T = TypeVar("_T")


@dataclass(slots=True)
class _Request:
    """One request on its way through the servers.

    Attributes:
        call: what is sent.
        seconds: that it may take.
        end: when its time is over.
        choosy_until: when it stops waiting for a server that has not failed the sample.
        tokens: that it will cost.
        before: servers that have failed earlier attempts for the sample, the latest failure last: they are asked when
            no other works, and after `choosy_until`.
        failed: servers that have failed it and are not asked again.
        last: what the last of them failed with.
        answered: some server tried, and failed it all the same.
        rounds: times that all servers were away.
        turn: of the rate limit, that it has and has not used.
    """

    call: Call
    seconds: float
    end: float
    choosy_until: float
    tokens: int
    before: list[str]
    failed: set[str] = field(default_factory=set)
    last: StreamrlError | None = None
    answered: bool = False
    rounds: int = 0
    turn: Turn | None = None

    @property
    def avoided(self) -> set[str]:
        """Servers that it does not go to now."""
        return self.failed.union(self.before) if self.before else self.failed

    def failed_at(self, url: str, outcome: Outcome, error: StreamrlError) -> None:
        """Remember a failure; a server that is busy has not failed."""
        if outcome is Outcome.FAULT:
            self.failed.add(url)
            of_sample = failed_servers()
            of_sample.pop(url, None)
            of_sample[url] = None
            self.last = error
            self.answered = self.answered or not is_away(error)


class ModelClient:
    """The servers of one `reward_models.NAME`. Made and used in one event loop; `watch` runs as long as it is used.

    Args:
        name: in `reward_models`.
        config: its keys.
        api_key: of the servers.
        limit: shared rate limit; None: there is none.
    """

    def __init__(
        self, name: str, config: RewardModelConfig, *, api_key: str | None = None, limit: RateLimit | None = None
    ) -> None:
        self.name = name
        self.config = config
        self._api_key = api_key
        self._limit = limit
        self._router = Router(config.concurrency)
        self._sessions: dict[str, HttpClient] = {}
        self._line: dict[asyncio.Future[None], None] = {}
        self._choosy: dict[asyncio.Future[None], None] = {}
        self._health = _health_call(config.kind)
        self._usual = 0.0
        self._bare = False
        self._answered = False
        self._unhealthy: dict[str, BadAnswer] = {}
        self._refusing: dict[str, BadAnswer | BadRequest] = {}

    @property
    def room(self) -> int:
        """Requests that its servers take from this process at the same time, as they are now; at least 1."""
        return self._router.room

    @property
    def away(self) -> str:
        """Why none of its servers can be asked now; empty while one can, while they sleep, or before anybody looked."""
        if self._bare:
            return f"reward model {self.name} has no server"
        rows = [row for row in self.standings() if not row.leaving]
        if any(row.state in {State.SERVING, State.TRIAL} or not row.why for row in rows):
            return ""
        return "; ".join(row.why for row in rows)

    async def call(self, path: str, body: Mapping[str, Any], *, deadline: float, tokens: int = 0) -> Answer:
        """Post `body` to a server and return its answer, a JSON object. See `ask`."""
        return await self.ask(path, body, lambda answer: answer, deadline=deadline, tokens=tokens)

    async def ask(
        self,
        path: str,
        body: Mapping[str, Any],
        read: Callable[[Answer], _T],
        *,
        deadline: float,
        tokens: int = 0,
    ) -> _T:
        """Post `body` to a server that has room, and return what `read` makes of its answer.

        Safe to repeat: the servers only compute. Cancelling it closes the connection and gives the place back.

        Args:
            path: below the server's URL, with its leading slash.
            body: of the request, sent as JSON.
            read: understands the answer; its `WireError` counts as a fault of the server, and another one is asked.
            deadline: seconds from now for everything: a place, the rate limit, all servers that are tried.
            tokens: that the request will cost, for the rate limit; an estimate will do.

        Raises:
            RewardUnavailable: nobody can be asked: no server works; at once when none has ever answered and all want
                another key.
            RewardBusy: servers work and had no room in time, or the rate limit has let nothing out.
            Unreachable: every server that could be asked has failed; what the last of them failed with.
            WireError: likewise; the last answer makes no sense.
            BadRequest: the server refuses the request itself: asking again does not help.
        """
        now = asyncio.get_running_loop().time()
        call, before = Call("POST", path, body, pooled=True), list(failed_servers())
        request = _Request(call, deadline, now + deadline, now + _CHOOSY * deadline, tokens, before)
        try:
            while True:
                flight = await self._place(request)
                answer = await self._fly(request, flight, read)
                if answer is not None:
                    return answer[0]
        finally:
            await self._settle(request, 0)

    def standings(self) -> list[Server]:
        """How each server is."""
        return self._router.standings()

    async def follow(self, urls: Iterable[str]) -> None:
        """Make `urls` the servers: new ones are checked and used, the others end what they have."""
        added, removed = self._router.follow(urls)
        for url in added:
            logger.info("reward server added", extra={"model": self.name, "url": url})
        for url in removed:
            logger.info("reward server leaves", extra={"model": self.name, "url": url})
        for url in [url for url in self._sessions if url not in self._router.known]:
            await self._sessions.pop(url).close()
        if removed:
            self._wake_all()

    async def check(self) -> None:
        """Check the health of the servers of whom no request says anything, side by side."""
        now = asyncio.get_running_loop().time()
        async with asyncio.TaskGroup() as tasks:
            for url in self._router.quiet(now, LOOK_SECONDS):
                tasks.create_task(self._check(url), name=f"health {url}")

    async def watch(self, servers: Callable[[], Awaitable[Sequence[RewardServer]]]) -> None:
        """Follow a list of servers and check their health, every `LOOK_SECONDS`. Runs until cancelled.

        Args:
            servers: the list as it is now, with those that sleep; while it cannot be read (`Unreachable`) the servers
                stay what they were.
        """
        while True:
            try:
                present = await servers()
                self._bare = not present
                await self.follow(server.url for server in present if server.awake)
            except Unreachable as error:
                logger.warning("list of reward servers", extra={"model": self.name, "why": error.message})
            await self.check()
            await asyncio.sleep(LOOK_SECONDS)

    async def close(self) -> None:
        """Close all connections. A repeat does nothing."""
        while self._sessions:
            await self._sessions.popitem()[1].close()

    async def _place(self, request: _Request) -> Flight:
        """Wait for a server with room and for the turn of the request, and take the place.

        The turn comes first, so that no place is held while a request waits for it.

        Raises:
            StreamrlError: there is none; as of `_too_late`.
        """
        loop = asyncio.get_running_loop()
        while True:
            now = loop.time()
            if now >= request.end:
                self._wake_one()
                self._too_late(request)
            if not self._answered and (denied := self._denied(request)) is not None:
                raise self._nobody(request) from denied
            avoided = request.avoided
            url = self._router.pick(now, avoided)
            if url is not None:
                if await self._take_turn(request):
                    continue  # meanwhile others may have taken the place
                return self._router.began(url, now, max(1, request.tokens))
            others = self._router.waits(now, avoided)
            if request.before and (not others or now >= request.choosy_until):
                del request.before[0]
                continue
            if request.failed and not others:
                await self._all_failed(request)
                continue
            until = request.choosy_until if request.before else request.end
            if (wakes := self._router.wakes(now, avoided)) is not None:
                until = min(until, wakes)
            await self._turn(until - now, self._choosy if avoided else self._line)

    async def _all_failed(self, request: _Request) -> None:
        """All who could be asked have failed. Those that were away, and only those, may be asked again after a pause.

        Raises:
            StreamrlError: one of them answered, and asking the same again is for those who count attempts.
        """
        if request.last is not None and request.answered:
            raise request.last
        request.failed.clear()
        now = asyncio.get_running_loop().time()
        if self._router.pick(now) is not None:
            pause = min(LOOK_SECONDS, _FIRST_PAUSE * 2**request.rounds, request.end - now)
            request.rounds += 1
            await asyncio.sleep(max(0.0, pause))

    async def _turn(self, seconds: float, line: dict[asyncio.Future[None], None]) -> None:
        """Wait for a change of the servers, or `seconds`.

        Who can take any place waits in `_line`, and one place wakes the first; the choosy are woken by each.
        """
        future = asyncio.get_running_loop().create_future()
        line[future] = None
        try:
            async with asyncio.timeout(seconds):
                await future
        except TimeoutError:
            pass
        except asyncio.CancelledError:
            if future.done() and not future.cancelled():
                self._wake_one()  # the place is for the next in line
            raise
        finally:
            line.pop(future, None)

    def _wake_one(self) -> None:
        """A place is free."""
        _wake(self._choosy, len(self._choosy))
        _wake(self._line, 1)

    def _wake_all(self) -> None:
        """Many places are free, or none will be."""
        _wake(self._choosy, len(self._choosy))
        _wake(self._line, len(self._line))

    async def _fly(self, request: _Request, flight: Flight, read: Callable[[Answer], _T]) -> tuple[_T] | None:
        """Ask one server.

        Returns:
            What was read; None when the request should go on to another server.

        Raises:
            BadRequest: it refuses the request.
            Lost: it had less time than answers usually take.
            StreamrlError: most of the time was over before it had the request; as of `_too_late`.
        """
        loop = asyncio.get_running_loop()
        outcome, why, rest = Outcome.CANCELLED, "", None
        try:
            found = (read(await self._answer(request, flight)),)
        except (BadAnswer, BadRequest, Lost, WireError) as error:
            error.message = without(error.message, self._api_key)
            error.args = (error.message, error.hint)
            outcome, why = outcome_of(error), error.message
            if refuses(error):
                self._refusing[flight.url] = error
            if isinstance(error, Lost) and error.late:
                had, fair = loop.time() - flight.began, _FAIR_SHARE * request.seconds
                outcome = Outcome.CANCELLED if had < max(fair, self._usual) else outcome
                if had < fair:
                    self._too_late(request, error)
            rest = error.rest if isinstance(error, BadAnswer) else None
            if outcome in {Outcome.OK, Outcome.CANCELLED}:
                raise
            request.failed_at(flight.url, outcome, error)
            return None
        else:
            outcome = Outcome.OK
            self._answered = True
            self._refusing.pop(flight.url, None)
            seconds = loop.time() - flight.began
            self._usual += (_NEWS if self._usual else 1.0) * (seconds - self._usual)
            return found
        finally:
            self._changed(flight.url, self._router.ended(flight, outcome, loop.time(), why, rest), why)
            self._wake_one()

    async def _answer(self, request: _Request, flight: Flight) -> Answer:
        """The answer of one server, paid for. Errors as of `HttpClient.call`."""
        used = request.tokens
        try:
            answer = await self._session(flight.url).call(request.call, request.end - flight.began, retry=False)
            if not isinstance(answer, dict):
                what = "text (its Content-Type names no JSON)" if isinstance(answer, str) else "no JSON object"
                raise WireError(
                    f"{flight.url}{request.call.path} answered {what}: {without(str(answer), self._api_key)[:100]!r}"
                )
            used = used_tokens(answer, request.tokens)
        except BadAnswer as error:
            used = 0 if error.status in NOT_NOW else used
            raise
        except Lost as error:
            used = used if error.sent else 0
            raise
        finally:
            await self._settle(request, used)
        return answer

    async def _take_turn(self, request: _Request) -> bool:
        """Wait for room in the rate limit, for one request that goes out; False: it has its turn, or needs none.

        Raises:
            RewardBusy: there is none in time.
        """
        if self._limit is None or request.turn is not None:
            return False
        left = max(0.0, request.end - asyncio.get_running_loop().time())
        try:
            request.turn = await self._limit.take(request.tokens, left)
        except RewardUnavailable as error:
            raise RewardBusy(error.message, error.hint) from error
        finally:
            if request.turn is None:
                self._wake_one()  # the place that it saw is for the next in line
        return True

    async def _settle(self, request: _Request, tokens: int) -> None:
        """Say what a request has cost that had its turn. Without one it does nothing."""
        turn, request.turn = request.turn, None
        if turn is not None and self._limit is not None:
            await self._limit.settle(turn, tokens)

    async def _check(self, url: str) -> None:
        """Check the health of one server; a check that fails is no error of ours."""
        why = ""
        try:
            await self._session(url).call(self._health, HEALTH_SECONDS, retry=False)
        except (Unreachable, BadRequest, WireError) as error:
            why = error.message
            if isinstance(error, BadAnswer) and error.status == _WHO_ARE_YOU:
                self._unhealthy[url] = error
                self._wake_all()
        if not why:
            self._unhealthy.pop(url, None)
        now = asyncio.get_running_loop().time()
        self._changed(url, self._router.checked(url, now, healthy=not why, why=why), why)

    def _changed(self, url: str, state: State | None, why: str) -> None:
        """Tell people that a server is in another state, and those who wait to look again."""
        if state is None:
            return
        if state is State.EJECTED:
            logger.warning("reward server is out", extra={"model": self.name, "url": url, "why": why})
        else:
            logger.info("reward server", extra={"model": self.name, "url": url, "state": state.value})
        self._wake_all()

    def _session(self, url: str) -> HttpClient:
        if url not in self._sessions:
            self._sessions[url] = HttpClient(
                url,
                self._api_key,
                "does the server run, and can this host reach it? its log says more",
                key_option=f"reward_models.{self.name}.api_key_file",
                max_body=self.config.max_answer,
            )
        return self._sessions[url]

    def _why(self, request: _Request) -> StreamrlError | None:
        """What a request ends with. A refusal only if all refuse: one server says nothing of those that are loading.

        One whose health check wants another key gets no request that could find this out.
        """
        if request.last is not None and not refuses(request.last):
            return request.last
        refusals = [self._refusing.get(url) or self._unhealthy.get(url) for url in self._router.urls]
        return refusals[0] if refusals and all(refusals) else None

    def _denied(self, request: _Request) -> BadAnswer | BadRequest | None:
        """What a server said, when all want another key; None: one does not, or has not been asked."""
        found = [self._unhealthy.get(url) or self._refusing.get(url) for url in self._router.urls]
        asked = all(url in self._unhealthy or url in request.failed for url in self._router.urls)
        wrong = [error for error in found if error is not None and error.status in _WRONG_KEY]
        return wrong[0] if wrong and asked and len(wrong) == len(found) else None

    def _too_late(self, request: _Request, late: Lost | None = None) -> NoReturn:
        """End a request whose time is over; `late` is of a server that had too little of it.

        Raises:
            StreamrlError: what it failed with, else `RewardBusy` or `RewardUnavailable`: the servers are full, or away.
        """
        if request.last is not None and request.answered:
            raise request.last
        raise self._nobody(request) from self._why(request) or late

    def _nobody(self, request: _Request) -> RewardUnavailable:
        """Why no server has had a request: those that work are full, or none works."""
        if self._router.busy(request.failed):
            return RewardBusy(
                f"the servers of reward model {self.name} had no place for a request in most of"
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
    """Tokens that a server says it read and wrote for an answer; `otherwise` where it does not say."""
    usage = answer.get("usage")
    total = usage.get("total_tokens") if isinstance(usage, Mapping) else None
    return total if type(total) is int and total >= 0 else otherwise


def _wake(line: dict[asyncio.Future[None], None], count: int) -> None:
    """Let the first `count` of a line look again, not counting the cancelled who have not left it yet."""
    for future in list(itertools.islice((future for future in line if not future.done()), count)):
        del line[future]
        future.set_result(None)


def _health_call(kind: str) -> Call:
    """What a server of a kind answers when it can be asked; of others any answer will do, but for "who are you?"."""
    if kind == "vllm":
        return Call("GET", "/health")
    if kind == "sglang":
        return Call("GET", "/ready")
    return Call("GET", "/v1/models" if kind == "openai" else "/", optional=True)
