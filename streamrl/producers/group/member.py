"""One server of a group through all its lives: start, newest weights, prompts, death, and the pause before the next."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from enum import StrEnum
from typing import Final, Protocol

from streamrl.engine import Completion, Engine, EngineLoad, Request
from streamrl.errors import ConfigError, StreamrlError, Unreachable, WeightsError, unwrap
from streamrl.producers.concurrency import Concurrency, Sighting
from streamrl.producers.group.request import RoutedRequest
from streamrl.producers.group.state import EngineGroupState
from streamrl.restarts import Deaths, RestartPolicy
from streamrl.weight_sync.manifest import Pair
from streamrl.weight_sync.tensors import Version

logger = logging.getLogger(__name__)

LOOK_SECONDS: Final = 0.25
_HEALTH_LOOKS: Final = 4
_CLOSE_SECONDS: Final = 60.0
_REFUSALS: Final = 3
"""Times that a server may refuse weights which others have taken, before it is started anew."""
_REFUSED_PAUSE: Final = 1.0
_FOR_EVER: Final = 1 << 30

NOTHING: Final[Pair] = (0, 0)
"""Version of a server that has taken none in this life."""


class MemberState(StrEnum):
    """Where a server is in its life."""

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


class MemberPool(Protocol):
    """What a server asks of the pool that it is in."""

    changed: Callable[[], None]
    """A server can take more than before, or one less is there."""

    def held_elsewhere(self, member: Member) -> bool:
        """Whether another server has taken the newest version."""
        ...


class Member:
    """One server.

    Args:
        name: its URL, or `server.N`.
        make: makes its engine; called for each life.
        state: what it has to be brought to.
        pool: the one that it is in.
        policy: pauses between lives, and of a server that is ours how many deaths are too many.
        ours: whether the group starts it; a server of others may come back at any time.
        most: requests in flight, at most.

    Attributes:
        engine: of the present life; None between lives.
        pair: version that it holds.
        updating: it is taking new weights.
        requests: those that it has.
        reserved: the one request that may be placed on it.
    """

    def __init__(
        self,
        name: str,
        make: Callable[[], Engine],
        state: EngineGroupState,
        pool: MemberPool,
        policy: RestartPolicy,
        *,
        ours: bool,
        most: int,
    ) -> None:
        self.name = name
        self.ours = ours
        self.state = MemberState.STARTING
        self.why = ""
        self.error: StreamrlError | None = None
        self.engine: Engine | None = None
        self.pair: Pair = NOTHING
        self.updating = False
        self.requests: set[RoutedRequest] = set()
        self.reserved: RoutedRequest | None = None
        self.tried = asyncio.Event()
        self.lives = 0
        self._make = make
        self._state = state
        self._pool = pool
        self._most = most
        self._deaths = Deaths(policy if ours else replace(policy, max_restarts=_FOR_EVER))
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
        """Requests that it can make use of."""
        return self._concurrency.limit

    @property
    def serving(self) -> bool:
        """Whether it is up and not suspected to be dead."""
        return self.state is MemberState.READY and self.engine is not None and not self._suspected

    @property
    def room(self) -> bool:
        """Whether it could be given one more request now."""
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
        """Give it a request."""
        self.requests.add(request)
        self._peak = max(self._peak, len(self.requests))

    async def generate(self, request: RoutedRequest, rest: Request) -> Completion | None:
        """Go on with a request that it was given; None when it has died before it could.

        Raises:
            Unreachable: it died of it, or meanwhile.
        """
        if self.engine is None:
            return None
        began_at = self.pair

        def hear(tokens: Sequence[int], logprobs: Sequence[float]) -> None:
            # with new weights it is no longer sure which version sampled what, before the server says so
            request.hear(tokens, logprobs, sure=not self.updating and self.pair == began_at)

        request.begin()
        piece = await self.engine.generate(rest, hear)
        request.came(piece)
        return piece

    def release(self, request: RoutedRequest) -> None:
        """A request has left it."""
        self.requests.discard(request)
        if self.reserved is request:
            self.reserved = None
        if self._leave.is_set() and not self.requests:
            self._look.set()

    def suspect(self) -> None:
        """A request failed as if it were dead: give it nothing until its health is known, which is asked at once."""
        self._suspected = True
        self._look.set()

    def reach(self, pair: Pair) -> asyncio.Future[Exception | None]:
        """Resolves when it holds a version or a newer one (None), refuses it or dies (the error)."""
        future: asyncio.Future[Exception | None] = asyncio.get_running_loop().create_future()
        self._waiters.append((pair, future))
        self._behind.set()
        return future

    def catch_up(self) -> None:
        """Look whether there is a newer version."""
        self._behind.set()

    def leave(self) -> None:
        """Take no more, end what it has, and go. A repeat does nothing."""
        self._leave.set()
        self._look.set()
        if self.state is MemberState.READY:
            self.state = MemberState.LEAVING

    # --- its life ----------------------------------------------------------------------------------------------------

    async def live(self) -> None:
        """Live until it leaves, cannot be used, or has died too often. Raises nothing but a cancellation."""
        loop = asyncio.get_running_loop()
        try:
            while await self._unless_leaving(self._state.awake.wait()):
                self._deaths.started()
                self.state = MemberState.STARTING
                try:
                    await self._one_life()
                    break
                except Exception as error:  # whatever ends a life is shown, and the next one is tried
                    if _cancelling():  # a task group that ends with an error keeps that to itself
                        raise asyncio.CancelledError from error
                    cause = unwrap(error)
                pause = self._died(cause, loop.time())
                self.tried.set()
                self._pool.changed()
                if pause is None:
                    return
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(pause):
                        await self._leave.wait()
            self.state, self.why = MemberState.GONE, "removed"
        finally:
            self.tried.set()
            self._settle(Unreachable(f"server {self.name} has left"))
            self._pool.changed()

    def _died(self, cause: BaseException, now: float) -> float | None:
        """Note the end of a life; return the pause before the next, None when there is none."""
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
        """Start, serve and close. Returns when it was removed and has nothing left to do."""
        self.lives += 1
        self.pair, self._suspected = NOTHING, False
        self._concurrency = Concurrency(self._most)
        engine = self._make()
        try:
            if not await self._unless_leaving(self._begin(engine)):
                return
            self.state, self.why, self.error = MemberState.READY, "", None
            self._deaths.ready(asyncio.get_running_loop().time())
            logger.info("server ready", extra={"server": self.name, "version": self.pair, "life": self.lives})
            self.tried.set()
            self._behind.set()
            self._pool.changed()
            async with asyncio.TaskGroup() as tasks:
                following = tasks.create_task(self._follow(), name=f"weights of {self.name}")
                await self._watch(engine)
                following.cancel()
        finally:
            self.engine = None
            self._preempted_before, self._load = self.load.preemptions, EngineLoad(0, 0, 0, 0.0, 0)
            await self._close(engine)

    async def _begin(self, engine: Engine) -> None:
        await engine.start()
        await self._state.equip(engine)
        self.engine = engine
        with contextlib.suppress(WeightsError):  # it gets no prompt before it has taken a version
            await self._take_newest()

    async def _unless_leaving(self, work: Awaitable[object]) -> bool:
        """Await something; False when it was given up because the server has to go."""
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

    async def _close(self, engine: Engine) -> None:
        try:
            async with asyncio.timeout(_CLOSE_SECONDS):
                await engine.close()
        except Exception:  # its end must not be the end of the group
            logger.exception("server does not close", extra={"server": self.name})

    async def _watch(self, engine: Engine) -> None:
        """Look at its load, and now and then at its health, until it has left."""
        looks = 0
        while not (self._leave.is_set() and not self.requests):
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(LOOK_SECONDS):
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
            sighting = Sighting(
                len(self.requests), self._peak, load.running, load.waiting, load.preemptions, load.cache_use
            )
            if self._concurrency.see(now, sighting) != before:
                logger.debug("concurrency", extra={"server": self.name, "limit": self.limit, "before": before})
        self._peak = len(self.requests)
        self._pool.changed()

    # --- its weights -------------------------------------------------------------------------------------------------

    async def _follow(self) -> None:
        """Take every version that is newest, and try again what others could take.

        Raises:
            Unreachable: it refuses what others have taken, again and again.
        """
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
                        f"server {self.name} refuses weights that others have: {error.message}"
                    ) from error
                await asyncio.sleep(_REFUSED_PAUSE * refusals)
                self._behind.set()

    async def _take_newest(self) -> None:
        weights = self._state.weights
        while (target := weights.target) is not None and self.pair < target:
            self.updating = True
            try:
                await weights.deliver(self._apply)
            finally:
                self.updating = False
                self._concurrency.interrupted()
            self._pool.changed()
            if self.pair < target:
                raise WeightsError(f"version {target} is not here any more", "the next version mends this")
        self._settle(None)

    async def _apply(self, version: Version) -> None:
        assert self.engine is not None
        await self.engine.apply(version)
        self.pair, self.why = version.pair, ""

    def _settle(self, error: Exception | None) -> None:
        """Resolve waiters: all of them with an error, otherwise those whose version is here."""
        waiting, self._waiters = self._waiters, []
        for pair, future in waiting:
            if error is None and self.pair < pair:
                self._waiters.append((pair, future))
            elif not future.done():
                future.set_result(error)


def _cancelling() -> bool:
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0
