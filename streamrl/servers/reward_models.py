"""The servers of reward models that streamrl starts: a launch profile with the settings of `reward_models.NAME`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from typing_extensions import override

from streamrl.config import RewardModelConfig
from streamrl.errors import ConfigError
from streamrl.http import Call
from streamrl.servers.environments import computes_on_cpu, find_environment, installed
from streamrl.servers.launch import LOOPBACK, PROFILES, Launch, Startable, merged


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
