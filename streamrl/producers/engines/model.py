"""Loading a model for an engine, and whether the engine can decode it."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import torch
from safetensors import SafetensorError
from transformers import PreTrainedModel
from transformers.utils.logging import disable_progress_bar

from streamrl.cards import check_room, choose_device
from streamrl.config import RunConfig
from streamrl.cores import THREADS, share_cores, usable_cores
from streamrl.engine import RequestImage
from streamrl.errors import ConfigError
from streamrl.images.vision import Vision, auto_class
from streamrl.producers.engines.slots import FULL, SLIDING, Job, SlotBatch, attention_kinds

logger = logging.getLogger(__name__)

_TOLERANCE: Final = {torch.float32: 1e-4, torch.bfloat16: 0.25}
_TRIED_WINDOW: Final = 3


def load_model(config: RunConfig) -> PreTrainedModel:
    """The policy in evaluation mode, without gradients; `ConfigError` for missing model, device or weights."""
    engine = config.engine
    if engine.threads is not None:
        torch.set_num_threads(engine.threads)
    elif THREADS not in os.environ:  # a role has its share in it; other processes compute alone
        torch.set_num_threads(share_cores(usable_cores(), 1))
    device = choose_device(engine.device, engine.dtype, section="engine")
    disable_progress_bar()
    try:
        model, info = auto_class(config.model).from_pretrained(
            config.model.path,
            dtype=getattr(torch, engine.dtype),
            attn_implementation=engine.attention,
            output_loading_info=True,
        )
    except (OSError, ValueError, KeyError, ImportError, SafetensorError) as error:
        hint = "name a directory of a Hugging Face causal language model, or one on the hub (ORGANISATION/NAME)"
        path = Path(config.model.path)
        if "attn_implementation" in str(error):
            hint = "set engine.attention to eager, or engine.kind to vllm or sglang"
        if not path.exists() and (path.is_absolute() or config.model.path.startswith((".", "~"))):
            raise ConfigError(f"model {config.model.path}: there is no such directory", hint) from error
        raise ConfigError(f"model {config.model.path!r} cannot be loaded: {error}", hint) from error
    # transformers fills the gaps with random numbers and a warning
    if broken := sorted(info["missing_keys"]) + sorted(str(key) for key in info["mismatched_keys"]):
        raise ConfigError(f"model {config.model.path!r} lacks weights: {', '.join(broken[:3])}")
    check_room(device, sum(weight.nbytes for weight in model.parameters()), config.model.path)
    return model.to(device).eval().requires_grad_(False)


def stop_tokens(generation: Any, config: Any) -> frozenset[int]:
    ids = None if generation is None else generation.eos_token_id
    if ids is None:
        ids = config.get_text_config().eos_token_id
    if ids is None:
        logger.warning("model has no end-of-sequence token: every response runs into its length limit")
        return frozenset()
    return frozenset([ids] if isinstance(ids, int) else ids)


def context_length(config: RunConfig, model: Any) -> int:
    """Longest prompt plus response: the run's, or what the model has positions for."""
    positions = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    return min(config.model.context, positions) if isinstance(positions, int) else config.model.context


def cache_bytes_per_token(model: Any) -> int:
    config = model.config.get_text_config()
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return int(config.num_hidden_layers * 2 * heads * size * model.dtype.itemsize)


def affordable_slots(config: RunConfig, model: Any) -> int:
    """How many responses are decoded at the same time: `engine.slots`, or fewer when `engine.kv_cache` is too small."""
    context, asked = context_length(config, model), config.engine.slots
    each = context * cache_bytes_per_token(model)
    slots = min(asked, config.engine.kv_cache // each)
    if not slots:
        what = f"one response of {context} tokens needs {each:,} bytes of keys and values"
        hint = "raise engine.kv_cache, or lower model.context"
        raise ConfigError(f"{what}, engine.kv_cache is {config.engine.kv_cache:,}", hint)
    if slots < asked:
        extra = {"slots": slots, "asked": asked, "kv_cache": config.engine.kv_cache, "needed": asked * each}
        logger.warning("fewer responses at the same time than engine.slots: engine.kv_cache has no room", extra=extra)
    return int(slots)


def check_decodable(config: RunConfig, model: Any, vision: Vision | None = None) -> None:
    if obstacle := _obstacle(model, context_length(config, model), vision):
        what = f"model {config.model.path!r} cannot be sampled by engine.kind hf: {obstacle}"
        raise ConfigError(what, "set engine.kind to vllm or sglang")


def _obstacle(model: Any, context: int, vision: Vision | None) -> str:
    config = model.config.get_text_config()
    if others := sorted(attention_kinds(config) - {FULL, SLIDING}):
        return f"it has layers of kind {', '.join(others)}"
    rope = getattr(config, "rope_parameters", None) or {}
    for part in (rope, *(part for part in rope.values() if isinstance(part, dict))):  # by kind of layer in some models
        if part.get("rope_type") not in {"dynamic", "longrope"}:
            continue
        limit = part.get("original_max_position_embeddings") or config.max_position_embeddings
        if context > limit:
            why = f"its rotary positions depend on the longest sequence of the batch above {limit} tokens"
            return f"{why}, and model.context is {context}"
    try:
        error = _trial(model, vision)
    except Exception as failure:  # noqa: BLE001 - any error of foreign model code means: not with slots
        return f"a trial failed: {failure!r}"
    limit = _TOLERANCE.get(model.dtype, 0.25)
    return "" if error <= limit else f"a trial differs from a plain forward pass by {error:.2g}"


def _trial(model: Any, vision: Vision | None) -> float:
    """The largest error of a log-probability of three short responses, which are longer than the sliding windows.

    A model that sees has a fourth one, to an image.
    """
    vocabulary = model.config.get_text_config().vocab_size
    generator = torch.Generator(model.device).manual_seed(0)
    prompts = [tuple(token % vocabulary for token in range(3, 3 + length)) for length in (1, 3, 6)]
    jobs = [Job(ticket, prompt, 6 - ticket, 1.0) for ticket, prompt in enumerate(prompts)]
    if vision is not None:
        image = vision.smallest
        ids = vision.tokens_of(image.size)
        shown = RequestImage(image.sha256, image.data, 1, len(ids), vision.token_id)
        jobs.append(Job(3, (3, *ids, 4), 4, 1.0, images=(shown,)))
    worst, context = 0.0, 10 + max(len(job.prompt) for job in jobs)
    with _narrow_windows(model):
        batch = SlotBatch(model, slots=4, context=context, stop_tokens=frozenset(), generator=generator, vision=vision)
        ended = batch.admit(jobs)
        while batch.active:
            ended += batch.step()
        for outcome in ended:
            prompt = outcome.prompt
            row = torch.tensor([[*prompt, *outcome.tokens]], device=model.device)
            with torch.inference_mode():
                logits = model(input_ids=row, **_plain(vision, row, outcome)).logits[0]
                if vision is not None:
                    logits[:, list(vision.forbidden)] = -torch.inf
                expected = torch.log_softmax(logits.float(), -1)[len(prompt) - 1 : -1]
            sampled = torch.tensor(outcome.tokens, device=model.device)
            found = torch.tensor(outcome.logprobs, device=model.device)
            worst = max(worst, float((expected.gather(1, sampled[:, None])[:, 0] - found).abs().max()))
    return worst


def _plain(vision: Vision | None, row: torch.Tensor, job: Job) -> dict[str, torch.Tensor]:
    """The images of a job for a forward pass that finds the positions itself."""
    if vision is None or not job.images:
        return {}
    pixels = vision.joined([vision.pixels(image.sha256, image.data) for image in job.images])
    kinds = {"mm_token_type_ids": (row == vision.token_id).int()} if vision.axes > 1 else {}
    return {**kinds, **{key: torch.from_numpy(array).to(row.device) for key, array in pixels.items()}}


@contextmanager
def _narrow_windows(model: Any) -> Iterator[None]:
    configs = {id(module.config): module.config for module in model.modules() if hasattr(module, "config")}
    windows = [(config, config.sliding_window) for config in configs.values() if getattr(config, "sliding_window", 0)]
    for config, window in windows:
        config.sliding_window = min(window, _TRIED_WINDOW)
    try:
        yield
    finally:
        for config, window in windows:
            config.sliding_window = window
