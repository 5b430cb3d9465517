"""`Engine` over several servers: balanced, each with the newest weights, the death of one costs only time.

```
generate -> Work -> Placement (waits for room) -> Member -> its engine -> Completion
              ^                                      |
              +--------- prompt + prefix ------------+   the server died, or is being removed
apply -> Newest -> every Member by itself
```
Every server has a task that starts it, keeps it at the newest weights and brings it back (member.py, roster.py).
Requests wait here and not in the queue of a server: the first server with room gets them.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Final, Literal

from streamrl.config import RunConfig
from streamrl.errors import Refused, Unreachable, unwrap
from streamrl.producers.engines.contract import (
    Completion,
    Engine,
    EngineLoad,
    Listener,
    MemoryTag,
    PauseMode,
    Request,
)
from streamrl.producers.servers.member import Member, State
from streamrl.producers.servers.newest import Apply, Newest, Source
from streamrl.producers.servers.placement import Placement
from streamrl.producers.servers.prefix import Prefix
from streamrl.producers.servers.roster import Roster, ServerSpec
from streamrl.producers.servers.work import Work
from streamrl.weight_sync.manifest import Pair
from streamrl.weight_sync.tensors import Version

__all__ = ["EngineGroup", "ServerSpec"]

logger = logging.getLogger(__name__)
_LOOK_SECONDS: Final = 0.02


class EngineGroup:
    """`Engine` over the servers of a replica.

    Dead is the group when all its servers are beyond help, or none of them has served for `engine.start_deadline`; a
    group without any servers waits for some.

    Args:
        config: the run.
        servers: the first ones; none of two may have the same name.
        stops: tokens that end a response.
    """

    def __init__(self, config: RunConfig, servers: Sequence[ServerSpec], stops: frozenset[int] = frozenset()) -> None:
        self._context = config.model.context
        self._stops = stops
        self._first = list(servers)
        self._roster = Roster(config, self)
        self._newest = Newest()
        self._placement = Placement(config, self._roster, self._allows)
        self._keeper: asyncio.Task[None] | None = None
        self._failure: Unreachable | None = None
        self._closed = False
        self._works: dict[str, Work] = {}
        self._tokens = 0
        self._paused: PauseMode | None = None
        self._awake = asyncio.Event()
        self._awake.set()
        self._adapters: dict[str, Path] = {}

    def follow(self, source: Source) -> None:
        """Say where a server gets the newest version when it was started, added or left behind.

        `source(apply)` hands the newest version to `apply`. Without one the group holds on to the version that `apply`
        got last, which is right for versions in memory only.
        """
        self._newest.follow(source)

    # --- life --------------------------------------------------------------------------------------------------------

    async def start(self) -> None:
        """See `Engine.start`. Returns when the first server can serve; the others come when they come.

        Raises:
            ConfigError: a server cannot be used as it is, and was found so before any other could serve.
            Unreachable: none came up.
        """
        if self._keeper is not None or self._closed:
            raise Unreachable("the group was started before, or is closed")
        running = asyncio.Event()
        self._keeper = asyncio.create_task(self._roster.run(self._first, running), name="servers")
        self._keeper.add_done_callback(self._ended)
        await running.wait()
        while self._first and not self._roster.serving:
            if self._failure is not None:
                raise self._failure
            refused = next((member for member in self._roster.members if member.state is State.REFUSED), None)
            if refused is not None and refused.error is not None:
                raise refused.error
            await asyncio.sleep(_LOOK_SECONDS)

    async def close(self) -> None:
        """See `Engine.close`. Servers that the group started end; servers of others go on."""
        if self._closed:
            return
        self._closed = True
        for work in self._works.values():
            work.aborting = True
        self._placement.abort(lambda _: True)
        if self._keeper is not None:
            self._keeper.cancel()
            await asyncio.gather(self._keeper, return_exceptions=True)

    async def health(self) -> None:
        """See `Engine.health`; also `Unreachable` while there are servers and none of them can serve."""
        self._check()
        if self._roster.members and not self._roster.serving:
            raise Unreachable(f"no server can serve now: {self._roster.reasons}")

    def load(self) -> EngineLoad:
        """See `Engine.load`. `waiting` counts requests without a server as well."""
        serving = self._roster.serving
        usable = [member for member in serving if self._allows(member)]
        queued = sum(min(member.figures.waiting, len(member.works)) for member in serving)
        return EngineLoad(
            running=sum(len(member.works) for member in self._roster.members) - queued,
            waiting=queued + len(self._placement),
            tokens_sampled=self._tokens + sum(work.sampled for work in self._works.values()),
            busy_seconds=self._placement.busy_seconds,
            version=max(0, self._newest.best(self._roster)[1]),
            capacity=sum(member.limit for member in usable),
            cache_use=sum(member.figures.cache_use for member in serving) / max(1, len(serving)),
            preemptions=self._roster.preemptions,
            servers=len(usable),
        )

    def rows(self) -> dict[str, dict[str, int | float | str]]:
        """What is to be said of each server, by its name."""
        return {
            member.name: {
                "state": "behind" if member.serving and not self._allows(member) else str(member.state),
                "version": max(0, member.pair[1]),
                "in_flight": len(member.works),
                "limit": member.limit,
                "cache_use": round(member.figures.cache_use, 3),
                "lives": member.lives,
                "why": member.why,
            }
            for member in self._roster.members
        }

    def add(self, spec: ServerSpec) -> None:
        """Add a server while the group runs. One that is there and not beyond help stays as it is."""
        self._check()
        self._roster.add(spec)

    def remove(self, name: str) -> None:
        """Take a server out: it ends what it has, for `supervisor.drain_deadline`, then the rest moves.

        An unknown name does nothing.
        """
        self._check()
        self._roster.remove(name)
        self.changed()

    # --- requests ----------------------------------------------------------------------------------------------------

    async def generate(self, request: Request, listener: Listener | None = None) -> Completion:
        """See `Engine.generate`. Outlives the death of servers.

        Raises:
            DataError: also when three servers in a row died of the request, the last one with nothing else to do.
        """
        self._check()
        if request.id in self._works:
            raise ValueError(f"a request {request.id!r} is in flight")
        work = self._works[request.id] = Work(request, Prefix(request, self._stops, self._context), listener)
        loop = asyncio.get_running_loop()
        start = loop.time()
        try:
            while (member := await self._placement.wait(work)) is not None:
                last = await self._try(work, member)
                if last is not None:
                    if last.finish != "abort":
                        self._placement.learn(len(work.prefix) + len(last.tokens))
                    return work.finish(last, loop.time() - start)
                if (finish := work.prefix.finish) is not None:
                    return work.prefix.ended(finish, loop.time() - start)
            return work.prefix.ended("abort", loop.time() - start)
        finally:
            self._tokens += work.sampled
            del self._works[request.id]

    async def _try(self, work: Work, member: Member) -> Completion | None:
        """Have one server go on with a request; None when it did not get to an end."""
        try:
            if member.engine is None:
                return None
            last = await member.engine.generate(work.prefix.rest(), work.hear)
        except Unreachable as error:
            member.suspect()
            logger.info("request moves", extra={"request": work.request.id, "from": member.name, "why": error.message})
            work.leave(error)
            return None
        finally:
            self._placement.release(work)
        if last.finish == "abort" and not work.aborting:
            if member.state is State.LEAVING:
                work.take_along(last)
                return None
            if work.broke_off(last):
                logger.info("response broke off", extra={"request": work.request.id, "server": member.name})
                return None
        return last

    async def abort(self, request_id: str | None = None) -> int:
        """See `Engine.abort`."""
        self._check()
        chosen = {work for name, work in self._works.items() if request_id in {None, name} and not work.aborting}
        for work in chosen:
            work.aborting = True
        ended = self._placement.abort(chosen.__contains__)
        answers = await asyncio.gather(*(_abort(work) for work in chosen))
        return ended + sum(answers)

    # --- controls ----------------------------------------------------------------------------------------------------

    async def pause(self, mode: PauseMode = "keep") -> None:
        """See `Engine.pause`; servers that come later are paused as well."""
        self._check()
        self._paused = mode
        if mode == "abort":
            for work in self._works.values():
                work.aborting = True
            self._placement.abort(lambda _: True)
        await self._each(lambda engine: engine.pause(mode))

    async def resume(self) -> None:
        """See `Engine.resume`."""
        self._check()
        self._paused = None
        await self._each(lambda engine: engine.resume())

    async def sleep(self, level: Literal[0, 1, 2] = 1) -> None:
        """See `Engine.sleep`; servers are not started meanwhile."""
        self._check()
        self._awake.clear()
        try:
            await self._each(lambda engine: engine.sleep(level))
        except Refused:
            self._awake.set()
            raise

    async def wake(self, tags: Sequence[MemoryTag] = ("weights", "kv_cache")) -> None:
        """See `Engine.wake`."""
        self._check()
        await self._each(lambda engine: engine.wake(tags))
        if set(tags) == {"weights", "kv_cache"}:
            self._awake.set()

    async def load_adapter(self, name: str, folder: Path) -> None:
        """See `Engine.load_adapter`. The folder has to stay: servers that come later load it as well."""
        self._check()
        if name in self._adapters:
            raise Refused(f"an adapter {name!r} is loaded", "every version of an adapter needs a name of its own")
        await self._each(lambda engine: engine.load_adapter(name, folder))
        self._adapters[name] = folder

    async def unload_adapter(self, name: str) -> None:
        """See `Engine.unload_adapter`."""
        self._check()
        if self._adapters.pop(name, None) is not None:
            await self._each(lambda engine: engine.unload_adapter(name))

    async def apply(self, version: Version) -> None:
        """See `Engine.apply`. Each server takes the version by itself, all at the same time.

        Returns when all that can serve have it, or when those that take much longer than the first are left behind:
        they take it, or a newer one, before their next prompt. With none that can serve it returns at once.

        Raises:
            WeightsError: every server refused it.
        """
        self._check()
        await self._newest.spread(version, self._roster)
        self.changed()

    async def _each(self, call: Callable[[Engine], Awaitable[None]]) -> None:
        """Call all servers that are up, at the same time; one that dies of it is its own affair."""
        up = [(member, member.engine) for member in self._roster.members if member.engine is not None]
        answers = await asyncio.gather(*(call(engine) for _, engine in up), return_exceptions=True)
        for (member, _), answer in zip(up, answers, strict=True):
            if isinstance(answer, Unreachable):
                member.suspect()
            elif isinstance(answer, BaseException):
                raise answer

    # --- what the servers ask (member.Host) --------------------------------------------------------------------------

    @property
    def target(self) -> Pair | None:
        """See `Host.target`."""
        return self._newest.target

    @property
    def awake(self) -> asyncio.Event:
        """See `Host.awake`."""
        return self._awake

    def held_elsewhere(self, member: Member) -> bool:
        """See `Host.held_elsewhere`."""
        return self._newest.held_elsewhere(member, self._roster)

    async def deliver(self, apply: Apply) -> None:
        """See `Host.deliver`."""
        await self._newest.deliver(apply)

    async def equip(self, engine: Engine) -> None:
        """See `Host.equip`."""
        for name, folder in self._adapters.items():
            await engine.load_adapter(name, folder)
        if self._paused is not None:
            await engine.pause(self._paused)

    def changed(self) -> None:
        """See `Host.changed`."""
        self._placement.place()

    def _allows(self, member: Member) -> bool:
        return self._newest.allows(member, self._roster)

    def _check(self) -> None:
        if self._closed or self._keeper is None:
            raise Unreachable("the group is closed" if self._closed else "the group has not been started")
        if self._failure is not None:
            raise Unreachable(self._failure.message, self._failure.hint) from self._failure

    def _ended(self, keeper: asyncio.Task[None]) -> None:
        """Without those who keep the servers the group is dead."""
        if keeper.cancelled():
            self._failure = Unreachable("the group was closed")
        else:
            found = unwrap(keeper.exception() or AssertionError("the keeper of the servers returned"))
            self._failure = found if isinstance(found, Unreachable) else Unreachable(f"the group failed: {found!r}")
            logger.error("engine died", extra={"cause": self._failure.message})
        self._placement.fail(self._failure)


async def _abort(work: Work) -> int:
    """End a request on the server that it is on; 0 when there is none, or it has died."""
    if work.member is None or work.member.engine is None:
        return 0
    try:
        return await work.member.engine.abort(work.request.id)
    except Unreachable:
        return 0
