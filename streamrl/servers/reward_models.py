"""Role `reward_model.NAME.N`: a server of a reward model, which sleeps without work (`reward_models.NAME.sleep`).

```
start -> heartbeat with url, server (`ready`, `asleep`), wakes
samples without a score -> Demand -> sleep | wake
```
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

from typing_extensions import override

from streamrl.config import RewardModelConfig
from streamrl.config.rewards import REWARD_MODEL_ROLE
from streamrl.errors import ConfigError, DataError, StreamrlError, Unreachable, WireError, unwrapped
from streamrl.http import BadAnswer, Call, HttpClient
from streamrl.queues.device_lock import EngineDevices
from streamrl.queues.reward_servers import ASLEEP, READY, RewardServers
from streamrl.queues.role import Role
from streamrl.servers.dialect import ServerMetrics
from streamrl.servers.environments import computes_on_cpu, find_environment, installed
from streamrl.servers.launch import LOOPBACK, PROFILES, Launch, Startable, merged
from streamrl.servers.process import ANSWER_SECONDS, ManagedServer, ServerSettings
from streamrl.servers.role import serving, watch
from streamrl.waits import first_of

logger = logging.getLogger(__name__)
_LINGER: Final = 1.0
_COUNT_SECONDS: Final = 0.25
_PATIENCE: Final = 60.0
_MOVE_SECONDS: Final = 300.0
"""Longest time to sleep or to wake: weights go between device and host."""


async def run_reward_model(role: Role) -> None:
    """Run one server of a reward model until `role.stop` is set.

    Unreachable: the server ended, hangs or does not wake; the supervisor starts the role again.
    """
    name, _, number = role.name.removeprefix(f"{REWARD_MODEL_ROLE}.").rpartition(".")
    config = role.config.reward_models.get(name)
    if config is None or config.url:
        known = ", ".join(role.config.reward_servers) or "none"
        raise ConfigError(f"there is no reward model {name} whose servers streamrl starts", f"known: {known}")
    with unwrapped():
        await first_of(RewardModelRole(role, name, int(number), config).run(), role.stop.wait())


class RewardModelRole:
    """One life of a server of a reward model."""

    def __init__(self, role: Role, name: str, number: int, config: RewardModelConfig) -> None:
        self._role = role
        self._config = config
        self._kind = model_server(name, config)
        settings = ServerSettings(
            f"reward_models.{name}", config.model, config.start_deadline, role.config.supervisor, dict(config.variables)
        )
        devices = config.devices[number % len(config.devices)] if config.devices else ""
        self._server = ManagedServer(self._kind, settings, role.run_dir, f"{role.name}.server0", devices, seed=number)
        self._demand = Demand(config.wake_at, config.wake_after, _LINGER)
        self._shared = config.sleep and role.config.rollout.placement == "colocated"
        lock = role.ledgers.device_lock if self._shared else None
        self._devices = EngineDevices(
            lock, role.name, wake=self._wake, sleep=self._sleep, wanted=lambda: self._demand.awake
        )
        self._client: HttpClient | None = None
        self._asleep = False
        self._can_sleep = config.sleep

    async def run(self) -> None:
        async with serving(self._role, self._devices, self._start, self._close):
            watching = watch(self._server, self._look, _PATIENCE, lambda: self._asleep)
            await first_of(watching, *([self._count()] if self._config.sleep else []))

    async def _start(self) -> None:
        url = await self._server.start()
        self._client = HttpClient(url, hint=f"its log: {self._server.log}")
        self._role.status.update({"url": url, "wakes": 0} if self._config.sleep else {"url": url})
        await self._tell(READY)
        self._role.ready()

    async def _close(self) -> None:
        """Let a server that can sleep finish its requests, then end it."""
        try:
            if self._server.alive:
                with suppress(StreamrlError, TimeoutError):
                    async with asyncio.timeout(self._role.config.supervisor.term_grace):
                        await self._sleep()
        finally:
            if self._client is not None:
                await self._client.close()
            await self._server.stop()

    async def _look(self) -> ServerMetrics | None:
        assert self._client is not None, "it is made at the start"
        try:
            await self._client.call(self._kind.ready(), ANSWER_SECONDS, retry=False)
        except (Unreachable, DataError, WireError):
            return None
        return ServerMetrics()

    async def _count(self) -> None:
        loop = asyncio.get_running_loop()
        config, servers = self._role.config, RewardServers(self._role.ledgers)
        sizes = config.sampling.responses, config.evaluation.samples
        while True:
            self._demand.see(await servers.waiting(*sizes), loop.time())
            await asyncio.sleep(_COUNT_SECONDS)

    async def _sleep(self) -> None:
        """Free the memory. No effect on a repeat, or after the server has refused."""
        if self._asleep or not self._can_sleep:
            return
        self._asleep = True
        await self._tell(ASLEEP)  # before it sleeps, so that no worker asks it then
        try:
            await self._move(ASLEEP, self._kind.profile.sleep)
        except (BadAnswer, DataError) as error:
            if self._shared:
                raise Unreachable(f"{self._server.name} does not leave its devices: {error.message}") from error
            self._asleep = self._can_sleep = False
            logger.warning(
                "a server cannot sleep and stays awake",
                extra={"server": self._server.name, "why": error.message, "hint": "see its log, or leave out sleep"},
            )
            await self._tell(READY)

    async def _wake(self) -> None:
        if not self._asleep:
            return
        try:
            await self._move("awake", self._kind.profile.wake)
        except (BadAnswer, DataError) as error:
            raise Unreachable(f"{self._server.name} does not wake: {error.message}", "it starts again") from error
        self._asleep = False
        self._role.status["wakes"] = int(self._role.status["wakes"]) + 1
        await self._tell(READY)

    async def _move(self, to: str, calls: Sequence[Call]) -> None:
        assert self._client is not None, "it is made at the start"
        began = time.monotonic()
        for call in calls:
            await self._client.call(call, _MOVE_SECONDS)
        seconds = round(time.monotonic() - began, 3)
        logger.info(to, extra={"server": self._server.name, "seconds": seconds})
        self._role.record({"server": to, "seconds": seconds})

    async def _tell(self, state: str) -> None:
        self._role.status["server"] = state
        await self._role.beat()


class Demand:
    """Whether a server that sleeps without work should be awake; pure, with the clock as an argument. It begins awake.

    ```
    awake  --nothing waits, for as long as `linger`-------------------> asleep
    asleep --`wake_at` samples wait, or fewer for `wake_after`--------> awake
    ```
    Fewer than `wake_at` samples wake it too, after a while: the rest of the run may wait for exactly these. `linger`
    avoids sleeping and waking for a short pause.
    """

    def __init__(self, wake_at: int, wake_after: float, linger: float) -> None:
        self.awake = True
        self._wake_at, self._wake_after, self._linger = wake_at, wake_after, linger
        self._since: float | None = None

    def see(self, waiting: int, now: float) -> bool:
        """Whether the server should be awake while `waiting` samples wait; a clock that goes back restarts the time."""
        wanted = waiting > 0
        if wanted == self.awake:
            self._since = None
            return self.awake
        if self._since is None or now < self._since:
            self._since = now
        patience = self._wake_after if wanted else self._linger
        if waiting >= self._wake_at or now - self._since >= patience:
            self.awake, self._since = wanted, None
        return self.awake


class ModelServer(Startable):
    """A server of one reward model, which `ManagedServer` can start.

    `environment` is the folder of the virtual environment, `cpu` whether it is one for a CPU.
    """

    def __init__(self, name: str, config: RewardModelConfig, environment: Path, *, cpu: bool) -> None:
        self.profile = PROFILES[config.kind]
        self._config = config
        self._section = f"reward_models.{name}"
        self.environment = environment
        self.cpu = cpu
        merged({}, config.flags, section=self._section)
        if config.sleep and cpu:
            raise ConfigError(
                f"{self._section}.sleep: a {self.kind} server on a CPU keeps its memory, so there is nothing to gain",
                f"leave out {self._section}.sleep",
            )

    @property
    @override
    def kind(self) -> str:
        return self.profile.kind

    @override
    def launch(self, *, model: str, port: int, seed: int, host: str = LOOPBACK, key: str | None = None) -> Launch:
        del host, key  # only workers of this host call it
        return self.profile.launch(self.environment, self.flags(model=model, port=port, seed=seed), self.environ(model))

    def flags(self, *, model: str, port: int, seed: int) -> dict[str, Any]:
        """Those of a server on the loopback interface; the user's win."""
        flags = self.profile.flags_for(model=model, port=port, seed=seed, cpu=self.cpu, sleeps=self._config.sleep)
        if self._config.task != "chat":
            flags |= self.profile.scoring
        return merged(flags, self._config.flags, section=self._section)

    def environ(self, model: str) -> dict[str, str]:
        return self.profile.environ_for(model, cpu=self.cpu, sleeps=self._config.sleep)

    @override
    def ready(self) -> Call:
        return self.profile.ready


def model_server(name: str, config: RewardModelConfig) -> ModelServer:
    """Return what starts the servers of `reward_models.NAME`; `ConfigError` names the key that does not fit."""
    profile = PROFILES[config.kind]
    environment = find_environment(config.environment, profile.kind, key=f"reward_models.{name}.environment")
    marker = installed(environment)
    cpu = bool(marker["cpu"]) if marker is not None else computes_on_cpu("auto")
    return ModelServer(name, config, environment, cpu=cpu)
