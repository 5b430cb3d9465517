"""Loading a model for an engine, and which of the two decode loops it gets."""

from __future__ import annotations

import logging
import os
from pathlib import Path
from typing import Any, Literal

import torch

from streamrl.config import RunConfig
from streamrl.cores import THREADS, share_cores, usable_cores
from streamrl.errors import ConfigError
from streamrl.producers.engines.decoder import Job
from streamrl.producers.engines.slots import SlotBatch

logger = logging.getLogger(__name__)

CHEAP_PARAMETERS = 100_000_000
_TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 0.25}


def load_model(config: RunConfig) -> Any:
    """Load the policy in evaluation mode, without gradients; `ConfigError` for missing model, device or weights."""
    import transformers
    from safetensors import SafetensorError

    engine = config.engine
    if engine.threads is not None:
        torch.set_num_threads(engine.threads)
    elif THREADS not in os.environ:  # a role has its share in it; other processes compute alone
        torch.set_num_threads(share_cores(usable_cores(), 1))
    device = pick_device(engine.device)
    transformers.utils.logging.disable_progress_bar()
    try:
        model, info = transformers.AutoModelForCausalLM.from_pretrained(
            config.model.path,
            dtype=getattr(torch, engine.dtype),
            attn_implementation=engine.attention,
            output_loading_info=True,
        )
    except (OSError, ValueError, KeyError, ImportError, SafetensorError) as error:
        hint = "name a directory of a Hugging Face causal language model, or one on the hub (ORGANISATION/NAME)"
        path = Path(config.model.path)
        if not path.exists() and (path.is_absolute() or config.model.path.startswith((".", "~"))):
            raise ConfigError(f"model {config.model.path}: there is no such directory", hint) from error
        raise ConfigError(f"model {config.model.path!r} cannot be loaded: {error}", hint) from error
    # transformers fills the gaps with random numbers and a warning
    if broken := sorted(info["missing_keys"]) + sorted(str(key) for key in info["mismatched_keys"]):
        raise ConfigError(f"model {config.model.path!r} lacks weights: {', '.join(broken[:3])}")
    return model.to(device).eval().requires_grad_(False)


def pick_device(name: str) -> torch.device:
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise ConfigError(f"engine.device {name!r}: {error}") from error
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise ConfigError(f"engine.device {name!r}: this machine has {torch.cuda.device_count()} CUDA devices")
    return device


def stop_tokens(generation: Any, config: Any) -> frozenset[int]:
    ids = None if generation is None else generation.eos_token_id
    if ids is None:
        ids = config.get_text_config().eos_token_id
    if ids is None:
        logger.warning("model has no end-of-sequence token: every response runs into its length limit")
        return frozenset()
    return frozenset([ids] if isinstance(ids, int) else ids)


def stop_tokens_of(model: str) -> frozenset[int]:
    """Tokens that end a response of a model: those of its generation configuration, else of its configuration."""
    import transformers

    try:
        config = transformers.AutoConfig.from_pretrained(model)
    except (OSError, ValueError, KeyError) as error:
        raise ConfigError(
            f"model {model!r} cannot be read: {error}", "model.path names a Hugging Face directory"
        ) from error
    try:
        generation = transformers.GenerationConfig.from_pretrained(model)
    except (OSError, ValueError):
        generation = None
    return stop_tokens(generation, config)


def context_length(config: RunConfig, model: Any) -> int:
    """Longest prompt plus response: the run's, or what the model has positions for."""
    positions = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    return min(config.model.context, positions) if isinstance(positions, int) else config.model.context


def cache_bytes_per_token(model: Any) -> int:
    """Bytes of keys and values of one token, all layers."""
    config = model.config.get_text_config()
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return int(config.num_hidden_layers * 2 * heads * size * model.dtype.itemsize)


def choose_decode(config: RunConfig, model: Any) -> Literal["slots", "continuous"]:
    """The decode loop for this model.

    `auto` takes slots when the forward pass is cheap (below 100 million parameters), every layer has plain full
    attention,
    all slots at full context fit into `engine.kv_cache`, and a trial agrees with a plain forward pass. `ConfigError`:
    `slots` was asked for and this model cannot have it.
    """
    if config.engine.decode == "continuous":
        return "continuous"
    if config.engine.decode == "slots":
        if obstacle := slots_obstacle(model):
            raise ConfigError(f"engine.decode slots: {obstacle}", "set engine.decode to continuous or auto")
        return "slots"
    reason = _too_large(config, model) or slots_obstacle(model)
    decode: Literal["slots", "continuous"] = "continuous" if reason else "slots"
    logger.info("decode loop chosen", extra={"decode": decode, "why": reason})
    return decode


def _too_large(config: RunConfig, model: Any) -> str:
    parameters = sum(parameter.numel() for parameter in model.parameters())
    if parameters >= CHEAP_PARAMETERS:
        return f"{parameters:,} parameters are too many for a cheap forward pass"
    memory = config.engine.slots * context_length(config, model) * cache_bytes_per_token(model)
    if memory > config.engine.kv_cache:
        return f"{memory:,} bytes of keys and values are more than engine.kv_cache"
    return ""


def slots_obstacle(model: Any) -> str:
    """Why static slots would decode this model wrongly; empty when they would not."""
    config = model.config.get_text_config()
    kinds = getattr(config, "layer_types", None)
    if kinds is None:
        kinds = ["sliding_attention" if getattr(config, "sliding_window", None) else "full_attention"]
    rope = getattr(config, "rope_parameters", None) or {}
    if set(kinds) != {"full_attention"}:
        return "not every layer has full attention"
    if rope.get("rope_type") in {"dynamic", "longrope"}:
        return "rotary positions depend on the longest sequence of the batch"
    try:
        error = _trial(model)
    except Exception as failure:  # noqa: BLE001 - any error of foreign model code means: not with slots
        return f"a trial failed: {failure!r}"
    limit = _TOLERANCE.get(model.dtype, 0.25)
    return "" if error <= limit else f"a trial differs from a plain forward pass by {error:.2g}"


def _trial(model: Any) -> float:
    """Decode three short prompts of different lengths; return the largest error of a log-probability."""
    vocabulary = model.config.get_text_config().vocab_size
    generator = torch.Generator(model.device).manual_seed(0)
    batch = SlotBatch(model, slots=3, context=16, stop_tokens=frozenset(), generator=generator)
    prompts = [tuple(token % vocabulary for token in range(3, 3 + length)) for length in (1, 3, 6)]
    ended = batch.admit([Job(ticket, prompt, 6 - ticket, 1.0) for ticket, prompt in enumerate(prompts)])
    while batch.active:
        ended += batch.step()
    worst = 0.0
    for outcome in ended:
        prompt = prompts[outcome.ticket]
        with torch.inference_mode():
            logits = model(input_ids=torch.tensor([[*prompt, *outcome.tokens]], device=model.device)).logits[0]
        expected = torch.log_softmax(logits.float(), -1)[len(prompt) - 1 : -1]
        sampled = torch.tensor(outcome.tokens, device=model.device)
        found = torch.tensor(outcome.logprobs, device=model.device)
        worst = max(worst, float((expected.gather(1, sampled[:, None])[:, 0] - found).abs().max()))
    return worst
