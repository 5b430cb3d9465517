"""The engines of a run as one generator, for rollout workers: `engine.N` announce themselves in their heartbeats.

```
heartbeats of engine.N -> ServerPool.follow -> AnnouncedEngine        (url, version, load, slots)
generate -> choose -> read_response -> Completion                      (sticky by affinity; a lost call goes elsewhere)
```
A response that an engine did not finish is sampled again as a whole: none has tokens of two engines.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import socket
from collections import OrderedDict
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from functools import partial
from typing import Final, TypeVar
from urllib.parse import urlsplit

from typing_extensions import override

from streamrl.config import RunConfig
from streamrl.config.base import is_loopback
from streamrl.engine import Completion, EngineLoad, Generator, Request, RequestLimits
from streamrl.errors import DeadlyRequest, RetryLater, StreamrlError, Unreachable, WeightsError
from streamrl.http import BadAnswer, HttpClient, Lost
from streamrl.queues.ledgers import Ledgers
from streamrl.servers.check import check_ready
from streamrl.servers.kinds import make_dialect
from streamrl.servers.request import Response, read_response
from streamrl.waits import first_of
from streamrl.weight_sync.manifest import decode

logger = logging.getLogger(__name__)
_T = TypeVar("_T")
_LOOK_SECONDS: Final = 0.25
_COUNT_SECONDS: Final = 5.0
_GONE_SECONDS: Final = 2.0  # without a heartbeat on the board, which a Redis that starts anew has lost for a moment
_CONNECT_SECONDS: Final = 1.0
_SILENT_SECONDS: Final = 10.0  # without a token for any request, after which an engine is asked for a sign of life
_CUT_SECONDS: Final = 4.0  # without that sign, while another engine works, after which its requests go there
_REFUSED_SECONDS: Final = 10.0  # for which an engine may answer 503 to a request
_DEADLY: Final = 3  # engines that died under one request before it gave a token: it is taken for the cause
_PATIENCE: Final = 60.0
_PATIENCE_SHARE: Final = 0.25  # of `episode.deadline`, at most: an episode that is given back begins its time anew
_AFFINITIES: Final = 10_000
FULL: Final = 0.9  # cache use from which an engine gets nothing while others have room
_BLOCK: Final = 16  # tokens of one block of a prefix cache; a shorter prefix is not kept by it


def choose(
    engines: Sequence[AnnouncedEngine], *, cost: int, shared: int, together: int, before: AnnouncedEngine | None = None
) -> AnnouncedEngine:
    """Return the engine for a request of `cost` tokens: the least busy one, those with a full cache last.

    It stays with `before`, whose requests have `shared` tokens in common with it, while that costs less than what it
    waits for: that engine may be busier than the least busy one by `together` requests, a whole group.
    """
    best = min(engines, key=lambda engine: (engine.cache_use >= FULL, engine.burden))
    if before is None or shared < _BLOCK or before.cache_use >= FULL > best.cache_use:
        return best
    return before if before.burden - best.burden <= together * cost / before.slots else best


class Affinities:
    """Where requests went last, by affinity; a sample with turns (`GROUP/SAMPLE`) begins where its group is."""

    def __init__(self) -> None:
        self._names: OrderedDict[str, str] = OrderedDict()

    def __contains__(self, key: str) -> bool:
        return key in self._names

    def get(self, key: str) -> str | None:
        return self._names.get(key) or self._names.get(key.partition("/")[0])

    def set(self, key: str, name: str) -> None:
        for each in filter(None, {key, key.partition("/")[0]}):
            self._names[each] = name
            self._names.move_to_end(each)
            if len(self._names) > _AFFINITIES:
                self._names.popitem(last=False)


class AnnouncedEngine:
    """One life of an engine as its heartbeat describes it; `fields` are those of the last one that was read."""

    def __init__(self, config: RunConfig, name: str, fields: Mapping[str, str], key: str | None) -> None:
        self.name = name
        self.url = fields["url"]
        self.life = fields["salt"]
        self.answers = False
        self.heard_at = asyncio.get_running_loop().time()
        self.cut_off = False
        self.tokens = 0
        self._dialect = make_dialect(config)
        self._client = HttpClient(self.url, key, f"see logs/{name}.log")
        self._gone = asyncio.Event()
        self._aborts: set[asyncio.Task[None]] = set()
        self._told = False
        self._responses: dict[str, Response] = {}
        self._sampled = 0
        self.read(fields)

    def read(self, fields: Mapping[str, str]) -> None:
        self.fields = fields
        self.step, self.version, self.slots = int(fields["step"]), int(fields["version"]), int(fields["slots"])
        self.cache_use = float(fields.get("cache_use", 0.0))
        self.blocked = fields["blocked"] == "1"
        self.missing_since: float | None = None

    @property
    def burden(self) -> float:
        """Tokens that it has to do for this worker, for each slot."""
        return self.tokens / self.slots

    @property
    def usable(self) -> bool:
        return self.answers and self.fields.get("state") == "ready" and not self.blocked

    def listen(self, now: float) -> None:
        """Note when a token came, or none could come; to be called often."""
        sampled = sum(len(response.tokens) for response in self._responses.values())
        stands = self.blocked or self.fields.get("state") != "ready"
        if not self._responses or sampled != self._sampled or stands:
            self._sampled, self.heard_at = sampled, now

    async def knock(self) -> None:
        """Find out whether it takes requests. That it does is a sign of life too: it may have a long prompt to read."""
        try:
            await check_ready(self._client, self._dialect, _CONNECT_SECONDS)
        except StreamrlError as error:
            if not isinstance(error, Lost):  # a gateway answers for it, or it is broken
                self.answers = False
            if not self._told:
                extra = {"engine": self.name, "url": self.url, "why": error.message, "hint": error.hint}
                logger.warning("an engine does not answer", extra=extra)
            self._told = True
            return
        self.answers, self._told = True, False
        self.heard_at = asyncio.get_running_loop().time()

    async def generate(self, request: Request) -> Completion:
        """Sample one response. `Lost`: it died or gave up; `sent`: it gave no token, so it may have died of this."""
        limits = RequestLimits(int(self.fields["context"]), int(self.fields["vocabulary"]))
        response = Response(request, limits, self.version, self.life, self.fields["adapter"])
        self._responses[response.wire_id] = response
        cost = len(request.tokens) + response.longest
        self.tokens += cost
        reading = asyncio.create_task(read_response(self._client, self._dialect, response, seconds=_REFUSED_SECONDS))
        try:
            await first_of(asyncio.wait([reading]), self._gone.wait())
            if not reading.done():
                raise Lost(f"{self.name} is gone", sent=not self.cut_off)
            return reading.result()
        except Lost as error:
            raise Lost(error.message, sent=error.sent and not response.tokens) from error
        except BadAnswer as error:  # within its stream: the server dies, maybe of another request
            if not response.tokens:
                raise
            raise Lost(error.message, sent=False) from error
        finally:
            self.tokens -= cost
            del self._responses[response.wire_id]
            if not reading.done():
                reading.cancel()
                await asyncio.gather(reading, return_exceptions=True)
                if not self._gone.is_set():
                    abort = asyncio.create_task(self._abort(response.wire_id))  # nobody waits for it
                    self._aborts.add(abort)
                    abort.add_done_callback(self._aborts.discard)

    async def _abort(self, wire_id: str) -> None:
        """Tell an engine that does not notice a closed connection."""
        with contextlib.suppress(StreamrlError):
            for call in self._dialect.abort(wire_id):
                await self._client.call(call, _CONNECT_SECONDS, retry=False)

    async def leave(self) -> None:
        """End the calls in flight: this life of the engine is over."""
        self._gone.set()
        if self._aborts:
            await asyncio.wait(self._aborts, timeout=_CONNECT_SECONDS)
        await self._client.close()


class ServerPool(Generator):
    """All engines of a run, as their heartbeats come and go; `follow` keeps the list while it is open."""

    def __init__(self, config: RunConfig, ledgers: Ledgers, key: str | None) -> None:
        self._config = config
        self._ledgers = ledgers
        self._key = key
        self._known: dict[str, AnnouncedEngine] = {}
        self._out_of_reach: set[str] = set()
        self._affinities = Affinities()
        self._looked = asyncio.Condition()
        self._newest_step: int | None = None
        self._step = 0
        self._workers = 1
        self._calls = self._tokens = self._lost = 0
        self._busy = self._counted_at = 0.0
        self._patience = min(_PATIENCE, _PATIENCE_SHARE * config.episode.deadline)

    @contextlib.asynccontextmanager
    async def follow(self) -> AsyncIterator[None]:
        """Know the engines and the newest version for this block."""
        try:
            async with asyncio.TaskGroup() as tasks:
                works = self._keep_looking(), self._watch_versions(), self._count_workers()
                following = [tasks.create_task(work) for work in works]
                yield
                for task in following:
                    task.cancel()
        finally:
            for engine in self._known.values():
                await engine.leave()

    async def first(self) -> None:
        """Return when an engine can be called, and the newest version is known."""
        while not (self._usable() and self._newest_step is not None):
            await self.changed()

    async def changed(self) -> None:
        """Return when the heartbeats were read once more."""
        async with self._looked:
            await self._looked.wait()

    def behind(self) -> int:
        """How many steps the newest engine is behind the newest version that is published."""
        self._step = max((engine.step for engine in self._usable()), default=self._step)
        return (self._newest_step or 0) - self._step

    def figures(self) -> dict[str, int | float]:
        return {"lost_calls": self._lost}  # responses that were sampled again

    # --- Generator ---------------------------------------------------------------------------------------------------

    @override
    async def generate(self, request: Request) -> Completion:
        # `RetryLater`: no engine for a while. `DeadlyRequest`: several died of this request.
        loop = asyncio.get_running_loop()
        deaths, end = 0, loop.time() + self._patience
        while True:
            engine = await self._found(partial(self._choose, request), end)
            self._affinities.set(request.affinity, engine.name)  # the rest of its group comes at the same time
            self._count(1)
            try:
                completion = await engine.generate(request)
            except Unreachable as error:
                engine.answers = False  # until it answers again
                failed = isinstance(error, BadAnswer) and error.status == 500
                deaths += failed or (isinstance(error, Lost) and error.sent)
                self._lost += 1
                if not isinstance(error, BadAnswer):  # one that answers so may do it for ever
                    end = loop.time() + self._patience
                extra = {"request": request.id, "engine": engine.name, "why": error.message}
                logger.info("a response is sampled again", extra=extra)
                if deaths == _DEADLY:
                    raise DeadlyRequest(
                        f"{deaths} engines were lost under request {request.id!r} before it gave a token:"
                        f" {error.message}"
                    ) from error
            else:
                self._tokens += len(completion.tokens)
                return completion
            finally:
                self._count(-1)

    @override
    def load(self) -> EngineLoad:
        usable = self._fresh(self._usable())
        self._count(0)
        return EngineLoad(
            running=self._calls,
            waiting=0,
            tokens_sampled=self._tokens,
            busy_seconds=self._busy,
            version=max((engine.version for engine in usable), default=0),
            capacity=math.ceil(sum(engine.slots for engine in usable) / self._workers),
            cache_use=max((engine.cache_use for engine in usable), default=0.0),
            servers=len(usable),
        )

    @override
    async def health(self) -> None:
        await self._found(self._usable, asyncio.get_running_loop().time() + self._patience)

    def _count(self, more: int) -> None:
        """Count calls that engines have; busy is the time with any."""
        now = asyncio.get_running_loop().time()
        self._busy += now - self._counted_at if self._calls else 0.0
        self._counted_at, self._calls = now, self._calls + more

    # --- the choice --------------------------------------------------------------------------------------------------

    def _usable(self) -> list[AnnouncedEngine]:
        return [engine for engine in self._known.values() if engine.usable]

    def _fresh(self, usable: list[AnnouncedEngine]) -> list[AnnouncedEngine]:
        oldest = (self._newest_step or 0) - self._config.max_staleness
        return [engine for engine in usable if engine.step >= oldest]

    async def _found(self, find: Callable[[], _T | None], end: float) -> _T:
        """What `find` finds among the engines, asked anew when they change. `RetryLater`: nothing by then."""
        loop = asyncio.get_running_loop()
        while loop.time() < end:
            if found := find():
                return found
            if any(engine.blocked for engine in self._known.values()):
                end = loop.time() + self._patience  # they come back: the caller's own deadline holds
            await first_of(self.changed(), seconds=end - loop.time())
        raise RetryLater(f"no engine answered for {self._patience:g} s")

    def _choose(self, request: Request) -> AnnouncedEngine | None:
        """The least busy one with new enough weights. A conversation stays where it is, and may go on anywhere."""
        usable = self._usable()
        before = self._affinities.get(request.affinity)
        found = self._fresh(usable)
        if request.affinity in self._affinities and "/" in request.affinity:
            found = found or usable
            found += [engine for engine in usable if engine.name == before and engine not in found]
        if not found:
            return None
        return choose(
            found,
            cost=len(request.tokens) + request.max_new_tokens,
            shared=len(request.tokens),
            together=self._config.sampling.responses,
            before=next((engine for engine in found if engine.name == before), None),
        )

    # --- what is there -----------------------------------------------------------------------------------------------

    async def _watch_versions(self) -> None:
        seen = 0
        while True:
            if found := await self._ledgers.weights.after(seen, 1.0):
                seen = found[0]
                with contextlib.suppress(WeightsError):  # engines refuse it too
                    self._newest_step = decode(found[1]).step

    async def _keep_looking(self) -> None:
        while True:
            await self._look()
            async with self._looked:
                self._looked.notify_all()
            await asyncio.sleep(_LOOK_SECONDS)

    async def _look(self) -> None:
        board = await self._ledgers.roles.read("engine.")
        now = asyncio.get_running_loop().time()
        for name, fields in board.items():
            if "url" in fields and _reachable(fields["url"], fields["host"]):
                await self._meet(name, fields)
            elif "url" in fields and name not in self._out_of_reach:
                self._out_of_reach.add(name)
                hint = "set engine.host to an address that other hosts reach"
                logger.warning("an engine listens on its own host alone", extra={"engine": name, "hint": hint})
        for engine in [each for each in self._known.values() if "url" not in board.get(each.name, {})]:
            # counted from here, because a Redis that was away says nothing about its engines
            engine.missing_since = engine.missing_since or now
            if engine.missing_since + _GONE_SECONDS <= now:
                await self._part_with(engine)
        await self._part_with_cut_off()

    async def _part_with_cut_off(self) -> None:
        """Leave engines that say they are ready, and of which nothing comes here: cut off, or standing still."""
        now = asyncio.get_running_loop().time()
        for engine in self._known.values():
            engine.listen(now)
        silent = [engine for engine in self._known.values() if now - engine.heard_at > _SILENT_SECONDS]
        asked = [engine for engine in self._known.values() if engine in silent or not engine.answers]
        await asyncio.gather(*(engine.knock() for engine in asked))
        others = any(engine.usable and now - engine.heard_at <= _SILENT_SECONDS for engine in self._known.values())
        for engine in silent:
            if not others:  # which may be as cut off
                engine.heard_at = max(engine.heard_at, now - _SILENT_SECONDS)
            elif now - engine.heard_at > _SILENT_SECONDS + _CUT_SECONDS:
                engine.cut_off = True
                await self._part_with(engine)

    async def _count_workers(self) -> None:
        """The workers share the slots of the engines."""
        while True:
            self._workers = max(1, len(await self._ledgers.roles.read("rollout.")))
            await asyncio.sleep(_COUNT_SECONDS)

    async def _meet(self, name: str, fields: Mapping[str, str]) -> None:
        known = self._known.get(name)
        if known is not None and known.life == fields["salt"]:
            known.read(fields)
            return
        if known is not None:
            if float(fields["started"]) < float(known.fields["started"]):
                return  # an older process of this name, which still says that it is there
            await self._part_with(known)
        self._known[name] = AnnouncedEngine(self._config, name, fields, self._key)
        logger.info("engine found", extra={"engine": name, "url": fields["url"]})

    async def _part_with(self, engine: AnnouncedEngine) -> None:
        logger.info("engine gone", extra={"engine": engine.name, "url": engine.url})
        del self._known[engine.name]
        await engine.leave()


def _reachable(url: str, host: str) -> bool:
    """Whether this host can reach it: not one on the loopback interface of another host."""
    return host == socket.gethostname() or not is_loopback(urlsplit(url).hostname or "")
