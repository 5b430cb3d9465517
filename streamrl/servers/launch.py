"""How servers are started: a profile for each kind, flags as words of a command line, and where our plug-in is."""

from __future__ import annotations

import json
import os
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from streamrl.config import Quantize
from streamrl.config.base import ServerKind
from streamrl.errors import ConfigError
from streamrl.http import Call
from streamrl.weight_sync.quantize import quantization_config

PLUGIN: Final = Path(__file__).parent / "plugin"  # for the PYTHONPATH of vLLM and SGLang servers
LOOPBACK: Final = "127.0.0.1"
_READABLE: Final = "a command line can be read by everybody on the machine; the servers ask for the token of the run"
_NOT_GIVEN: Final = {
    "host": "streamrl says where its servers listen (engine.host)",
    "port": "streamrl finds a free port for each server",
    "api-key": _READABLE,
    "admin-api-key": _READABLE,
}
_MOST_ADAPTERS: Final = 8  # servers keep room for each from their start on; requests with more wait for others


@dataclass(frozen=True, slots=True)
class Launch:
    """A command line, and the variables that are added to the environment."""

    argv: Sequence[str]
    environ: Mapping[str, str]
    # Not to be seen in `argv`: the caller writes them to a file, and names that with `--config`.
    secret_flags: Mapping[str, str] = field(default_factory=dict)


class Startable(ABC):
    """A server that can be started."""

    kind: str  # its name in `streamrl engines install`
    ready: Call  # answers 200 when the server can take requests; cheap, and no disturbance of a pause

    @abstractmethod
    def launch(self, *, model: str, port: int, seed: int, host: str = LOOPBACK, key: str | None = None) -> Launch:
        """How it is started, asking for the `key`; `seed`: 0 to 2**31 - 1. `ConfigError`: no environment."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchProfile:
    """What each server of a kind is started with, engine or reward model; `model`, `seed`, `overrides` name flags.

    `cpu_...` is for a CPU, `sleep_...` for devices whose memory is freed from the calls `sleep` until those of `wake`.
    """

    kind: ServerKind
    module: str
    model: str
    seed: str
    flags: Mapping[str, Any]
    cpu_flags: Mapping[str, Any]
    sleep_flags: Mapping[str, Any]
    scoring: Mapping[str, Any]  # flags of one that returns no text
    overrides: str  # of entries of config.json
    environ: Mapping[str, str]
    cpu_environ: Mapping[str, str]
    sleep_environ: Mapping[str, str] = field(default_factory=dict)
    folder_environ: Mapping[str, str] = field(default_factory=dict)  # for a model that is a directory
    cpu_path: Path  # first on the PYTHONPATH
    key_variable: str = ""  # has the key; empty: a flag in a file has it
    key_flags: Mapping[str, Any] = field(default_factory=dict)
    ready: Call
    sleep: Sequence[Call]
    wake: Sequence[Call]

    def flags_for(self, *, model: str, port: int, seed: int, cpu: bool, sleeps: bool) -> dict[str, Any]:
        """The flags of a server on the loopback interface, without a key."""
        more = self.cpu_flags if cpu else self.sleep_flags if sleeps else {}
        return {self.model: model, "host": LOOPBACK, "port": port, self.seed: seed, **self.flags, **more}

    def quantised(self, kind: Quantize | None) -> dict[str, Any]:
        """Flags for weights that come quantised; those of the model's files are not, so none are read."""
        if kind is None:
            return {}
        return {"load-format": "dummy", self.overrides: {"quantization_config": quantization_config(kind)}}

    def environ_for(self, model: str, *, cpu: bool, sleeps: bool, plugin: bool = False) -> dict[str, str]:
        """The variables; with `plugin` also the path of what replaces weights."""
        environ = {**self.environ, **(self.folder_environ if Path(model).is_dir() else {})}
        environ |= self.cpu_environ if cpu else self.sleep_environ if sleeps else {}
        paths = dict.fromkeys([*([str(PLUGIN)] if plugin else []), *([str(self.cpu_path)] if cpu else [])])
        if paths:
            environ["PYTHONPATH"] = os.pathsep.join(filter(None, [*paths, os.environ.get("PYTHONPATH", "")]))
        return environ

    def launch(
        self, environment: Path, flags: Mapping[str, Any], environ: Mapping[str, str], key: str | None = None
    ) -> Launch:
        """`environment` is the folder of the virtual environment."""
        secret = {}
        if key is not None:
            flags = {**flags, **self.key_flags}
            environ = {**environ, **({self.key_variable: key} if self.key_variable else {})}
            secret = {} if self.key_variable else {"api-key": key}
        return Launch([str(environment / "bin" / "python"), "-m", self.module, *words(flags)], environ, secret)


VLLM: Final = LaunchProfile(
    kind="vllm",
    module="vllm.entrypoints.openai.api_server",
    model="model",
    seed="seed",
    flags={"runner": "generate", "disable-uvicorn-access-log": True},
    # Otherwise keys and values take most of the host's memory.
    cpu_flags={"enforce-eager": True, "kv-cache-memory-bytes": 1 << 30},
    sleep_flags={"enable-sleep-mode": True},
    scoring={"runner": "pooling"},
    overrides="hf-overrides",
    environ={"VLLM_NO_USAGE_STATS": "1"},
    # Bound threads of several servers and of the learner would all run on the same first cores. Some functions are
    # compiled in spite of `enforce-eager`, which takes a compiler and many seconds. Its third process binds threads to
    # cores, which we do not want, and takes a quarter of the start.
    cpu_environ={
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "TORCHDYNAMO_DISABLE": "1",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    },
    sleep_environ={"VLLM_SERVER_DEV_MODE": "1"},  # otherwise it has no routes for it
    cpu_path=PLUGIN,
    key_variable="VLLM_API_KEY",
    key_flags={"middleware": "streamrl_engine.key.KeyGuard"},
    ready=Call("GET", "/health", repeatable=True),
    # Weights go into the host's memory, keys and values are freed. The server finishes running requests first: one that
    # was kept half done would continue without its keys and values, and return another number.
    sleep=(Call("POST", "/sleep", query={"level": "1", "mode": "wait"}, repeatable=True),),
    wake=(Call("POST", "/wake_up", repeatable=True),),
)
_MEMORY: Final = ["kv_cache", "weights"]
SGLANG: Final = LaunchProfile(
    kind="sglang",
    module="sglang.launch_server",
    model="model-path",
    seed="random-seed",
    # The warm-up would be a text, which kills the server when the model's own vocabulary has no word of it. An idle
    # scheduler that does not sleep keeps a core busy. Without a level each request is a line of the log.
    flags={"skip-server-warmup": True, "sleep-on-idle": True, "log-level-http": "warning"},
    cpu_flags={"device": "cpu", "max-total-tokens": 1 << 16},
    sleep_flags={"enable-memory-saver": True, "enable-weights-cpu-backup": True},
    scoring={"is-embedding": True},
    overrides="json-model-override-args",
    # A look at /health is then only a look: no token is sampled for it.
    environ={"SGLANG_ENABLE_HEALTH_ENDPOINT_GENERATION": "0"},
    cpu_environ={"SGLANG_USE_CPU_ENGINE": "1"},
    folder_environ={"HF_HUB_OFFLINE": "1"},
    cpu_path=PLUGIN / "sglang_cpu",
    # 503 also while the server is paused. Never `/health`: it samples a token, takes a second, blocks for 20 s while
    # the server is paused, and marks it as unhealthy afterwards.
    ready=Call("GET", "/ready", repeatable=True),
    # SGLang dies of freeing memory while it computes, so it is paused before.
    sleep=(
        Call("POST", "/pause_generation", {"mode": "retract"}, repeatable=True),
        Call("POST", "/release_memory_occupation", {"tags": _MEMORY}, repeatable=True),
    ),
    wake=(
        Call("POST", "/resume_memory_occupation", {"tags": _MEMORY}, repeatable=True),
        Call("POST", "/continue_generation", {"torch_empty_cache": False}, repeatable=True),
    ),
)
PROFILES: Final[Mapping[str, LaunchProfile]] = {profile.kind: profile for profile in (VLLM, SGLANG)}


def merged(flags: Mapping[str, Any], given: Mapping[str, Any], *, section: str = "engine") -> dict[str, Any]:
    """Return our flags, overridden by the user's (underscores are dashes); `ConfigError` for reserved flags."""
    named = {_dashed(name): value for name, value in given.items()}
    if name := next((name for name in named if name in _NOT_GIVEN), None):
        hint = f"leave it out, or start the server yourself and set {section}.url"
        raise ConfigError(f"{section}.flags.{name} cannot be set: {_NOT_GIVEN[name]}", hint)
    return {**flags, **named}


def words(flags: Mapping[str, Any]) -> Iterator[str]:
    """Yield the words: True is a bare flag, False and None leave it out, a list is several words, a mapping is JSON."""
    for name, value in flags.items():
        if value is None or value is False:
            continue
        yield f"--{name}"
        if isinstance(value, list | tuple):
            yield from map(str, value)
        elif isinstance(value, Mapping):
            yield json.dumps(value)
        elif value is not True:
            yield str(value)


def adapters_in_flight(max_staleness: int) -> int:
    """Adapters that requests may use at one moment: the newest version, and those that older requests began with."""
    return min(max_staleness + 2, _MOST_ADAPTERS)


def _dashed(flag: str) -> str:
    first, dot, rest = flag.lstrip("-").partition(".")  # vLLM's `--hf-overrides.rope_theta` names a key behind the dot
    return first.replace("_", "-") + dot + rest
