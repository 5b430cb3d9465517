"""Role `engine.N`: one server that generates, kept at the newest weights, and announced to the rollout workers.

```
start or attach -> check -> first version -> heartbeat with url, version, step, slots, context, load
weights stream  -> Follower -> ServerControl.apply        (the server pauses for the change itself)
metrics         -> figures
device lock     -> ServerControl.sleep | wake             (`rollout.placement: colocated`)
```
"""

from __future__ import annotations

import asyncio
import time
from contextlib import suppress
from typing import Final

from streamrl.engine import life_seed
from streamrl.errors import ConfigError, DataError, StreamrlError, WireError, unwrapped
from streamrl.http import BadAnswer, Lost
from streamrl.queues.device_lock import EngineDevices
from streamrl.queues.role import Role
from streamrl.servers.dialect import ServerMetrics
from streamrl.servers.role import POLL_SECONDS, serving, watch
from streamrl.servers.server import Server, key_of_servers
from streamrl.waits import first_of
from streamrl.weight_sync.follower import Follower
from streamrl.weight_sync.tensors import Version

_LAST_SECONDS: Final = 10.0
_DRAIN_SHARE: Final = 0.22  # share of the run's drain time for the requests that it has; workers have the same


async def run_engine(role: Role) -> None:
    """Run one engine until `role.stop` is set; then its requests are finished within a share of the drain time.

    `ConfigError`: no environment, or the server does not fit the run. `Unreachable`: it ended or hangs; start it again.
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
        lock = role.ledgers.device_lock if role.config.rollout.placement == "colocated" else None
        self._devices = EngineDevices(
            lock,
            role.name,
            wake=lambda: self._server.control.wake(),  # noqa: PLW0108 (there is none before the start)
            sleep=lambda: self._server.control.sleep(),  # noqa: PLW0108
        )

    async def stopped_at_start(self) -> None:
        """Return at a stop while the server starts, which takes minutes; later `run` ends by itself."""
        await self._role.stop.wait()
        if self._started:
            await asyncio.Event().wait()

    async def run(self) -> None:
        role, server, config = self._role, self._server, self._config
        async with serving(role, self._devices, server.start, server.close), asyncio.TaskGroup() as tasks:
            self._started = True
            if server.dialect.fixed and config.recording.mode != "write":
                raise ConfigError(
                    f"the weights of the server at {server.client.url} stay as they are: it cannot sample for training",
                    "use engine.kind vllm or sglang, or recording.mode: write to keep what it samples",
                )
            follower = self._follower(server)
            patience = min(config.weights.deadline, config.lease.max_hold / 2)
            watching = watch(server.process, self._look, patience, lambda: server.control.held)
            working = [tasks.create_task(work) for work in (follower.run(asyncio.Event()), watching)]
            await first_of(follower.first.wait(), role.stop.wait())
            if not role.stop.is_set():
                await self._announce()
                role.ready()
                await role.stop.wait()
                await self._finish()
            with suppress(TimeoutError):
                async with asyncio.timeout(_LAST_SECONDS):
                    await server.control.idle()
            for task in working:
                task.cancel()

    def _follower(self, server: Server) -> Follower:
        role, control = self._role, server.control

        async def apply(version: Version) -> None:
            await control.apply(version, lambda: follower.newest_epoch > version.pair[0])

        follower = Follower(
            role.ledgers.weights,
            self._config.weights,
            control.keep if server.dialect.fixed else apply,
            run=self._config.name,
            run_dir=role.run_dir,
            name=role.name,
            fetches=self._config.weights.transport == "collective",
        )
        return follower

    async def _announce(self) -> None:
        """Tell the workers at once: they send nothing before they know, or after it has left its devices."""
        server, figures, control = self._server, self._figures, self._server.control
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
            context=server.limits.context,
            vocabulary=server.limits.vocabulary,
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
            await asyncio.sleep(POLL_SECONDS)

    async def _look(self) -> ServerMetrics | None:
        """Read the server's figures; None: no answer."""
        try:
            figures = await self._server.metrics()
        except Lost:
            return None
        except (BadAnswer, DataError, WireError):
            figures = ServerMetrics()  # it lives, and does not tell
        if figures != self._figures:
            self._figures = figures
            counts = {"running": figures.running, "waiting": figures.waiting, "tokens": figures.tokens_sampled}
            self._role.record(counts)
            with suppress(StreamrlError):  # Redis may be away; the heartbeat decides about that
                await self._announce()
        return figures
