"""The servers of a group: start, newest weights, requests, death, and the pause before the next start."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Final, TypeAlias

from streamrl.config import RunConfig
from streamrl.engine import Completion, EngineLoad, Request, StreamingEngine
from streamrl.errors import ConfigError, StreamrlError, Unreachable, WeightsError, unwrap
from streamrl.producers.group.concurrency import Concurrency
from streamrl.producers.group.request import RoutedRequest
from streamrl.restarts import Deaths, RestartPolicy
from streamrl.weight_sync.manifest import Pair
from streamrl.weight_sync.tensors import Version

logger = logging.getLogger(__name__)

Apply: TypeAlias = Callable[[Version], Awaitable[None]]
Source: TypeAlias = Callable[[Apply], Awaitable[object]]
"""Hands the newest version to an `apply`, as often as it is asked to (`Follower.again`)."""

_LOOK_SECONDS: Final = 0.25
_HEALTH_LOOKS: Final = 4
_CLOSE_SECONDS: Final = 60.0
_GRACE_SECONDS: Final = 1.0
"""A server is left behind when it takes longer than twice the time of the first server plus this."""
_REFUSALS: Final = 3
"""Times that a server may refuse weights which others have taken, before it is started anew."""
_REFUSED_PAUSE: Final = 1.0
_FOR_EVER: Final = 1 << 30
_NO_VERSION: Final[Pair] = (0, 0)


class MemberState(StrEnum):
    STARTING = "starting"
    """Is being started or connected to, or gets its first weights."""
    READY = "ready"
    """Can serve; whether it gets prompts depends on its weights."""
    LEAVING = "leaving"
    """Was removed; ends what it has."""
    WAITING = "waiting"
    """Died, and waits for its next life."""
    REFUSED = "refused"
    """Cannot be used as it is (wrong model, no environment); final."""
    GONE = "gone"
    """Died too often, or left; final."""


@dataclass(frozen=True, slots=True)
class ServerSpec:
    """A server of a group; `make` makes its engine, for one life."""

    name: str  # its URL, or `server.N`
    make: Callable[[], StreamingEngine]
    ours: bool  # started by streamrl; any other server may come back at any time


class Member:
    """One server of the pool, over all its lives (`engine` is None between them)."""

    life: asyncio.Task[None]

    def __init__(self, spec: ServerSpec, pool: ServerPool, policy: RestartPolicy, most: int) -> None:
        self.name = spec.name
        self.state = MemberState.STARTING
        self.why = ""
        self.error: StreamrlError | None = None
        self.engine: StreamingEngine | None = None
        self.pair: Pair = _NO_VERSION  # the version that it holds
        self.updating = False
        self.requests: set[RoutedRequest] = set()
        self.reserved: RoutedRequest | None = None  # the only request that may be placed on it
        self.lives = 0
        self.leaving_since: float | None = None  # when it was removed, or its requests were last sent away
        self._make = spec.make
        self._pool = pool
        self._most = most
        self._deaths = Deaths(policy if spec.ours else replace(policy, max_restarts=_FOR_EVER))
        self._concurrency = Concurrency(most)
        self._peak = 0
        self._load = EngineLoad(0, 0, 0, 0.0, 0)
        self._preempted_before = 0
        self._suspected = False
        self._look = asyncio.Event()
        self._behind = asyncio.Event()
        self._waiters: list[tuple[Pair, asyncio.Future[Exception | None]]] = []
        self._leave = asyncio.Event()

    # --- what the group reads ----------------------------------------------------------------------------------------

    @property
    def limit(self) -> int:
        return self._concurrency.limit

    @property
    def serving(self) -> bool:
        return self.state is MemberState.READY and self.engine is not None and not self._suspected

    @property
    def has_room(self) -> bool:
        return self.serving and self.reserved is None and len(self.requests) < self.limit

    @property
    def final(self) -> bool:
        """Whether it never comes back by itself."""
        return self.state in {MemberState.REFUSED, MemberState.GONE}

    @property
    def load(self) -> EngineLoad:
        """Its load as last seen; preemptions are those of all lives."""
        return replace(self._load, preemptions=self._preempted_before + self._load.preemptions)

    # --- what the group does -----------------------------------------------------------------------------------------

    def take(self, request: RoutedRequest) -> None:
        self.requests.add(request)
        self._peak = max(self._peak, len(self.requests))

    async def generate(self, request: RoutedRequest, rest: Request) -> Completion | None:
        """Continue a request that it was given; None when it died before. `Unreachable` when it dies meanwhile."""
        if self.engine is None:
            return None
        request.begin()
        piece = await self.engine.generate(rest, request.hear)
        request.came(piece)
        return piece

    def release(self, request: RoutedRequest) -> None:
        self.requests.discard(request)
        if self._leave.is_set() and not self.requests:
            self._look.set()

    def suspect(self) -> None:
        """A request failed as if the server were dead: send no more requests until a health check, which starts now."""
        self._suspected = True
        self._look.set()

    def reach(self, pair: Pair) -> asyncio.Future[Exception | None]:
        """Resolves to None when it holds this or a newer version, to the error when it refuses this one or dies."""
        future: asyncio.Future[Exception | None] = asyncio.get_running_loop().create_future()
        self._waiters.append((pair, future))
        self._behind.set()
        return future

    def catch_up(self) -> None:
        self._behind.set()

    def leave(self) -> None:
        self.leaving_since = asyncio.get_running_loop().time()
        self._leave.set()
        self._look.set()
        if self.state is MemberState.READY:
            self.state = MemberState.LEAVING

    # --- its life ----------------------------------------------------------------------------------------------------

    async def live(self) -> None:
        """Live until it leaves, cannot be used, or has died too often. Raises nothing but a cancellation."""
        loop = asyncio.get_running_loop()
        try:
            while await self._unless_leaving(self._pool.awake.wait()):
                self._deaths.started()
                self.state = MemberState.STARTING
                try:
                    await self._one_life()
                    break
                except Exception as error:  # any error ends this life only: it is recorded, and the next one is tried
                    if _cancelling():  # a task group that fails hides the cancellation in its error
                        raise asyncio.CancelledError from error
                    cause = unwrap(error)
                pause = self._died(cause, loop.time())
                self._pool.changed()
                if pause is None:
                    return
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(pause):
                        await self._leave.wait()
            self.state, self.why = MemberState.GONE, "removed"
        finally:
            self._settle(Unreachable(f"server {self.name} has left"))
            self._pool.changed()

    def _died(self, cause: BaseException, now: float) -> float | None:
        self.why = cause.message if isinstance(cause, StreamrlError) else f"{type(cause).__name__}: {cause}"
        self.error = cause if isinstance(cause, StreamrlError) else Unreachable(f"server {self.name}: {self.why}")
        self._settle(Unreachable(f"server {self.name} died: {self.why}"))
        pause = None if isinstance(cause, ConfigError) else self._deaths.died(now, random.random())  # noqa: S311
        extra = {"server": self.name, "why": self.why, "hint": self.error.hint, "pause": pause}
        if isinstance(cause, ConfigError):
            self.state = MemberState.REFUSED
            logger.error("server refused", extra=extra)
        elif pause is None:
            self.state = MemberState.GONE
            logger.error("server given up", extra={**extra, "deaths": self._deaths.recent})
        else:
            self.state = MemberState.WAITING
            logger.warning("server died", extra=extra, exc_info=None if isinstance(cause, StreamrlError) else cause)
        return pause

    async def _one_life(self) -> None:
        self.lives += 1
        self.pair, self._suspected = _NO_VERSION, False
        self._concurrency = Concurrency(self._most)
        engine = self._make()
        try:
            if not await self._unless_leaving(self._begin(engine)):
                return
            self.state, self.why, self.error = MemberState.READY, "", None
            self._deaths.ready(asyncio.get_running_loop().time())
            logger.info("server ready", extra={"server": self.name, "version": self.pair, "life": self.lives})
            self._behind.set()
            self._pool.changed()
            async with asyncio.TaskGroup() as tasks:
                following = tasks.create_task(self._follow(), name=f"weights of {self.name}")
                await self._watch(engine)
                following.cancel()
        finally:
            self.engine = None
            self._preempted_before, self._load = self.load.preemptions, EngineLoad(0, 0, 0, 0.0, 0)
            try:
                async with asyncio.timeout(_CLOSE_SECONDS):
                    await engine.close()
            except Exception:  # a failed close must not end the group
                logger.exception("server does not close", extra={"server": self.name})

    async def _begin(self, engine: StreamingEngine) -> None:
        await engine.start()
        if self._pool.paused:
            await engine.pause()
        self.engine = engine
        with contextlib.suppress(WeightsError):  # it gets no prompt before it has taken a version
            await self._take_newest()

    async def _unless_leaving(self, work: Awaitable[object]) -> bool:
        task, leaving = asyncio.ensure_future(work), asyncio.ensure_future(self._leave.wait())
        try:
            await asyncio.wait([task, leaving], return_when=asyncio.FIRST_COMPLETED)
            if not task.done() or self._leave.is_set():
                return False
            await task
            return True
        finally:
            leaving.cancel()
            if not task.done():
                task.cancel()
                await asyncio.gather(task, return_exceptions=True)

    async def _watch(self, engine: StreamingEngine) -> None:
        looks = 0
        while not (self._leave.is_set() and not self.requests):
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_LOOK_SECONDS):
                    await self._look.wait()
            self._look.clear()
            looks += 1
            if self._suspected or looks % _HEALTH_LOOKS == 0:
                await engine.health()
                self._suspected = False
            self._see(engine.load())

    def _see(self, load: EngineLoad) -> None:
        self._load = load
        if self.updating:
            self._concurrency.interrupted()
        else:
            now, before = asyncio.get_running_loop().time(), self.limit
            if self._concurrency.see(now, load, in_flight=len(self.requests), peak=self._peak) != before:
                logger.debug("concurrency", extra={"server": self.name, "limit": self.limit, "before": before})
        self._peak = len(self.requests)
        self._pool.changed()

    # --- its weights -------------------------------------------------------------------------------------------------

    async def _follow(self) -> None:
        """Apply every new version and retry those that other servers took; `Unreachable` when it keeps refusing."""
        refusals = 0
        while True:
            await self._behind.wait()
            self._behind.clear()
            try:
                await self._take_newest()
                refusals = 0
            except WeightsError as error:
                logger.error(  # noqa: TRY400 - the message says it all
                    "server refuses weights", extra={"server": self.name, "why": error.message, "hint": error.hint}
                )
                self.why = error.message
                self._settle(error)
                refusals += 1
                if not self._pool.held_elsewhere(self):
                    continue
                if refusals >= _REFUSALS:
                    raise Unreachable(
                        f"server {self.name} refuses weights that other servers have taken: {error.message}"
                    ) from error
                await asyncio.sleep(_REFUSED_PAUSE * refusals)
                self._behind.set()

    async def _take_newest(self) -> None:
        while (target := self._pool.target) is not None and self.pair < target:
            self.updating = True
            try:
                await self._pool.deliver(self._apply)
            finally:
                self.updating = False
                self._concurrency.interrupted()
            self._pool.changed()
            if self.pair < target:
                raise WeightsError(f"version {target} is no longer available", "the next version is loaded instead")
        self._settle(None)

    async def _apply(self, version: Version) -> None:
        assert self.engine is not None
        await self.engine.apply(version)
        self.pair, self.why = version.pair, ""

    def _settle(self, error: Exception | None) -> None:
        waiting, self._waiters = self._waiters, []
        for pair, future in waiting:
            if error is None and self.pair < pair:
                self._waiters.append((pair, future))
            elif not future.done():
                future.set_result(error)


class ServerPool:
    def __init__(self, config: RunConfig) -> None:
        self.changed: Callable[[], None] = lambda: None  # called when a server can take more, or has gone
        self.awake = asyncio.Event()  # set while servers may use their devices
        self.awake.set()
        self.paused = False  # servers that come later are paused as well
        self.target: Pair | None = None  # the newest version; None before the first
        self._config = config
        self._policy = RestartPolicy.of(config.supervisor)
        self._members: dict[str, Member] = {}
        self._kept: Version | None = None
        self._source: Source | None = None
        self._before: Pair = _NO_VERSION
        self._served_at = 0.0
        self._forgotten_preemptions = 0
        self._tasks: asyncio.TaskGroup

    @property
    def members(self) -> list[Member]:
        return list(self._members.values())

    @property
    def serving(self) -> list[Member]:
        return [member for member in self._members.values() if member.serving]

    @property
    def preemptions(self) -> int:
        return self._forgotten_preemptions + sum(member.load.preemptions for member in self._members.values())

    @property
    def reasons(self) -> str:
        return "; ".join(f"{member.name}: {member.why or member.state}" for member in self._members.values())

    # --- weights, pause ----------------------------------------------------------------------------------------------

    @property
    def newest(self) -> Pair:
        return max((member.pair for member in self.serving), default=_NO_VERSION)

    def allows(self, member: Member) -> bool:
        """Whether the version that a server holds may answer a new request.

        It may with the newest version that any server holds, and with the one before while it is loading the newest. A
        server that missed a version loads the newest first.
        """
        return member.pair >= self.newest or (member.updating and member.pair >= self._before)

    def held_elsewhere(self, member: Member) -> bool:
        target = self.target
        return target is not None and any(other.pair >= target for other in self.serving if other is not member)

    def follow(self, source: Source) -> None:
        self._source = source

    async def deliver(self, apply: Apply) -> None:
        """Hand over the version that `apply` of this pool has got last, else what the source has."""
        kept = self._kept
        if kept is not None:
            with kept.readers:
                await apply(kept)
        elif self._source is not None:
            await self._source(apply)

    async def apply(self, version: Version) -> None:
        if self.target is not None and version.pair < self.target:
            raise WeightsError(f"version {version.pair} is older than {self.target}, which is in force")
        self.target, self._kept = version.pair, version
        self._before = self.newest
        try:
            errors = await self._first_come({member.reach(version.pair) for member in self.serving}, version)
        finally:
            if self._source is not None and self._kept is version:
                self._kept = None  # the caller may free the version now
        refusals = [error for error in errors if isinstance(error, WeightsError)]
        if refusals and len(refusals) == len(errors):
            raise refusals[0]
        for member in self.serving:
            member.catch_up()

    async def _first_come(
        self, waiting: set[asyncio.Future[Exception | None]], version: Version
    ) -> list[Exception | None]:
        """Return the results of the servers, without those that are much slower than the first.

        A version without a source is gone when the call that brought it returns, so then all servers are awaited.
        """
        loop = asyncio.get_running_loop()
        start, ended, limit = loop.time(), set[asyncio.Future[Exception | None]](), None
        while waiting:
            done, waiting = await asyncio.wait(waiting, timeout=limit, return_when=asyncio.FIRST_COMPLETED)
            ended |= done
            if not done:
                logger.warning("servers left behind", extra={"version": version.number, "servers": len(waiting)})
                break
            if limit is None and self._source is not None and any(future.result() is None for future in done):
                limit = max(_GRACE_SECONDS, loop.time() - start)
        return [future.result() for future in ended]

    # --- membership --------------------------------------------------------------------------------------------------

    async def run(self, first: Sequence[ServerSpec], running: asyncio.Event) -> None:
        """Own the tasks of all servers until cancelled; sets `running` once those of `first` exist.

        Raises an `ExceptionGroup` with `Unreachable` when no server is left that can serve or could come back.
        """
        try:
            async with asyncio.TaskGroup() as self._tasks:
                for spec in first:
                    self.add(spec)
                self._served_at = asyncio.get_running_loop().time()
                running.set()
                while True:
                    await asyncio.sleep(_LOOK_SECONDS)
                    self._sweep(asyncio.get_running_loop().time())
        finally:
            running.set()

    def add(self, spec: ServerSpec) -> None:
        present = self._members.get(spec.name)
        if present is not None:
            if not present.life.done():
                return
            self._forget(present)
        member = self._members[spec.name] = Member(spec, self, self._policy, self._config.engine.slots)
        member.life = self._tasks.create_task(member.live(), name=f"server {spec.name}")
        logger.info("server added", extra={"server": spec.name})

    def remove(self, name: str) -> None:
        """Let a server finish its requests until the drain deadline, then move the rest; no-op for unknown names."""
        member = self._members.get(name)
        if member is not None and member.leaving_since is None:
            member.leave()
            logger.info("server leaves", extra={"server": name, "in_flight": len(member.requests)})

    def _sweep(self, now: float) -> None:
        """Forget servers that have left, and move requests that stay too long. `Unreachable` when no server is left."""
        for member in self.members:
            if (since := member.leaving_since) is None:
                continue
            if member.life.done():
                self._forget(member)
            elif now - since > self._config.supervisor.drain_deadline and member.engine is not None:
                member.leaving_since = now
                for request in member.requests:
                    self._tasks.create_task(_send_away(member.engine, request.request.id))
        members, limit = self.members, self._config.engine.start_deadline
        if not members or self.serving or not self.awake.is_set():
            self._served_at = now
        elif all(member.final for member in members):
            raise Unreachable(f"no server is left: {self.reasons}", "the logs of the servers say more")
        elif now - self._served_at > limit:
            raise Unreachable(
                f"no server could serve for {limit:g} s: {self.reasons}",
                "check that they run and that this host reaches them; engine.start_deadline limits the wait",
            )

    def _forget(self, member: Member) -> None:
        self._forgotten_preemptions += member.load.preemptions
        del self._members[member.name]


async def _send_away(engine: StreamingEngine, name: str) -> None:
    try:
        await engine.abort(name)
    except StreamrlError as error:
        logger.warning("request could not be moved", extra={"request": name, "why": error.message})


def _cancelling() -> bool:
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0
