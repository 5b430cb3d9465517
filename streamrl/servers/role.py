"""Role `engine.N`: one server that generates, kept at the newest weights, and announced to the rollout workers.

```
start or attach -> check -> first version -> heartbeat with url, version, step, slots, context, load
weights stream  -> Follower -> ServerControl.apply        (the server pauses for the change itself)
metrics         -> Liveness, figures                      its death, or a hang: this role ends, and starts anew
device lock     -> ServerControl.sleep | wake             (`rollout.placement: colocated`)
```
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from typing import Final

from streamrl.engine import life_seed
from streamrl.errors import ConfigError, DataError, StreamrlError, Unreachable, WireError, unwrapped
from streamrl.http import BadAnswer, Lost
from streamrl.queues.device_lock import EngineDevices
from streamrl.queues.role import Role
from streamrl.servers.dialect import ServerMetrics
from streamrl.servers.server import METRICS_SECONDS, Server, key_of_servers
from streamrl.waits import first_of
from streamrl.weight_sync.follower import Follower

logger = logging.getLogger(__name__)
_POLL_SECONDS: Final = 0.5
_LAST_SECONDS: Final = 10.0
_DRAIN_SHARE: Final = 0.22
"""Share of the run's drain time for the requests that it has; workers have the same."""
_LONGEST_GAP: Final = 2 * (METRICS_SECONDS + _POLL_SECONDS)
"""Upper bound of the time counted between two looks: a process that was stopped (SIGSTOP) did not really wait."""


class Liveness:
    """Judges whether a server lives: no sign of it for `patience` seconds means death. Pure: the clock is an argument.

    A server that has requests and samples nothing hangs as well, unless it is `held`.
    """

    def __init__(self, patience: float, now: float) -> None:
        self._patience = patience
        self._looked_at = now
        self._figures = ServerMetrics()
        self._still = self._silent = 0.0

    def look(self, now: float, figures: ServerMetrics | None, *, held: bool) -> str:
        """Return why it counts as dead now, or an empty string. `figures`: None when it did not answer."""
        passed, self._looked_at = min(now - self._looked_at, _LONGEST_GAP, self._patience / 3), now
        if held or figures is not None:
            self._silent = 0.0
        else:
            self._silent += passed
        if held or figures is None or figures != self._figures or not figures.running + figures.waiting:
            self._still = 0.0
        else:
            self._still += passed
        self._figures = figures or self._figures
        if self._silent >= self._patience:
            return f"no answer to anything for {self._silent:.0f} s"
        return (
            f"no token and no other sign of progress for {self._still:.0f} s" if self._still >= self._patience else ""
        )


async def run_engine(role: Role) -> None:
    """Run one engine until `role.stop` is set; then its requests are finished within a share of the drain time.

    `ConfigError`: the environment is missing, or the server does not fit the run. `Unreachable`: the server ended,
    hangs or is in an unknown state; the supervisor starts the role again.
    """
    if role.config.engine.kind == "hf":
        raise ConfigError("engine.kind hf generates in the rollout workers", "set engine.kind to vllm or sglang")
    with unwrapped():
        key = await asyncio.to_thread(key_of_servers, role.config, role.run_dir)
        engine = EngineRole(role, await life_seed(role), key)
        await first_of(engine.run(), engine.stopped_at_start())


class EngineRole:
    """One life of an engine."""

    def __init__(self, role: Role, seed: int, key: str | None) -> None:
        self._role = role
        self._config = role.config
        index = int(role.name.rpartition(".")[2])
        self._server = Server(role.config, role.run_dir, role.name, index, seed=seed, key=key, announce=self._announce)
        self._figures = ServerMetrics()
        self._started = False

    async def stopped_at_start(self) -> None:
        """Return at a stop while the server starts, which takes minutes; later `run` ends by itself."""
        await self._role.stop.wait()
        if self._started:
            await asyncio.Event().wait()

    async def run(self) -> None:
        async with self._on_devices() as server, self._leaving(), asyncio.TaskGroup() as tasks:
            self._started = True
            if server.facts.fixed and self._config.recording.mode != "write":
                raise ConfigError(
                    f"the weights of the server at {server.client.url} stay as they are: it cannot sample for training",
                    "use engine.kind vllm or sglang, or recording.mode: write to keep what it samples",
                )
            follower = self._follower(server)
            works = [follower.run(asyncio.Event()), self._watch(server), self._watch_death(server)]
            working = [tasks.create_task(work) for work in works]
            await first_of(follower.first.wait(), self._role.stop.wait())
            if not self._role.stop.is_set():
                await self._announce()
                self._role.ready()
                await self._role.stop.wait()
                await self._finish()
            with suppress(TimeoutError):
                async with asyncio.timeout(_LAST_SECONDS):
                    await server.control.idle()
            for task in working:
                task.cancel()

    @asynccontextmanager
    async def _leaving(self) -> AsyncIterator[None]:
        """However the block ends, workers call this engine no more, before its server is left."""
        try:
            yield
        finally:
            self._role.status.pop("url", None)
            with suppress(StreamrlError):  # Redis may be away; the entry then ends with the heartbeat
                await self._role.beat()

    @asynccontextmanager
    async def _on_devices(self) -> AsyncIterator[Server]:
        """The started server; where the learner shares its devices, when and as long as the lock admits it."""
        role, server = self._role, self._server
        if self._config.rollout.placement != "colocated":
            async with server:
                yield server
            return
        switch = EngineDevices(role.ledgers.device_lock, role.name, wake=self._wake, sleep=self._sleep)
        async with switch.engine(server.start, server.close):
            yield server

    async def _wake(self) -> None:
        await self._server.control.wake()

    async def _sleep(self) -> None:
        await self._server.control.sleep()

    def _follower(self, server: Server) -> Follower:
        role = self._role
        return Follower(
            role.ledgers.weights,
            self._config.weights,
            server.control.keep if server.facts.fixed else server.control.apply,
            run=self._config.name,
            run_dir=role.run_dir,
            name=role.name,
            board=role.ledgers.roles,
            status=role.status,
        )

    async def _announce(self) -> None:
        """Tell the workers at once: they send nothing before they know, or after it has left its devices."""
        server, figures = self._server, self._figures
        control = server.control
        if control.pair == (0, 0):
            return
        self._role.status.update(
            url=server.client.url,
            salt=server.salt,
            version=control.pair[1],
            step=control.step,
            adapter=control.adapter,
            blocked=int(control.blocked),
            slots=self._config.engine.slots,
            context=server.facts.context,
            vocabulary=server.facts.vocabulary or 0,
            running=figures.running,
            waiting=figures.waiting,
            cache_use=round(figures.cache_use, 3),
            preemptions=figures.preemptions,
            pause_seconds=round(control.pause_seconds, 4),
        )
        await self._role.beat()

    async def _finish(self) -> None:
        """Wait for the requests that it has; workers that see it drain send no more."""
        await self._role.beat()
        end = time.monotonic() + self._config.supervisor.drain_deadline * _DRAIN_SHARE
        while time.monotonic() < end and self._figures.running + self._figures.waiting:  # noqa: ASYNC110 (polled)
            await asyncio.sleep(_POLL_SECONDS)

    async def _watch_death(self, server: Server) -> None:
        if server.process is not None:
            cause = await server.process.wait_death()
            raise Unreachable(f"{server.process.name} ended: {cause}", f"its log: {server.process.log}")

    async def _watch(self, server: Server) -> None:
        """Read the server's figures; a server that hangs counts as dead."""
        config, loop = self._config, asyncio.get_running_loop()
        liveness = Liveness(min(config.weights.deadline, config.lease.max_hold / 2), loop.time())
        while True:
            await asyncio.sleep(_POLL_SECONDS)
            figures = None
            try:
                figures = await server.metrics()
            except Lost:
                pass
            except (BadAnswer, DataError, WireError):
                figures = ServerMetrics()  # it lives, and does not tell
            if why := liveness.look(loop.time(), figures, held=server.control.held):
                raise Unreachable(f"the server hangs: {why}", "see its log")
            if figures is not None and figures != self._figures:
                self._figures = figures
                self._role.record(
                    {"running": figures.running, "waiting": figures.waiting, "tokens": figures.tokens_sampled}
                )
                with suppress(StreamrlError):  # Redis may be away; the heartbeat decides about that
                    await self._announce()
