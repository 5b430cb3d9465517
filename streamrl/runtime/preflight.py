"""What is looked at before anything starts, so that a mistake is an error now and not an hour later."""

from __future__ import annotations

import asyncio
import shutil
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import orjson

from streamrl.config import RedisConfig, RunConfig
from streamrl.consumers.adapters import Adapted
from streamrl.consumers.plugins import LoadedReward, load_rewards, models_asked
from streamrl.consumers.reward import Reward
from streamrl.errors import CannotCreate, ConfigError, DataError, StreamrlError, need_packages
from streamrl.producers.player import check_recording
from streamrl.queues import embedded
from streamrl.queues.access import redact
from streamrl.queues.connection import open_to_look
from streamrl.runtime.engine_checks import look_at_engine, look_at_reward_models, look_at_way, shared_memory_copies
from streamrl.runtime.limits import look_at_files, look_at_memory
from streamrl.runtime.model_checks import look_at_models, weight_files

_SHM: Final = Path("/dev/shm")  # noqa: S108 (memory of this host, not a temporary file)
_LINE_HINT: Final = 'each line is one JSON object: {"prompt": "2+2=", "answer": "4"}'
_MARGIN: Final = 64 << 20
_BYTES: Final = {"float32": 4, "bfloat16": 2}


@dataclass(frozen=True, slots=True)
class Check:
    """The result of one look: `found` when all is well, `error` when the run cannot start."""

    name: str
    found: str = ""
    error: StreamrlError | None = None


def check_all(config: RunConfig, run_dir: Path) -> list[Check]:
    """Look at everything and return what was found; nothing is started or written, the order is that of the roles."""
    looks: dict[str, Callable[[], str]] = {
        "packages": _packages,
        "redis": lambda: _redis(config),
        "model": lambda: look_at_models(config),
        "data": lambda: _data(config),
        "rewards": lambda: _rewards(config),
        "reward models": lambda: look_at_reward_models(config),
        "engine": lambda: look_at_engine(config),
        "weights": lambda: look_at_way(config),
        "disk": lambda: _disk(config, run_dir),
        "shared memory": lambda: _shared_memory(config),
        "memory": lambda: look_at_memory(config, _model_bytes(config, "float32")),
        "open files": lambda: look_at_files(config, _model_bytes(config, config.weights.dtype)),
    }
    if config.recording.mode == "read":
        looks |= {"data": lambda: _recording(config)}
        del looks["engine"], looks["reward models"]
    checks = []
    for name, look in looks.items():
        try:
            checks.append(Check(name, found=look()))
        except StreamrlError as error:
            checks.append(Check(name, error=error))
    return checks


def preflight(config: RunConfig, run_dir: Path) -> list[Check]:
    """Return the checks when all are well; otherwise raise the error of the first that is not."""
    checks = check_all(config, run_dir)
    for check in checks:
        if check.error is not None:
            raise check.error
    return checks


def _packages() -> str:
    need_packages("training", "torch", "transformers", "safetensors")
    return f"Python {sys.version_info.major}.{sys.version_info.minor}"


def _redis(config: RunConfig) -> str:
    if config.redis.url is None:
        server = embedded.find_server()
        return f"own server, {server.executable} {'.'.join(map(str, server.version))}"
    asyncio.run(_reach(config.redis, config.redis.url))
    return redact(config.redis.url)


async def _reach(config: RedisConfig, url: str) -> None:
    async with open_to_look(config, url):
        pass


def _data(config: RunConfig) -> str:
    for file in _files(config):
        _first_prompt(file)
    return ", ".join(map(str, _files(config)))


def _files(config: RunConfig) -> list[Path]:
    return [config.data.train, *([config.data.held_out] if config.data.held_out else [])]


def _recording(config: RunConfig) -> str:
    header = check_recording(config)
    if header.model != config.model.path:
        return f"{config.recording.path}, sampled by {header.model}: far off-policy from the first step on"
    return str(config.recording.path)


def _first_prompt(path: Path) -> dict[str, Any]:
    """Return the first line; only this one is looked at: the feeder reads the whole file before it admits anything."""
    try:
        with path.open("rb") as file:
            line = next((line for line in file if line.strip()), None)
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror}", "see data.train and data.held_out") from error
    if line is None:
        raise DataError(f"{path} is empty", _LINE_HINT)
    try:
        record = orjson.loads(line)
    except orjson.JSONDecodeError as error:
        raise DataError(f"{path}, first line: no JSON: {error}", _LINE_HINT) from error
    if not isinstance(record, dict) or not {"prompt", "messages"} & set(record):
        raise DataError(f"{path}, first line: neither `prompt` nor `messages`", _LINE_HINT)
    return record


def _rewards(config: RunConfig) -> str:
    rewards = load_rewards(config)
    for reward in rewards:
        reward.limits.check_config(config)
    if config.evaluation.final_prompts:
        _check_end(rewards, config)
    if config.recording.mode != "read":
        _check_columns(rewards, config)
    return ", ".join(reward.name for reward in rewards)


def _check_columns(rewards: Sequence[LoadedReward], config: RunConfig) -> None:
    """See that functions of other systems find what they need in the first line of each file."""
    adapted = [(reward.name, reward.call) for reward in rewards if isinstance(reward.call, Adapted)]
    if not adapted:
        return
    for file in _files(config):
        try:
            record = _first_prompt(file)
        except DataError:
            return  # the look at the data says so
        for name, call in adapted:
            call.check_line(record, f"the first line of {file}", name)


def _check_end(rewards: Sequence[LoadedReward], config: RunConfig) -> None:
    """See that the rewards can measure versions when the run is over; only those that `open` can ask a model."""
    asking = [reward.spec for reward in rewards if getattr(type(reward.life), "open", None) not in (None, Reward.open)]
    started = [name for name, model in models_asked(asking, config.reward_models).items() if model.managed]
    if started:
        raise ConfigError(
            f"evaluation.final_prompts measures after the servers of reward_models.{started[0]} have ended",
            "set it to 0 (evaluation.every measures while they run), or start the server yourself and set its url",
        )
    comparing = [reward.name for reward in rewards if reward.group]
    if comparing:
        raise ConfigError(
            f"reward {comparing[0]} compares the responses to one prompt with each other, so that its scores say"
            " nothing of one version: evaluation.final_prompts cannot measure with it",
            "set evaluation.final_prompts to 0",
        )


def _disk(config: RunConfig, run_dir: Path) -> str:
    # Weights and two moments of AdamW in float32, for the checkpoints that are kept and the one being written.
    checkpoint, steps = config.checkpoint, config.learner.steps
    milestones = steps // checkpoint.keep_every if steps and checkpoint.keep_every else 0
    need = _MARGIN
    if config.recording.mode != "write":
        need += 3 * _model_bytes(config, "float32") * (checkpoint.keep + milestones + 1)
    if config.weights.transport == "directory":
        need += 3 * _model_bytes(config, config.weights.dtype)
    folder = next(path for path in (run_dir.resolve(), *run_dir.resolve().parents) if path.exists())
    return _space(folder, need, "use another disk, or lower checkpoint.keep")


def _shared_memory(config: RunConfig) -> str:
    copies = shared_memory_copies(config)
    if not copies:
        return "not used"
    hint = "give the host (or container: --shm-size) a larger /dev/shm"
    if not config.weights.delta.enabled:
        hint = f"{hint}, or set weights.transport: directory"
    if not _SHM.is_dir():
        raise ConfigError(f"{_SHM} does not exist on this system", hint)
    return _space(_SHM, copies * _model_bytes(config, config.weights.dtype), hint)


def _space(folder: Path, need: int, hint: str) -> str:
    free = shutil.disk_usage(folder).free
    if free < need:
        raise CannotCreate(f"{folder} has {free >> 20} MiB free, this run needs {need >> 20} MiB", hint)
    return f"{free >> 20} MiB free in {folder}, {need >> 20} MiB needed"


def _model_bytes(config: RunConfig, dtype: str) -> int:
    """Size of the weights in `dtype`, from the files of the model (bfloat16 unless its config says float32)."""
    path = Path(config.model.path)
    files = weight_files(path) if path.is_dir() else []
    size = sum(file.stat().st_size for file in files)
    try:
        described = orjson.loads((path / "config.json").read_bytes()) if files else {}
    except (OSError, orjson.JSONDecodeError):
        described = {}
    stored = str(described.get("dtype") or described.get("torch_dtype") or "bfloat16")
    return size * _BYTES[dtype] // _BYTES.get(stored, 2)
