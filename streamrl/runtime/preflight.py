"""Checks before anything starts, so that a mistake is an error now and not an hour later."""

from __future__ import annotations

import asyncio
import functools
import http
import http.client
import os
import re
import socket
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final
from urllib.parse import urlsplit

from streamrl.config import EngineConfig, ModelConfig, RedisConfig, RewardSpec, RunConfig, SourceConfig
from streamrl.config.base import ServerKind
from streamrl.config.sampling import OPTIONS
from streamrl.consumers.adapters import Adapted
from streamrl.consumers.plugins import LoadedReward, load_rewards, models_asked
from streamrl.consumers.reward import Reward
from streamrl.cores import visible_cards
from streamrl.errors import (
    UNKNOWN_NAME,
    CannotCreate,
    ConfigError,
    StreamrlError,
    Unreachable,
    need_packages,
)
from streamrl.producers.curriculum import open_curriculum
from streamrl.producers.dataset import PromptLimits, examine_prompts, first_prompt
from streamrl.producers.episodes.environment import ToolEpisode
from streamrl.producers.episodes.known_models import examine_chat
from streamrl.producers.episodes.sampler import episode_of
from streamrl.producers.order import check_lengths
from streamrl.producers.player import check_recording
from streamrl.producers.records import open_records
from streamrl.producers.tokenizer import Tokenizer
from streamrl.queues import embedded
from streamrl.queues.access import redact
from streamrl.queues.connection import open_to_look
from streamrl.runtime.devices import plan_devices, show_devices
from streamrl.runtime.limits import check_disk, check_files, check_memory, check_shared_memory, model_bytes
from streamrl.runtime.model_checks import check_models
from streamrl.servers import environments
from streamrl.store import run_store

_DEADLINE: Final = 10.0
_LOOKED_AT: Final = 1000
"""Prompts of each source; the feeder reads the others while the run goes on."""
_OWN_FLAGS: Final = frozenset({"port", "host", "model", "model-path", "served-model-name", "api-key", "admin-api-key"})


@dataclass(frozen=True, slots=True)
class Check:
    """`found` if all is well, `error` if the run cannot start."""

    name: str
    found: str = ""
    error: StreamrlError | None = None


def check_all(config: RunConfig, run_dir: Path, *, here: bool = True) -> list[Check]:
    """In the order of the roles; nothing is started, and nothing written but a probe to stores, which is removed.

    `here`: all roles will run on this machine, so that its devices, packages and ports are those of the roles.
    """
    model = config.model
    looks: dict[str, Callable[[], str]] = {
        "packages": _packages,
        "redis": lambda: _redis(config),
        "model": lambda: check_models(config),
        "sampling": lambda: check_sampling(config),
        **({"chats": lambda: check_chats(config)} if model.renders or model.system_prompt is not None else {}),
        "data": lambda: check_data(config),
        **({"episode": lambda: check_episode(config)} if config.episode.kind else {}),
        "rewards": lambda: _rewards(config),
        "reward models": lambda: check_reward_models(config),
        "engine": lambda: check_engine(config),
        "weights": lambda: check_way(config),
        "stores": lambda: check_stores(config),
        "disk": lambda: check_disk(config, run_dir),
        "shared memory": lambda: check_shared_memory(config),
        "memory": lambda: check_memory(config, model_bytes(config, "float32")),
        "open files": lambda: check_files(config, model_bytes(config, config.weights.dtype)),
    }
    if here:
        looks |= {
            "devices": lambda: check_devices(config),
            "loggers": lambda: check_loggers(config),
            "health": lambda: check_health(config),
        }
    if config.recording.mode == "read":
        looks |= {"data": lambda: _recording(config)}
        del looks["engine"], looks["reward models"]
        looks.pop("episode", None)
    checks = []
    for name, look in looks.items():
        try:
            checks.append(Check(name, found=look()))
        except StreamrlError as error:
            checks.append(Check(name, error=error))
    return checks


def preflight(config: RunConfig, run_dir: Path, *, here: bool = True) -> list[Check]:
    """Raises the error of the first check that failed."""
    checks = check_all(config, run_dir, here=here)
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


def check_sampling(config: RunConfig) -> str:
    found = []
    for what, draw in (("training", config.sampling), ("evaluation", config.drawing(evaluation=True))):
        changed = draw.model_dump(include=OPTIONS, exclude_defaults=True)
        found.append(f"{what} {', '.join(f'{name} {value}' for name, value in changed.items()) or 'by the defaults'}")
    if config.sampling.cuts:
        found.append(
            f"WARNING: sampling.{config.sampling.cuts} cuts the distribution, and the learner knows the whole one: its"
            " ratios are too low, those of sequences most (docs/guides/sampling.md)"
        )
    return "; ".join(found)


def check_chats(config: RunConfig) -> str:
    """There is a template, and it knows its arguments: Jinja ignores others without a word."""
    tokenizer, args = Tokenizer.load(config.model), config.model.template_args
    tokenizer.chat_text([{"role": "user", "content": "?"}])
    unknown = [name for name in args if not re.search(rf"\b{re.escape(name)}\b", tokenizer.template)]
    found = f"template {config.model.chat_template or f'of {tokenizer.name}'}"
    found += f" with {', '.join(args)}" if args else ""
    return found + (f"; WARNING: it never names {', '.join(unknown)}, so they change nothing" if unknown else "")


def check_data(config: RunConfig) -> str:
    @functools.cache
    def tokenizer() -> Tokenizer:
        check_models(config)  # a model that cannot be had is said in few words
        return Tokenizer.load(config.model)

    found, limits, sources = [], PromptLimits.of(config), _sources(config)
    records = [open_records(source, config.plugin_paths, _LOOKED_AT) for source in sources]
    check_lengths(records[: len(config.data.train)], config.data)
    for source, of_source in zip(sources, records, strict=True):
        dropped = examine_prompts(source, of_source, tokenizer, limits, count=_LOOKED_AT, images=config.images)
        found.append(of_source.where + f" ({dropped} of the first {_LOOKED_AT} prompts are too long)" * bool(dropped))
    open_curriculum(config)
    return ", ".join(found)


def _sources(config: RunConfig) -> list[SourceConfig]:
    return [*config.data.whole(config.data.train), *config.data.whole(config.data.held_out)]


def _recording(config: RunConfig) -> str:
    header = check_recording(config)
    if header.model != config.model.path:
        return f"{config.recording.path}, sampled by {header.model}: far off-policy from the first step on"
    return str(config.recording.path)


def _rewards(config: RunConfig) -> str:
    rewards = load_rewards(config)
    for reward in rewards:
        reward.limits.check_config(config)
    if config.evaluation.final_prompts:
        _check_end(rewards, config)
    if config.recording.mode != "read":
        _check_columns(rewards, config)
        if (sources := config.data.names) is not None:
            _check_routes(config.rewards, sources)
    return ", ".join(reward.name for reward in rewards)


def _check_routes(rewards: Sequence[RewardSpec], sources: set[str]) -> None:
    """Each reward waits for sources that there are, and each source gets a score."""
    known = ", ".join(map(repr, sorted(sources)))
    for reward in rewards:
        if unknown := set(reward.when.source if reward.when else ()) - sources:
            what = f"rewards.{reward.name or reward.use}.when.source: no data has the name {min(unknown)!r}"
            raise ConfigError(what, f"there are {known}; `name:` of a source in data.train gives it another one")
    for name in sorted(sources):
        if not any(reward.adds and reward.applies(name) for reward in rewards):
            what = f"no reward scores prompts of source {name!r}: all have a gate, weight 0 or another when.source"
            raise ConfigError(what, "add a reward for it, or name it in when.source of one")


def check_episode(config: RunConfig) -> str:
    """Episodes can be built, tools can work, the tokenizer has a chat template, the model takes whole episodes."""
    episode = episode_of(config)
    if isinstance(episode, ToolEpisode):
        asyncio.run(episode.open())
    chats = examine_chat(Tokenizer.load(config.model), config.episode.tool_format)
    _check_context(config.model)
    return f"{config.episode.kind}: {type(episode).__name__}, chats are {chats}"


def _check_context(model: ModelConfig) -> None:
    """An episode ends at `model.context`, so the model must have a position for each of its tokens."""
    positions = getattr(_text_config(model), "max_position_embeddings", None)
    if isinstance(positions, int) and positions < model.context:
        raise ConfigError(
            f"episodes may have model.context ({model.context}) tokens, but {model.path} has {positions} positions",
            f"set model.context to {positions} or less",
        )


def _text_config(model: ModelConfig) -> Any:
    from transformers import AutoConfig  # takes a second, and most runs do not need it

    try:
        return AutoConfig.from_pretrained(model.path).get_text_config()
    except (OSError, ValueError) as error:
        raise ConfigError(f"the config of {model.path} cannot be read: {error}") from error


def _check_columns(rewards: Sequence[LoadedReward], config: RunConfig) -> None:
    """Functions of other systems must find their columns in the first line of each file, if it is for them."""
    adapted = [
        (reward.name, reward.call) for reward in rewards if isinstance(reward.call, Adapted) and not reward.spec.when
    ]
    if not adapted:
        return
    for source in _sources(config):
        try:
            records = open_records(source, config.plugin_paths, 1)
            record = first_prompt(source, records)
        except ConfigError:
            return  # the look at the data says so
        for name, call in adapted:
            call.check_line(record, f"the first line of {records.where}", name)


def _check_end(rewards: Sequence[LoadedReward], config: RunConfig) -> None:
    """The rewards must be able to measure versions after the run. Only one with its own `open` can ask a model."""
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


def check_engine(config: RunConfig) -> str:
    engine = config.engine
    if engine.url:
        return ", ".join(_answers(engine, url) for url in engine.url)
    if engine.kind == "hf":
        return "transformers in the workers' processes"
    assert engine.kind != "openai", "the configuration refuses it without a URL"
    return _environment(engine, engine.kind)


def check_devices(config: RunConfig) -> str:
    devices = {"learner.device": config.learner.device} if config.recording.mode != "write" else {}
    if config.engine.kind == "hf" and config.recording.mode != "read":
        devices["engine.device"] = config.engine.device
    for key, device in devices.items():
        environments.check_device(key, device)
    cards = visible_cards()
    return show_devices(plan_devices(config, cards), cards)


def check_loggers(config: RunConfig) -> str:
    for name in config.learner.report_to:
        need_packages(f"learner.report_to {name}", name, extra=name, otherwise="leave it out")
    return ", ".join(config.learner.report_to) or "none"


def check_health(config: RunConfig) -> str:
    if config.health.port:
        raise ConfigError(
            f"health.port {config.health.port} is one port, and all roles on this host would listen on it",
            "set health.port to 0; `streamrl status --json` shows the address of each role",
        )
    return "a free port for each role"


def check_reward_models(config: RunConfig) -> str:
    """Which servers answer for which reward model. Running servers may be down: workers wait for them."""
    found = []
    for name, model in config.reward_models.items():
        if model.managed:
            from streamrl.servers.reward_models import model_server  # an HTTP client, which few runs need here

            server = model_server(name, model)
            if not server.cpu and environments.computes_on_cpu("auto"):
                raise ConfigError(
                    f"reward_models.{name}: the environment in {server.environment} is made for GPUs, and this machine"
                    " has none",
                    f"{environments.install_command(model.kind)} --cpu --into DIR; name it in reward_models.{name}",
                )
        found.append(f"{name}: {', '.join(model.url) if model.url else f'{model.servers} x {model.kind}'}")
    return "; ".join(found) or "none"


def _environment(engine: EngineConfig, kind: ServerKind) -> str:
    from streamrl.servers.launch import PLUGIN  # an HTTP client, which takes a while

    wants_cpu = environments.on_cpu(engine)
    folder = environments.find_environment(engine.environment, kind)
    taken = sorted({flag.lstrip("-").replace("_", "-") for flag in engine.flags} & _OWN_FLAGS)
    if taken:
        raise ConfigError(
            f"engine.flags sets {', '.join(taken)}, which streamrl chooses for the servers it starts",
            "leave it out; for a server that you start, set engine.url",
        )
    if not (PLUGIN / "streamrl_engine" / f"{kind}.py").is_file():
        raise ConfigError(f"streamrl is installed without its plug-in for {kind} servers", "install streamrl again")
    marker = environments.installed(folder)
    if marker is None:
        return f"{kind} of unknown version in {folder}"
    if marker["cpu"] != wants_cpu:
        made, wanted = ("CPUs", "a GPU") if marker["cpu"] else ("GPUs", "the CPU")
        option = "--cpu" if wants_cpu else "--gpu"
        raise ConfigError(
            f"the {kind} environment in {folder} is made for {made}, this run generates on {wanted}",
            f"{environments.install_command(kind)} {option}, or set engine.environment to another one",
        )
    return f"{kind} {marker['version']} in {folder}, {engine.servers} of them"


def _answers(engine: EngineConfig, url: str) -> str:
    from streamrl.http import read_key  # an HTTP client, which takes a while
    from streamrl.servers.kinds import DIALECTS

    parts = urlsplit(url)
    assert parts.hostname, "the configuration refuses other URLs"
    guarded = DIALECTS[engine.kind].guarded
    key = read_key("engine.api_key_file", engine.api_key_file)
    headers = {} if key is None else {"Authorization": f"Bearer {key}"}
    kind = http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
    connection = kind(parts.hostname, parts.port, timeout=_DEADLINE)
    try:
        connection.request("GET", parts.path.rstrip("/") + guarded, headers=headers)
        status = connection.getresponse().status
    except (OSError, http.client.HTTPException) as error:
        hint = f"start it, or leave out engine.url to let streamrl start {engine.kind} servers"
        hint = UNKNOWN_NAME if isinstance(error, socket.gaierror) else hint
        raise Unreachable(f"no server answers at {url}: {error or type(error).__name__}", hint) from error
    finally:
        connection.close()
    if status in {401, 403}:
        raise ConfigError(f"the server at {url} refuses our key (HTTP {status})", "set engine.api_key_file")
    if status == http.HTTPStatus.NOT_FOUND and engine.kind != "openai":
        raise ConfigError(
            f"the server at {url} is not of kind {engine.kind}: it has no {guarded}",
            "let engine.kind say what runs there",
        )
    return url


def check_way(config: RunConfig) -> str:
    weights = config.weights
    if weights.pulled and weights.url is None:
        _bindable(weights.host, weights.port)
    _check_quantize(config)
    more = f", deltas between every {weights.delta.every}" if weights.delta.enabled else ""
    more += f", {weights.quantize} for the engines" if weights.quantize else ""
    return f"{weights.url or weights.transport}, {weights.dtype}{more}"


def _check_quantize(config: RunConfig) -> None:
    kind, engine = config.weights.quantize, config.engine
    if kind is None:
        return
    if kind == "fp8_block" and not engine.url and environments.on_cpu(engine):
        raise ConfigError(
            f"weights.quantize fp8_block: {engine.kind} has no kernel for it on a CPU, where this run generates",
            "use int8 or fp8_channel, with engine.kind vllm",
        )
    check_models(config)  # a model that cannot be had is said in few words
    if any("experts" in key and value for key, value in _text_config(config.model).to_dict().items()):
        raise ConfigError(
            f"weights.quantize: {config.model.path} is a mixture of experts, which is not quantised", "leave it out"
        )


def check_stores(config: RunConfig) -> str:
    """Write a small file to each store of the run and remove it."""
    archive = config.archive.store if config.archive.enabled else None
    urls = {"checkpoint.store": config.checkpoint.store, "archive.store": archive, "weights.url": config.weights.url}
    found = []
    for key, url in urls.items():
        if (store := run_store(url, config, key)) is not None:
            store.probe()
            found.append(store.url)
    return ", ".join(found) or "none"


def _bindable(host: str, port: int) -> None:
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, socket.SOCK_STREAM) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(address)
    except socket.gaierror as error:
        raise ConfigError(
            f"weights.host {host} is unknown: {error.strerror}", "name an address of this host"
        ) from error
    except OSError as error:
        raise CannotCreate(
            f"cannot listen on {host} port {port} for the weights: {os.strerror(error.errno or 0)}",
            "set weights.host to an address of this host, and weights.port to a free port or 0",
        ) from error
