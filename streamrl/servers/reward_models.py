"""How the servers of reward models are started, and how they sleep and wake: command lines and calls as values."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, Final

from typing_extensions import override

from streamrl.config import RewardModelConfig
from streamrl.config.base import ServerKind
from streamrl.errors import ConfigError
from streamrl.http import Call
from streamrl.servers.environments import computes_on_cpu, find_environment, installed
from streamrl.servers.launch import PLUGIN, SGLANG_CPU, Launch, Startable, merged, python_path, words

_CPU_CACHE_BYTES: Final = 1 << 30
_CPU_CACHE_TOKENS: Final = 1 << 16
"""For keys and values on a CPU, where servers would otherwise take most of the host's memory."""
_MEMORY: Final = ["kv_cache", "weights"]


class ModelServer(Startable):
    """A kind of server of one reward model, which `ManagedServer` can start.

    `environment` is the folder of the virtual environment, `cpu` whether it is one for a CPU.
    """

    kind: ClassVar[ServerKind]
    module: ClassVar[str]

    def __init__(self, name: str, config: RewardModelConfig, environment: Path, *, cpu: bool) -> None:
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

    @override
    def launch(self, *, model: str, port: int, seed: int) -> Launch:
        python = str(self.environment / "bin" / "python")
        flags = self.flags(model=model, port=port, seed=seed)
        return Launch([python, "-m", self.module, *words(flags)], self.environ(model))

    def flags(self, *, model: str, port: int, seed: int) -> dict[str, Any]:
        """Those of a server on the loopback interface; the user's win."""
        return merged(self._flags(model, port, seed), self._config.flags, section=self._section)

    @abstractmethod
    def _flags(self, model: str, port: int, seed: int) -> dict[str, Any]: ...
    @abstractmethod
    def environ(self, model: str) -> dict[str, str]: ...
    @abstractmethod
    def sleep(self) -> Sequence[Call]:
        """Free its memory; requests that come wait until it wakes."""

    @abstractmethod
    def wake(self) -> Sequence[Call]: ...


class VllmModel(ModelServer):
    kind: ClassVar[ServerKind] = "vllm"
    module: ClassVar[str] = "vllm.entrypoints.openai.api_server"

    @override
    def _flags(self, model: str, port: int, seed: int) -> dict[str, Any]:
        flags: dict[str, Any] = {
            "model": model,
            "host": "127.0.0.1",
            "port": port,
            "seed": seed,
            "runner": "generate" if self._config.task == "chat" else "pooling",
            "disable-uvicorn-access-log": True,
        }
        if self.cpu:
            flags |= {"enforce-eager": True, "kv-cache-memory-bytes": _CPU_CACHE_BYTES}
        if self._config.sleep:
            flags["enable-sleep-mode"] = True
        return flags

    @override
    def environ(self, model: str) -> dict[str, str]:
        environ = {"VLLM_NO_USAGE_STATS": "1"}
        if self.cpu:
            environ |= {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "PYTHONPATH": python_path(PLUGIN)}
        if self._config.sleep:
            environ["VLLM_SERVER_DEV_MODE"] = "1"  # otherwise it has no routes for it
        return environ

    @override
    def ready(self) -> Call:
        return Call("GET", "/health", repeatable=True)

    @override
    def sleep(self) -> Sequence[Call]:
        # Weights go into the host's memory, keys and values are freed. The server finishes running requests first: one
        # that was kept half done would continue without its keys and values, and return another number.
        return (Call("POST", "/sleep", query={"level": "1", "mode": "wait"}, repeatable=True),)

    @override
    def wake(self) -> Sequence[Call]:
        return (Call("POST", "/wake_up", repeatable=True),)


class SglangModel(ModelServer):
    kind: ClassVar[ServerKind] = "sglang"
    module: ClassVar[str] = "sglang.launch_server"

    @override
    def _flags(self, model: str, port: int, seed: int) -> dict[str, Any]:
        flags: dict[str, Any] = {
            "model-path": model,
            "host": "127.0.0.1",
            "port": port,
            "random-seed": seed,
            "is-embedding": self._config.task != "chat",
            "skip-server-warmup": True,
            # Otherwise each sample is a line of its log.
            "log-level-http": "warning",
            # Otherwise the idle scheduler keeps a core busy.
            "sleep-on-idle": True,
        }
        if self.cpu:
            flags |= {"device": "cpu", "max-total-tokens": _CPU_CACHE_TOKENS}
        if self._config.sleep:
            flags |= {"enable-memory-saver": True, "enable-weights-cpu-backup": True}
        return flags

    @override
    def environ(self, model: str) -> dict[str, str]:
        environ = {"SGLANG_ENABLE_HEALTH_ENDPOINT_GENERATION": "0"}
        if Path(model).is_dir():
            environ["HF_HUB_OFFLINE"] = "1"
        if self.cpu:
            environ |= {"SGLANG_USE_CPU_ENGINE": "1", "PYTHONPATH": python_path(SGLANG_CPU)}
        return environ

    @override
    def ready(self) -> Call:
        # never `/health`, which computes
        return Call("GET", "/ready", repeatable=True)

    @override
    def sleep(self) -> Sequence[Call]:
        # SGLang dies of freeing memory while it computes, so it is paused before.
        pause = Call("POST", "/pause_generation", {"mode": "retract"}, repeatable=True)
        return (pause, Call("POST", "/release_memory_occupation", {"tags": _MEMORY}, repeatable=True))

    @override
    def wake(self) -> Sequence[Call]:
        resume = Call("POST", "/resume_memory_occupation", {"tags": _MEMORY}, repeatable=True)
        return (resume, Call("POST", "/continue_generation", {"torch_empty_cache": False}, repeatable=True))


MODEL_SERVERS: Final[Mapping[str, type[ModelServer]]] = {kind.kind: kind for kind in (VllmModel, SglangModel)}


def model_server(name: str, config: RewardModelConfig) -> ModelServer:
    """Return the kind of the servers of `reward_models.NAME`; `ConfigError` names the key that does not fit."""
    kind = MODEL_SERVERS[config.kind]
    environment = find_environment(config.environment, kind.kind, key=f"reward_models.{name}.environment")
    marker = installed(environment)
    cpu = bool(marker["cpu"]) if marker is not None else computes_on_cpu("auto")
    return kind(name, config, environment, cpu=cpu)
