"""`Engine` over several servers: balanced, each with the newest weights; the death of a server costs only time.

```
generate -> RoutedRequest -> LoadBalancer (waits for room) -> Member -> its engine -> Completion
                  ^                                           |
                  +------- prompt + response so far ----------+   the server died, or is being removed
apply -> ServerPool -> every Member by itself
```
Every server has a task that starts it, keeps it at the newest weights and brings it back (pool.py).
Requests wait here and not in the queue of a server: the first server with room gets them.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from typing import Final, Literal

from typing_extensions import override

from streamrl.config import RunConfig
from streamrl.engine import (
    Completion,
    Engine,
    EngineLoad,
    MemoryTag,
    Request,
)
from streamrl.errors import Refused, Unreachable, unwrap
from streamrl.producers.group.load_balancing import LoadBalancer
from streamrl.producers.group.pool import MemberState, ServerPool, ServerSpec, Source
from streamrl.producers.group.request import RoutedRequest
from streamrl.weight_sync.tensors import Version

__all__ = ["EngineGroup", "ServerSpec"]

logger = logging.getLogger(__name__)
_LOOK_SECONDS: Final = 0.02


class EngineGroup(Engine):
    """`Engine` over the servers of a replica; their names differ. `stops` are the tokens that end a response.

    The group is dead when no server can come back by itself, or when none has served for `engine.start_deadline`. A
    group without servers waits for some.
    """

    def __init__(self, config: RunConfig, servers: Sequence[ServerSpec], stops: frozenset[int] = frozenset()) -> None:
        self._context = config.model.context
        self._stops = stops
        self._first = list(servers)
        self._pool = ServerPool(config)
        self._balancer = LoadBalancer(config, self._pool)
        self._keeper: asyncio.Task[None] | None = None
        self._failure: Unreachable | None = None
        self._closed = False
        self._requests: dict[str, RoutedRequest] = {}
        self._tokens = 0

    def follow(self, source: Source) -> None:
        """Set where a server gets the newest version when it was started, added or left behind.

        `source(apply)` hands the newest version to `apply`. Without a source the group keeps the version that `apply`
        got last, which is right for versions in memory only.
        """
        self._pool.follow(source)

    # --- life --------------------------------------------------------------------------------------------------------

    @override
    async def start(self) -> None:
        """Return when the first server can serve; the others join later.

        `ConfigError`: a server cannot be used as it is, and this was found before any other could serve. `Unreachable`:
        no server came up.
        """
        if self._keeper is not None or self._closed:
            raise Unreachable("the group was started before, or is closed")
        running = asyncio.Event()
        self._keeper = asyncio.create_task(self._pool.run(self._first, running), name="servers")
        self._keeper.add_done_callback(self._ended)
        await running.wait()
        while self._first and not self._pool.serving:
            if self._failure is not None:
                raise self._failure
            refused = next((member for member in self._pool.members if member.state is MemberState.REFUSED), None)
            if refused is not None and refused.error is not None:
                raise refused.error
            await asyncio.sleep(_LOOK_SECONDS)

    @override
    async def close(self) -> None:
        # Servers that the group did not start stay up.
        if self._closed:
            return
        self._closed = True
        self._abort_all()
        if self._keeper is not None:
            self._keeper.cancel()
            await asyncio.gather(self._keeper, return_exceptions=True)

    @override
    async def health(self) -> None:
        self._check()
        if self._pool.members and not self._pool.serving:
            raise Unreachable(f"no server can serve now: {self._pool.reasons}")

    @override
    def load(self) -> EngineLoad:
        # `waiting` includes requests without a server.
        serving = self._pool.serving
        usable = [member for member in serving if self._pool.allows(member)]
        queued = sum(min(member.load.waiting, len(member.requests)) for member in serving)
        return EngineLoad(
            running=sum(len(member.requests) for member in self._pool.members) - queued,
            waiting=queued + len(self._balancer),
            tokens_sampled=self._tokens + sum(request.sampled for request in self._requests.values()),
            busy_seconds=self._balancer.busy_seconds,
            version=max(0, self._pool.newest[1]),
            capacity=sum(member.limit for member in usable),
            cache_use=sum(member.load.cache_use for member in serving) / max(1, len(serving)),
            preemptions=self._pool.preemptions,
            servers=len(usable),
        )

    def rows(self) -> dict[str, dict[str, int | float | str]]:
        return {
            member.name: {
                "state": "behind" if member.serving and not self._pool.allows(member) else str(member.state),
                "version": max(0, member.pair[1]),
                "in_flight": len(member.requests),
                "limit": member.limit,
                "cache_use": round(member.load.cache_use, 3),
                "lives": member.lives,
                "why": member.why,
            }
            for member in self._pool.members
        }

    def add(self, spec: ServerSpec) -> None:
        """Add a server while the group runs. A server of this name that can still serve stays as it is."""
        self._check()
        self._pool.add(spec)

    def remove(self, name: str) -> None:
        """Let a server finish its requests for `supervisor.drain_deadline`, then move them; ignores unknown names."""
        self._check()
        self._pool.remove(name)
        self._balancer.place()

    # --- requests ----------------------------------------------------------------------------------------------------

    @override
    async def generate(self, request: Request) -> Completion:
        """Sample one response; the death of servers does not fail it.

        `DataError`: also when three servers in a row died of the request, the last one while running nothing else.
        """
        self._check()
        if request.id in self._requests:
            raise ValueError(f"a request {request.id!r} is in flight")
        routed = self._requests[request.id] = RoutedRequest(request, self._stops, self._context)
        try:
            response = await routed.partial.complete(lambda rest: self._ask(routed, rest))
        finally:
            self._tokens += routed.sampled
            del self._requests[request.id]
        if response.finish != "abort":
            self._balancer.learn(len(response.tokens))
        return response

    async def _ask(self, request: RoutedRequest, rest: Request) -> Completion | None:
        """Have one server continue a request; None when the request should end with what it has."""
        while not request.over and (member := await self._balancer.wait(request)) is not None:
            try:
                piece = await member.generate(request, rest)
            except Unreachable as error:
                member.suspect()
                name = request.request.id
                logger.info("request moves", extra={"request": name, "from": member.name, "why": error.message})
                return request.died(error)
            finally:
                self._balancer.release(request)
            if piece is None:
                continue
            if piece.finish == "abort" and not request.aborting and member.state is not MemberState.LEAVING:
                logger.info("response broke off", extra={"request": request.request.id, "server": member.name})
                return request.broke_off(piece)
            return piece
        return None

    @override
    async def abort(self, request_id: str | None = None) -> int:
        self._check()
        chosen = {
            request for name, request in self._requests.items() if request_id in {None, name} and not request.aborting
        }
        for request in chosen:
            request.aborting = True
        ended = self._balancer.abort(chosen.__contains__)
        answers = await asyncio.gather(*(self._abort(request) for request in chosen))
        return ended + sum(answers)

    async def _abort(self, request: RoutedRequest) -> int:
        member = self._balancer.server_of(request)
        if member is None or member.engine is None:
            return 0
        try:
            return await member.engine.abort(request.request.id)
        except Unreachable:
            return 0

    def _abort_all(self) -> None:
        """End the requests that wait for a server; do not continue those that a server ends."""
        for request in self._requests.values():
            request.aborting = True
        self._balancer.abort(lambda _: True)

    # --- controls ----------------------------------------------------------------------------------------------------

    @override
    async def pause(self) -> None:
        # Servers that join later are paused as well.
        self._check()
        self._pool.paused = True
        await self._each(lambda engine: engine.pause())

    @override
    async def resume(self) -> None:
        self._check()
        self._pool.paused = False
        await self._each(lambda engine: engine.resume())

    @override
    async def sleep(self, level: Literal[0, 1] = 1) -> None:
        # No server is started while asleep.
        self._check()
        self._pool.awake.clear()
        try:
            await self._each(lambda engine: engine.sleep(level))
        except Refused:
            self._pool.awake.set()
            raise

    @override
    async def wake(self, tags: Sequence[MemoryTag] = ("weights", "kv_cache")) -> None:
        self._check()
        await self._each(lambda engine: engine.wake(tags))
        if set(tags) == {"weights", "kv_cache"}:
            self._pool.awake.set()

    @override
    async def apply(self, version: Version) -> None:
        """Have all servers take the version at the same time, each by itself.

        Returns when all that can serve have it, or when those that take much longer than the first are left behind:
        they take it, or a newer one, before their next request. With none that can serve it returns at once.
        `WeightsError`: every server refused it.
        """
        self._check()
        await self._pool.apply(version)
        self._balancer.place()

    async def _each(self, call: Callable[[Engine], Awaitable[None]]) -> None:
        up = [(member, member.engine) for member in self._pool.members if member.engine is not None]
        answers = await asyncio.gather(*(call(engine) for _, engine in up), return_exceptions=True)
        for (member, _), answer in zip(up, answers, strict=True):
            if isinstance(answer, Unreachable):
                member.suspect()
            elif isinstance(answer, BaseException):
                raise answer

    def _check(self) -> None:
        if self._closed or self._keeper is None:
            raise Unreachable("the group is closed" if self._closed else "the group has not been started")
        if self._failure is not None:
            raise Unreachable(self._failure.message, self._failure.hint) from self._failure

    def _ended(self, keeper: asyncio.Task[None]) -> None:
        if keeper.cancelled():
            self._failure = Unreachable("the group was closed")
        else:
            found = unwrap(keeper.exception() or AssertionError("the keeper of the servers returned"))
            self._failure = found if isinstance(found, Unreachable) else Unreachable(f"the group failed: {found!r}")
            logger.error("engine died", extra={"cause": self._failure.message})
        self._balancer.fail(self._failure)
