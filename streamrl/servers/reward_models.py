"""Role `reward_model.NAME.N`: a server of a reward model.

```
start       -> heartbeat with url, server (`ready`, `asleep`)
device lock -> sleep | wake     (`reward_models.NAME.sleep` of a colocated run)
```
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from typing_extensions import override

from streamrl.config import RewardModelConfig
from streamrl.config.rewards import REWARD_MODEL_ROLE
from streamrl.errors import ConfigError, DataError, Unreachable, unwrapped
from streamrl.http import BadAnswer, Call, HttpClient
from streamrl.queues.device_lock import EngineDevices
from streamrl.queues.reward_servers import ASLEEP, READY
from streamrl.queues.role import Role
from streamrl.servers.dialect import ServerMetrics
from streamrl.servers.environments import computes_on_cpu, find_environment, installed
from streamrl.servers.launch import LOOPBACK, PROFILES, Launch, Startable, merged
from streamrl.servers.process import ANSWER_SECONDS, ManagedServer, ServerSettings, is_ready
from streamrl.servers.role import serving, watch
from streamrl.waits import first_of

logger = logging.getLogger(__name__)
_PATIENCE: Final = 60.0
_MOVE_SECONDS: Final = 300.0  # longest time to sleep or to wake: weights go between device and host


async def run_reward_model(role: Role) -> None:
    """Run one server of a reward model until `role.stop` is set. `Unreachable`: it ended, hangs or does not wake."""
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
        self._kind = model_server(name, config)
        settings = ServerSettings(
            f"reward_models.{name}", config.model, config.start_deadline, role.config.supervisor, dict(config.variables)
        )
        devices = config.devices[number % len(config.devices)] if config.devices else ""
        self._server = ManagedServer(self._kind, settings, role.run_dir, f"{role.name}.server0", devices, seed=number)
        lock = role.ledgers.device_lock if config.sleep else None
        self._devices = EngineDevices(lock, role.name, wake=self._wake, sleep=self._sleep)
        self._client: HttpClient
        self._asleep = False

    async def run(self) -> None:
        async with serving(self._role, self._devices, self._start, self._close):
            await watch(self._server, self._look, _PATIENCE, lambda: self._asleep)

    async def _start(self) -> None:
        url = await self._server.start()
        self._client = HttpClient(url, hint=f"its log: {self._server.log}")
        self._role.status["url"] = url
        await self._tell(READY)
        self._role.ready()

    async def _close(self) -> None:
        if hasattr(self, "_client"):
            await self._client.close()
        await self._server.stop()

    async def _look(self) -> ServerMetrics | None:
        return ServerMetrics() if await is_ready(self._client, self._kind, ANSWER_SECONDS) else None

    async def _sleep(self) -> None:
        self._asleep = True
        await self._tell(ASLEEP)  # before it sleeps, so that no worker asks it then
        await self._move(ASLEEP, self._kind.profile.sleep)

    async def _wake(self) -> None:
        await self._move("awake", self._kind.profile.wake)
        self._asleep = False
        await self._tell(READY)

    async def _move(self, to: str, calls: Sequence[Call]) -> None:
        """Unreachable: it is on the wrong side of the devices and has to start anew."""
        began = time.monotonic()
        try:
            for call in calls:
                await self._client.call(call, _MOVE_SECONDS)
        except (BadAnswer, DataError) as error:
            said = f"{self._server.name} does not become {to}: {error.message}"
            raise Unreachable(said, "it starts again") from error
        seconds = round(time.monotonic() - began, 3)
        logger.info(to, extra={"server": self._server.name, "seconds": seconds})
        self._role.record({"server": to, "seconds": seconds})

    async def _tell(self, state: str) -> None:
        self._role.status["server"] = state
        await self._role.beat()


class ModelServer(Startable):
    """A server of one reward model, which `ManagedServer` can start; `cpu`: its `environment` is one for a CPU."""

    def __init__(self, name: str, config: RewardModelConfig, environment: Path, *, cpu: bool) -> None:
        self.kind, self.profile = config.kind, PROFILES[config.kind]
        self.ready = self.profile.ready
        self._config = config
        self._section = f"reward_models.{name}"
        self.environment = environment
        self.cpu = cpu
        merged({}, config.flags, section=self._section)
        if config.sleep and cpu:
            said = f"{self._section}.sleep: a {self.kind} server on a CPU keeps its memory, so there is nothing to gain"
            raise ConfigError(said, f"leave out {self._section}.sleep")

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


def model_server(name: str, config: RewardModelConfig) -> ModelServer:
    """Return what starts the servers of `reward_models.NAME`; `ConfigError` names the key that does not fit."""
    profile = PROFILES[config.kind]
    environment = find_environment(config.environment, profile.kind, key=f"reward_models.{name}.environment")
    marker = installed(environment)
    cpu = bool(marker["cpu"]) if marker is not None else computes_on_cpu("auto")
    return ModelServer(name, config, environment, cpu=cpu)
