"""How an SGLang server is started: command line and environment, on an accelerator or on a CPU."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, Final

import orjson

from streamrl.config import RunConfig
from streamrl.errors import ConfigError
from streamrl.servers.command_line import adapters_in_flight, merged, words
from streamrl.servers.dialect import Launch
from streamrl.servers.environments import find_environment, on_cpu

PLUGIN: Final = Path(__file__).parent / "plugin"
LOADER: Final = "streamrl_engine.sglang.load"
SHIM: Final = PLUGIN / "sglang_cpu"
_BYTES: Final = {"float32": 4, "bfloat16": 2}


def wants_memory_saver(config: RunConfig) -> bool:
    """Whether the servers of this run can give memory back: started so by us, or by others, who know it best."""
    engine = config.engine
    asked = "enable-memory-saver" in merged({}, engine.flags)
    return bool(engine.url) or asked or config.rollout.placement == "colocated"


def launch_server(config: RunConfig, *, model: str, port: int, seed: int) -> Launch:
    """Return command line and environment of a server on the loopback interface; the user's flags have the last word.

    Raises:
        ConfigError: there is no environment for SGLang, the GPU is missing, or `model` is a folder without a readable
            `config.json`.
    """
    engine = config.engine
    python = find_environment(engine.environment, "sglang") / "bin" / "python"
    flags: dict[str, Any] = {
        "model-path": model,
        "host": "127.0.0.1",
        "port": port,
        "dtype": engine.dtype,
        "context-length": config.model.context,
        "max-running-requests": engine.slots,
        "stream-interval": engine.stream_interval,
        # Without it each message holds the whole response so far.
        "incremental-streaming-output": True,
        # Token ids are all that travels. The warm-up would be a text, which kills the server when the model's own
        # vocabulary has no word of it.
        "skip-tokenizer-init": True,
        "skip-server-warmup": True,
        "sampling-defaults": "openai",
        "custom-weight-loader": LOADER,
        "tp-size": engine.tensor_parallel,
        "random-seed": seed,
        # Otherwise the idle scheduler keeps a core busy.
        "sleep-on-idle": True,
    }
    if config.model.tokenizer is not None:
        flags["tokenizer-path"] = config.model.tokenizer
    tokens = _cache_tokens(config, model)
    if tokens is not None:
        flags["max-total-tokens"] = tokens
    if config.learner.lora.alone:
        flags |= {
            "enable-lora": True,
            "max-lora-rank": config.learner.lora.rank,
            "lora-target-modules": "all",
            "max-loras-per-batch": adapters_in_flight(config.max_staleness),
        }
    if on_cpu(config.engine):
        flags |= {"device": "cpu", "lora-backend": "torch_native"}  # the default is written for accelerators
    elif wants_memory_saver(config):
        flags |= {"enable-memory-saver": True, "enable-weights-cpu-backup": True}
    argv = [str(python), "-m", "sglang.launch_server", *words(merged(flags, engine.flags))]
    return Launch(argv, _environ(config, model))


def _environ(config: RunConfig, model: str) -> dict[str, str]:
    engine = config.engine
    # A look at /health is then only a look: no token is sampled for it.
    environ = {"SGLANG_ENABLE_HEALTH_ENDPOINT_GENERATION": "0"}
    paths = [os.environ.get("PYTHONPATH", "")]
    if Path(model).is_dir():
        environ["HF_HUB_OFFLINE"] = "1"
    if on_cpu(config.engine):
        # More threads than one fight each other for the cores of a busy machine.
        environ |= {"SGLANG_USE_CPU_ENGINE": "1", "OMP_NUM_THREADS": str(engine.threads or 1)}
        if engine.tensor_parallel > 1:
            # It wants a NUMA node for each rank, or to be told which cores are whose: here all share all.
            cores = ",".join(map(str, sorted(os.sched_getaffinity(0))))
            environ["SGLANG_CPU_OMP_THREADS_BIND"] = "|".join([cores] * engine.tensor_parallel)
        paths.insert(0, str(SHIM))
    environ["PYTHONPATH"] = os.pathsep.join(path for path in (str(PLUGIN), *paths) if path)
    return environ


def _cache_tokens(config: RunConfig, model: str) -> int | None:
    """Tokens that `engine.kv_cache` has room for: at least one response, at most twice what all slots can hold.

    None when the model is not a folder, so that nobody knows the size of a token.
    """
    path = Path(model) / "config.json"
    if not Path(model).is_dir():
        return None
    try:
        shape = orjson.loads(path.read_bytes())
    except (OSError, orjson.JSONDecodeError) as error:
        raise ConfigError(f"cannot read {path}: {error}", "model.path must be a Hugging Face model") from error
    shape = shape.get("text_config", shape)
    try:
        heads = int(shape.get("num_attention_heads") or shape["n_head"])
        width = int(shape.get("head_dim") or int(shape.get("hidden_size") or shape["n_embd"]) // heads)
        layers = int(shape.get("num_hidden_layers") or shape["n_layer"])
    except (KeyError, TypeError, ValueError):
        return None
    kept = int(shape.get("num_key_value_heads") or heads)
    token = 2 * layers * kept * width * _BYTES[config.engine.dtype]
    context = config.model.context
    most = 2 * config.engine.slots * context
    return max(context + 1, min(most, config.engine.kv_cache * config.engine.tensor_parallel // token))
