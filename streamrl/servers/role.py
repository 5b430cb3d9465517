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
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from typing import Final

from streamrl.engine import life_seed
from streamrl.errors import ConfigError, DataError, StreamrlError, Unreachable, WireError, unwrapped
from streamrl.http import BadAnswer, HttpClient, Lost, read_key
from streamrl.isolation.watchdog import Watchdog
from streamrl.queues.device_lock import EngineDevices
from streamrl.queues.role import Role
from streamrl.servers.check import Facts, connect
from streamrl.servers.control import ServerControl
from streamrl.servers.dialect import ServerMetrics
from streamrl.servers.environments import on_cpu
from streamrl.servers.kinds import make_dialect
from streamrl.servers.process import ManagedServer, ServerSettings
from streamrl.servers.root_cause import points_back
from streamrl.waits import first_of
from streamrl.weight_sync.follower import Follower

logger = logging.getLogger(__name__)
_POLL_SECONDS: Final = 0.5
_POLL_DEADLINE: Final = 5.0
_LAST_SECONDS: Final = 10.0
_DRAIN_SHARE: Final = 0.22
"""Share of the run's drain time for the requests that it has; workers have the same."""
_LONGEST_GAP: Final = 2.0
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
        passed, self._looked_at = min(now - self._looked_at, _LONGEST_GAP), now
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
    with unwrapped():
        async with AsyncExitStack() as stack:
            await ServedEngine(role, stack).run()


class ServedEngine:
    """One life of an engine; `stack` ends what it has opened."""

    def __init__(self, role: Role, stack: AsyncExitStack) -> None:
        config, index = role.config, int(role.name.rpartition(".")[2])
        if config.engine.kind == "hf":
            raise ConfigError("engine.kind hf generates in the rollout workers", "set engine.kind to vllm or sglang")
        if config.engine.url and index >= len(config.engine.url):
            raise ConfigError(f"{role.name} has no server: engine.url names {len(config.engine.url)}", "add its URL")
        self._role = role
        self._config = config
        self._index = index
        self._stack = stack
        self._dialect = make_dialect(config)
        self._server: ManagedServer | None = None
        self._figures = ServerMetrics()
        self._salt = ""
        self._client: HttpClient
        self._control: ServerControl
        self._facts: Facts

    async def run(self) -> None:
        async with self._on_devices(), asyncio.TaskGroup() as tasks:
            watching = [tasks.create_task(self._watch_death()), tasks.create_task(self._watch())]
            follower = self._follower()
            following = tasks.create_task(follower.run(asyncio.Event()))
            await first_of(follower.first.wait(), self._role.stop.wait())
            if not self._role.stop.is_set():
                await self._announce()
                self._role.ready()
                await self._role.stop.wait()
                await self._finish()
            with suppress(TimeoutError):
                async with asyncio.timeout(_LAST_SECONDS):
                    await self._control.idle()
            for task in (*watching, following):
                task.cancel()

    @asynccontextmanager
    async def _on_devices(self) -> AsyncIterator[None]:
        """Start the server; where the learner shares its devices, when and as long as the lock admits it."""
        lock = self._role.ledgers.device_lock
        if self._config.rollout.placement != "colocated":
            await self._start()
            yield
            return

        async def wake() -> None:
            await self._control.wake()

        async def sleep() -> None:
            await self._control.sleep()

        switch = EngineDevices(lock, self._role.name, wake=wake, sleep=sleep)
        self._stack.push_async_callback(lock.leave, self._role.name)
        await switch.start(self._start)
        async with asyncio.TaskGroup() as tasks:
            switching = tasks.create_task(switch.run(), name="device lock")
            yield
            switching.cancel()

    async def _start(self) -> None:
        config, role = self._config, self._role
        engine = config.engine
        seed, self._salt = await life_seed(role)
        key = await asyncio.to_thread(read_key, "engine.api_key_file", engine.api_key_file)
        if engine.url:
            url, hint = engine.url[self._index], "check that it runs and that engine.url is right"
        else:
            devices = engine.devices[self._index % len(engine.devices)] if engine.devices else ""
            settings = ServerSettings.of_engine(config)
            self._server = ManagedServer(
                self._dialect, settings, role.run_dir, f"{role.name}.server", devices, seed=seed
            )
            self._stack.push_async_callback(self._server.stop)
            url, hint = await self._server.start(), f"its log: {self._server.log}"
        self._client = HttpClient(url, key, hint)
        self._stack.push_async_callback(self._client.close)
        self._facts = await self._check()
        if self._facts.fixed and config.recording.mode != "write":
            raise ConfigError(
                f"the weights of the server at {url} stay as they are, so it cannot sample for training",
                "use engine.kind vllm or sglang, or recording.mode: write to keep what it samples",
            )
        watchdog = None
        if self._server is None:
            calls = [(call.method, call.path, call.query, call.body) for call in self._dialect.resume()]
            watchdog = await Watchdog.start(url, self._client.headers, calls)
        self._control = ServerControl(
            self._client,
            self._dialect,
            config.weights.deadline,
            self._announce,
            watchdog=watchdog,
            folder=role.run_dir / "adapters" / role.name,
            max_staleness=config.max_staleness,
            sleep_level=0 if on_cpu(engine) else 1,
        )
        self._stack.push_async_callback(self._control.close)
        logger.info("engine server ready", extra={"url": url, "server": self._dialect.kind})

    async def _check(self) -> Facts:
        server = self._server
        try:
            return await connect(self._client, self._dialect, self._config, external=server is None)
        except ConfigError as error:
            if server is None or not points_back(error.message):
                raise
            await server.stop()  # then its log is complete
            if not (cause := server.root_cause()):
                raise
            raise ConfigError(f"{server.name} fails: {cause}", f"the whole log: {server.log}") from error

    def _follower(self) -> Follower:
        role = self._role
        return Follower(
            role.ledgers.weights,
            self._config.weights,
            self._control.keep if self._facts.fixed else self._control.apply,
            run=self._config.name,
            run_dir=role.run_dir,
            name=role.name,
            board=role.ledgers.roles,
            status=role.status,
        )

    async def _announce(self) -> None:
        """Tell the workers at once: they send nothing before they know, or after it has left its devices."""
        control, figures = self._control, self._figures
        if control.pair == (0, 0):
            return
        self._role.status.update(
            url=self._client.url,
            salt=self._salt,
            version=control.pair[1],
            step=control.step,
            adapter=control.adapter,
            blocked=int(control.blocked),
            slots=self._config.engine.slots,
            context=self._facts.context,
            vocabulary=self._facts.vocabulary or 0,
            running=figures.running,
            waiting=figures.waiting,
            cache_use=round(figures.cache_use, 3),
            preemptions=figures.preemptions,
            tokens=figures.tokens_sampled,
            pause_seconds=round(control.pause_seconds, 4),
        )
        await self._role.beat()

    async def _finish(self) -> None:
        """Wait for the requests that it has; workers that see it drain send no more."""
        await self._role.beat()
        end = time.monotonic() + self._config.supervisor.drain_deadline * _DRAIN_SHARE
        while time.monotonic() < end and self._figures.running + self._figures.waiting:  # noqa: ASYNC110 (polled)
            await asyncio.sleep(_POLL_SECONDS)

    async def _watch_death(self) -> None:
        if self._server is not None:
            cause = await self._server.wait_death()
            raise Unreachable(f"{self._server.name} ended: {cause}", f"its log: {self._server.log}")

    async def _watch(self) -> None:
        """Read the server's figures; a server that hangs counts as dead."""
        config, loop = self._config, asyncio.get_running_loop()
        liveness = Liveness(min(config.weights.deadline, config.lease.max_hold / 2), loop.time())
        while True:
            await asyncio.sleep(_POLL_SECONDS)
            figures = None
            try:
                figures = self._dialect.read_metrics(
                    await self._client.call(self._dialect.metrics(), _POLL_DEADLINE, retry=False)
                )
            except Lost:
                pass
            except (BadAnswer, DataError, WireError) as error:
                logger.warning("the server does not tell its figures", extra={"why": error.message})
                figures = ServerMetrics()
            if why := liveness.look(loop.time(), figures, held=self._control.held):
                raise Unreachable(f"the server hangs: {why}", "see its log")
            if figures is not None:
                self._figures = figures
                with suppress(StreamrlError):  # Redis may be away; the heartbeat decides about that
                    await self._announce()
            self._role.record({"server": "figures", "running": self._figures.running, "waiting": self._figures.waiting})
