"""The engine of a rollout replica, served to the agents of its run (`episode.processes`)."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping

from streamrl.engine import Completion, Listener, ReplicaEngine, Request
from streamrl.errors import Unreachable
from streamrl.listening import listen
from streamrl.producers.answering import DRAIN_SHARE
from streamrl.producers.group.replicas import STEP, URL
from streamrl.producers.meter import Meter
from streamrl.producers.serve.app import GenerationApp
from streamrl.queues import Role
from streamrl.queues.role import BEAT_SECONDS
from streamrl.waits import first_of
from streamrl.weight_sync.files import read_token
from streamrl.weight_sync.follower import Follower


class Service:
    """Serves generation until `role.stop` is set, to bearers of the run's token.

    The heartbeat tells agents where, and how old the weights are. They decide what is too old, because they lease the
    prompts.
    """

    def __init__(
        self, role: Role, engine: ReplicaEngine, follower: Follower, figures: Callable[[], Mapping[str, int | float]]
    ) -> None:
        self._role = role
        self._engine = engine
        self._follower = follower
        self._figures = figures
        self._running = 0
        self._idle = asyncio.Event()
        self._idle.set()
        self._death: Unreachable | None = None
        self._died = asyncio.Event()

    async def run(self) -> None:
        """Serve, and finish what is in flight at the end. `Unreachable`: the engine died."""
        role, hint = self._role, "set rollout.host to an address of this host"
        app = GenerationApp(self._generate, read_token(role.run_dir)).app()
        async with listen(app, role.config.rollout.host, 0, what="agents", hint=hint, cancels=True) as url:
            role.status[URL] = url
            async with asyncio.TaskGroup() as group:
                metering = group.create_task(Meter(role, self._engine.load, self._figures).run())
                announcing = group.create_task(self._announce())
                role.ready()
                await first_of(role.stop.wait(), self._died.wait())
                await role.beat()  # agents that see it drain call another one
                await self._finish()
                metering.cancel()
                announcing.cancel()
        if self._death is not None:
            raise self._death

    async def _finish(self) -> None:
        seconds = DRAIN_SHARE * self._role.config.supervisor.drain_deadline
        await first_of(self._idle.wait(), self._died.wait(), seconds=seconds)

    async def _announce(self) -> None:
        """Say at once which version was applied: agents take no prompt before they know."""
        while True:
            self._role.status[STEP] = self._follower.applied_step
            await self._role.beat()
            await first_of(self._follower.next_applied(), seconds=BEAT_SECONDS)

    async def _generate(self, request: Request, _: Listener) -> Completion:
        self._running += 1
        self._idle.clear()
        try:
            completion = await self._engine.generate(request)
        except Unreachable as error:
            self._death = error
            self._died.set()
            raise
        finally:
            self._running -= 1
            if not self._running:
                self._idle.set()
        if completion.finish == "abort":
            # another replica, maybe with older weights, may not continue this response: it begins anew
            raise Unreachable("the engine gave up a response")
        return completion
