"""The rollout replicas of a run as one generator, for processes that have no engine (role `agent`).

```
heartbeats of rollout.N -> Replicas.follow -> CalledReplica     (its URL, its step, its slots)
generate -> choose -> CalledReplica.generate -> Completion      (sticky by affinity; a lost call goes to another one)
```
Replicas bring their weights up to date by themselves. A call that a replica did not answer is made again as a whole: no
response has tokens of two replicas.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import uuid
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import aclosing
from dataclasses import replace
from functools import partial
from typing import Final, TypeVar

from typing_extensions import override

from streamrl.config import RunConfig
from streamrl.engine import Completion, EngineLoad, Generator, Request
from streamrl.errors import DataError, RetryLater, Unreachable, WeightsError
from streamrl.http import BadAnswer, HttpClient, Lost
from streamrl.producers.group.flights import InFlightRequest
from streamrl.producers.group.load_balancing import Affinities, Place, choose
from streamrl.queues.ledgers import Ledgers
from streamrl.servers.native import NativeDialect
from streamrl.waits import first_of
from streamrl.weight_sync.files import TOKEN_FILE
from streamrl.weight_sync.manifest import decode

logger = logging.getLogger(__name__)
_T = TypeVar("_T")
URL: Final = "generates_at"
"""Field of a replica's heartbeat: where agents call it."""
STEP: Final = "step"
"""Field of a replica's heartbeat: optimizer step of its weights."""
_LOOK_SECONDS: Final = 0.25
_COUNT_SECONDS: Final = 5.0
_GONE_SECONDS: Final = 2.0
"""Without a heartbeat on the board, which a Redis that starts anew has lost for a moment."""
_CONNECT_SECONDS: Final = 1.0
_LOSSES: Final = 3
"""Replicas that may be lost while they answer one call: after so many it is taken for the cause."""
_PATIENCE: Final = 60.0
_PATIENCE_SHARE: Final = 0.25
"""Of `episode.deadline`, at most: an episode that is given back begins its time anew."""


class CalledReplica:
    """One replica as its heartbeat describes it; `fields` are those of the last one that was read."""

    def __init__(self, name: str, url: str, dialect: NativeDialect, key: str) -> None:
        self.name = name
        self.url = url
        self.fields: Mapping[str, str] = {}
        self.missing_since: float | None = None
        self.answers = False
        self.tokens = 0
        self._dialect = dialect
        self._client = HttpClient(url, key, "see its log", key_option=f"RUN_DIR/{TOKEN_FILE}", direct=True)
        self._gone = asyncio.Event()
        self._told = False

    @property
    def step(self) -> int:
        return int(self.fields.get(STEP, 0))

    @property
    def version(self) -> int:
        return int(self.fields.get("version", 0))

    @property
    def capacity(self) -> int:
        return int(self.fields.get("capacity", 0))

    @property
    def cache_use(self) -> float:
        return float(self.fields.get("cache_use", 0.0))

    @property
    def usable(self) -> bool:
        return self.answers and self.capacity > 0 and self.fields.get("state") == "ready"

    async def knock(self) -> None:
        """Find out whether it answers, and accepts the key of the run."""
        try:
            await self._client.call(self._dialect.ready(), _CONNECT_SECONDS, retry=False)
        except (Unreachable, DataError) as error:
            if not self._told:
                extra = {"replica": self.name, "url": self.url, "why": error.message, "hint": error.hint}
                logger.warning("a replica does not answer", extra=extra)
            self._told = True
        else:
            self.answers, self._told = True, False

    async def generate(self, request: Request) -> Completion:
        """Sample one response. `Unreachable`: no answer, or an error of the replica; `Lost.sent`: it may have begun."""
        loop = asyncio.get_running_loop()
        flight = InFlightRequest(request, uuid.uuid4().hex, None, loop.time())
        flight.send(self.version)
        cost = len(request.tokens) + request.max_new_tokens
        self.tokens += cost
        try:
            await first_of(self._converse(flight), self._gone.wait())
        finally:
            self.tokens -= cost
        if not flight.outcome.done():
            raise Lost(f"{self.name} is gone")
        return flight.outcome.result()

    async def _converse(self, flight: InFlightRequest) -> None:
        call = self._dialect.generation(replace(flight.request, id=flight.wire_id), version=0)
        async with aclosing(self._client.stream(call, _CONNECT_SECONDS)) as messages:
            async for message in messages:
                chunk = self._dialect.chunk(message, received=flight.heard)
                flight.hear(chunk)
                if chunk.finish is not None:
                    flight.land(chunk.finish, asyncio.get_running_loop().time(), chunk.runs)
                    return
        raise Lost(f"{self.url} ended a response without a finish reason")

    async def leave(self) -> None:
        """End the calls in flight: this process of the replica is gone."""
        self._gone.set()
        await self._client.close()


class Replicas(Generator):
    """All replicas of a run, as their heartbeats come and go; `follow` keeps the list while it is open."""

    def __init__(self, config: RunConfig, ledgers: Ledgers, key: str) -> None:
        self._config = config
        self._ledgers = ledgers
        self._key = key
        self._dialect = NativeDialect(config)
        self._known: dict[str, CalledReplica] = {}
        self._affinities = Affinities()
        self._looked = asyncio.Condition()
        self._newest_step = self._step = 0
        self._knows_newest = False
        self._agents = 1
        self._calls = self._tokens = self._lost = 0
        self._busy = 0.0
        self._busy_since = 0.0
        self._patience = min(_PATIENCE, _PATIENCE_SHARE * config.episode.deadline)

    @contextlib.asynccontextmanager
    async def follow(self) -> AsyncIterator[None]:
        """Know the replicas and the newest version for this block."""
        try:
            async with asyncio.TaskGroup() as tasks:
                works = self._keep_looking(), self._watch_versions(), self._count_agents()
                following = [tasks.create_task(work) for work in works]
                yield
                for task in following:
                    task.cancel()
        finally:
            for replica in self._known.values():
                await replica.leave()

    async def first(self) -> None:
        """Return when a replica can be called, and the newest version is known."""
        while not (self._usable() and self._knows_newest):
            await self.changed()

    async def changed(self) -> None:
        """Return when the heartbeats were read once more."""
        async with self._looked:
            await self._looked.wait()

    def behind(self) -> int:
        """How many steps the newest replica is behind the newest version that is published."""
        self._step = max((replica.step for replica in self._usable()), default=self._step)
        return self._newest_step - self._step

    def figures(self) -> dict[str, int | float]:
        """Calls that were made again because their replica was lost."""
        return {"lost_calls": self._lost}

    # --- Generator ---------------------------------------------------------------------------------------------------

    @override
    async def generate(self, request: Request) -> Completion:
        # `RetryLater`: none could be called for a while. `DataError`: several were lost while they answered this call.
        loop = asyncio.get_running_loop()
        losses, end = 0, None
        self._enter()
        try:
            while True:
                replica = await self._found(partial(self._choose, request), end or loop.time() + self._patience)
                try:
                    completion = await replica.generate(request)
                except Unreachable as error:
                    replica.answers = False
                    began = _had_begun(error)
                    losses += began
                    self._lost += began
                    end = None if began else end or loop.time() + self._patience
                    extra = {"request": request.id, "replica": replica.name, "why": error.message}
                    logger.info("a call is made again", extra=extra)
                    if losses == _LOSSES:
                        raise _deadly(request, losses, error) from error
                else:
                    self._affinities.set(request.affinity, replica.name)
                    self._tokens += len(completion.tokens)
                    return completion
        finally:
            self._leave()

    @override
    def load(self) -> EngineLoad:
        usable = self._usable()
        since = asyncio.get_running_loop().time() - self._busy_since if self._calls else 0.0
        return EngineLoad(
            running=self._calls,
            waiting=0,
            tokens_sampled=self._tokens,
            busy_seconds=self._busy + since,
            version=max((replica.version for replica in usable), default=0),
            capacity=math.ceil(sum(replica.capacity for replica in self._fresh(usable)) / self._agents),
            servers=len(usable),
        )

    @override
    async def health(self) -> None:
        await self._found(self._usable, asyncio.get_running_loop().time() + self._patience)

    def _enter(self) -> None:
        if not self._calls:
            self._busy_since = asyncio.get_running_loop().time()
        self._calls += 1

    def _leave(self) -> None:
        self._calls -= 1
        if not self._calls:
            self._busy += asyncio.get_running_loop().time() - self._busy_since

    # --- the choice --------------------------------------------------------------------------------------------------

    def _usable(self) -> list[CalledReplica]:
        return [replica for replica in self._known.values() if replica.usable]

    def _fresh(self, usable: list[CalledReplica]) -> list[CalledReplica]:
        oldest = self._newest_step - self._config.max_staleness
        return [replica for replica in usable if replica.step >= oldest]

    async def _found(self, find: Callable[[], _T | None], end: float) -> _T:
        """What `find` finds among the replicas, asked anew when they change. RetryLater: nothing by then."""
        loop = asyncio.get_running_loop()
        while loop.time() < end:
            if found := find():
                return found
            await first_of(self.changed(), seconds=end - loop.time())
        raise RetryLater(f"no replica answered for {self._patience:g} s")

    def _choose(self, request: Request) -> CalledReplica | None:
        """The least busy one with new enough weights. A conversation stays where it is, and may go on anywhere."""
        usable = self._usable()
        before = self._affinities.get(request.affinity)
        fresh = self._fresh(usable)
        found = usable if before and not fresh else fresh
        found += [replica for replica in usable if replica.name == before and replica not in found]
        if not found:
            return None
        at = choose(
            [Place(replica.tokens, replica.capacity, replica.cache_use) for replica in found],
            cost=len(request.tokens) + request.max_new_tokens,
            shared=len(request.tokens),
            together=self._config.sampling.responses,
            before=next((at for at, replica in enumerate(found) if replica.name == before), None),
        )
        return found[at]

    # --- what is there -----------------------------------------------------------------------------------------------

    async def _watch_versions(self) -> None:
        seen = 0
        while True:
            found = await self._ledgers.weights.after(seen, 1.0)
            if found is not None:
                seen = found[0]
                with contextlib.suppress(WeightsError):  # replicas refuse it too
                    self._newest_step = decode(found[1]).step
                    self._knows_newest = True

    async def _keep_looking(self) -> None:
        while True:
            await self._look()
            async with self._looked:
                self._looked.notify_all()
            await asyncio.sleep(_LOOK_SECONDS)

    async def _look(self) -> None:
        board = await self._ledgers.roles.read("rollout.")
        now = asyncio.get_running_loop().time()
        for name, fields in board.items():
            if URL in fields:
                await self._meet(name, fields)
        for replica in [each for each in self._known.values() if URL not in board.get(each.name, {})]:
            # counted from here, because a Redis that was away says nothing about its replicas
            replica.missing_since = replica.missing_since or now
            if replica.missing_since + _GONE_SECONDS <= now:
                await self._part_with(replica)
        await asyncio.gather(*(replica.knock() for replica in self._known.values() if not replica.answers))

    async def _count_agents(self) -> None:
        """The agents share what the replicas can decode."""
        while True:
            self._agents = max(1, len(await self._ledgers.roles.read("agent.")))
            await asyncio.sleep(_COUNT_SECONDS)

    async def _meet(self, name: str, fields: Mapping[str, str]) -> None:
        known = self._known.get(name)
        if known is not None and known.url != fields[URL]:
            await self._part_with(known)
            known = None
        if known is None:
            known = self._known[name] = CalledReplica(name, fields[URL], self._dialect, self._key)
            logger.info("replica found", extra={"replica": name, "url": known.url})
        known.fields, known.missing_since = fields, None

    async def _part_with(self, replica: CalledReplica) -> None:
        logger.info("replica gone", extra={"replica": replica.name, "url": replica.url})
        del self._known[replica.name]
        await replica.leave()


def _had_begun(error: Unreachable) -> bool:
    """Whether a replica may have been answering when it failed: an engine's death is answered with 500."""
    return error.status == 500 if isinstance(error, BadAnswer) else not isinstance(error, Lost) or error.sent


def _deadly(request: Request, losses: int, last: Unreachable) -> DataError:
    return DataError(f"{losses} replicas were lost while they answered request {request.id!r}: {last.message}")
