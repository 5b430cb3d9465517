"""Which rows a model takes: what its configuration allows, and one check at the start that rows change nothing.

The log-probability of a response must be that of the response alone. Models come with any attention: windows under any
name, masks of their own, positions that depend on the longest row. So the sharded model is tried once, on its device
and in its type:

```
a sequence, and its first half alone     differ: refused, its log-probabilities depend on later tokens
responses in rows, and each alone        differ: one response per pass, with a warning
```
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Final

import numpy as np
import torch
from transformers import PreTrainedConfig

from streamrl.config import RunConfig
from streamrl.errors import ConfigError
from streamrl.images.vision import Vision
from streamrl.learner.batch import Microbatch, RowLimits, TrainSample, microbatch
from streamrl.learner.model import Backbone, exact_products
from streamrl.learner.ranks import Ranks
from streamrl.learner.tree import Segment

logger = logging.getLogger(__name__)
_WIDEST_DENSE: Final = 2048  # above this width a mask of width^2 costs more than the shared prompts save
_WINDOWS: Final = ("sliding_window", "attention_chunk_size", "window_size", "attention_window_size")
"""Windows of attention that our mask replaces, so that shared rows must fit into them."""
_BY_LENGTH: Final = ("longrope", "dynamic")  # rotary embeddings that change for sequences above a length
_LEAST, _MOST = 512, 4096  # tokens of the longest row of the check
_CHEAP: Final = {"cpu": 1e11, "cuda": 1e14}  # floating-point operations that a longer row than the least may cost
_TOLERANCE: Final = {torch.float32: 1e-4, torch.bfloat16: 5e-2}
"""Of hidden states, relative to the longest one; bfloat16 rounds in every layer."""
_ROUTED: Final = 0.9
"""Share of the tokens of a mixture of experts that agree: a rounding error may choose another expert."""
_FAILURES: Final = (AttributeError, TypeError, ValueError, RuntimeError, IndexError)
"""What a model raises when it cannot take a row."""


def row_limits(config: RunConfig, text: PreTrainedConfig, *, packed: bool) -> RowLimits:
    tokens = config.learner.tokens_per_microbatch
    longest = min(config.model.context, getattr(text, "max_position_embeddings", None) or config.model.context)
    if longest > tokens:
        logger.warning(
            "samples above learner.tokens_per_microbatch get a pass of their own, which that does not bound",
            extra={"longest": longest, "tokens_per_microbatch": tokens},
        )
    _check_rotary(text, longest)
    windows = [getattr(text, name, None) or tokens for name in _WINDOWS]
    shared = min([tokens, *windows])
    limits = RowLimits(tokens=tokens, longest=longest, shared=shared, hidden=text.hidden_size, packed=True)
    return limits if packed else dense(limits)


def dense(limits: RowLimits) -> RowLimits:
    return replace(limits, shared=min(limits.shared, 4 * limits.hidden, _WIDEST_DENSE), packed=False)


def _check_rotary(text: PreTrainedConfig, longest: int) -> None:
    """Refuse a `model.context` above the length at which the rotary embedding changes for all tokens."""
    found = getattr(text, "rope_parameters", None) or {}
    for rope in (found, *(value for value in found.values() if isinstance(value, Mapping))):
        if rope.get("rope_type") in _BY_LENGTH:
            limit = rope.get("original_max_position_embeddings") or getattr(text, "max_position_embeddings", None)
            if limit and longest > limit:
                raise ConfigError(
                    f"model.context: the {rope['rope_type']} rotary embedding of this model changes in sequences above"
                    f" {limit} tokens, so a log-probability would depend on later tokens",
                    f"set model.context to at most {limit}",
                )


@torch.no_grad()
def checked(
    limits: RowLimits, states: Callable[[Microbatch], torch.Tensor], ranks: Ranks, module: Backbone
) -> RowLimits:
    """The limits, without rows of several responses where those change what a model computes. Collective.

    `states` are the hidden states of `module` at the places of a micro-batch that predict, shape (n, hidden).
    """
    parameters = sum(parameter.numel() for parameter in module.parameters())
    longest = min(_MOST, max(_LEAST, int(_CHEAP[ranks.device.type] / (2 * parameters))))
    batch = _samples(limits, longest, module.vocabulary)
    alone = replace(limits, shared=0, packed=False)
    share = _ROUTED if any("expert" in name for name in module.model.config.get_text_config().to_dict()) else 1.0
    answers = [Segment.of_answer(sample.prompt, sample.tokens, sample.images) for sample in batch]
    segments = list(enumerate(answers))
    why, causal, same = "", True, True
    with exact_products():
        try:
            expected = [states(microbatch(batch, [[[segment]]], alone)) for segment in segments]
            causal = _agree(expected[0][: len(expected[1])], expected[1], share)
        except _FAILURES as error:
            why, causal = f": {type(error).__name__}: {error}", False
        if ranks.all_min(int(causal)) != [1]:
            later = "what it predicts at a token depends on later tokens"
            what = f"fails on a sequence of {batch[0].width} tokens{why}" if why else later
            raise ConfigError(
                f"{type(module.model).__name__} cannot be trained: {what}",
                "name a causal model in model.path, lower model.context, set learner.compile to false, or try"
                " model.attention: eager",
            )
        long, _, *group, other = segments
        rows = [[group, [other]]] if limits.packed else [[group], [[other]]]
        try:
            for part in (microbatch(batch, rows, limits), microbatch(batch, [[[long]], [[other]]], limits)):
                found = torch.split(states(part), part.counts.tolist())
                pairs = zip(found, part.samples, strict=True)
                same &= all(_agree(ours, expected[index], share) for ours, index in pairs)
        except _FAILURES as error:
            why, same = f": {type(error).__name__}: {error}", False
            states(microbatch(batch, [[[long]]], alone))  # FSDP is in the middle of a pass, and this ends one
    if ranks.all_min(int(same)) == [1]:
        return limits
    what = "flex attention fails" if limits.packed else "each response is computed in a pass of its own"
    logger.warning("%s: other responses change the model%s", what, why)
    return alone


def _samples(limits: RowLimits, longest: int, vocabulary: int) -> Sequence[TrainSample]:
    """A long response, its first half, responses to one prompt with one more that fill a row; random tokens."""
    random = np.random.default_rng(0)
    length, width = min(limits.longest, longest), max(16, min(limits.shared, longest))
    prompt = last = max(1, min(width // 8, limits.longest // 2))
    shown = _shown(limits.vision, min(width, limits.longest) // 2)
    prompt = max(prompt, len(shown["prompt"]) + 1) if shown else prompt

    def sample(prompt: int, count: int) -> TrainSample:
        ids = random.integers(0, vocabulary, prompt + count, dtype=np.int32)
        if limits.vision is not None:
            ids[np.isin(ids, limits.vision.forbidden)] = 0
        none = np.zeros(count, dtype=np.float32)
        return TrainSample(0, ids[:prompt], ids[prompt:], none, none.astype(np.int64), 0.0, none)

    whole = sample(1, length)
    half = replace(whole, **{name: getattr(whole, name)[: -(-length // 2)] for name in _ARRAYS})
    first = sample(prompt, max(1, min(5 * (width - prompt - last) // 6, limits.longest - prompt)))
    if shown:
        first = replace(first, **{**shown, "prompt": np.append(shown["prompt"], first.prompt[len(shown["prompt"]) :])})
    group, room = [first], width - prompt - last - len(first.tokens) + 1
    while room > 0:
        count = min(max(1, width // 16), limits.longest - prompt, room)
        group.append(replace(sample(prompt, count + 1), prompt=first.prompt, images=first.images, blobs=first.blobs))
        room -= count
    return [whole, half, *group, sample(1, last)]


def _shown(vision: Vision | None, room: int) -> dict[str, Any]:
    """The beginning of a prompt that shows an image, as fields of a sample; empty where there is none, or no room."""
    if vision is None:
        return {}
    image = vision.smallest
    ids = np.asarray(vision.tokens_of(image.size), dtype=np.int32)
    if len(ids) >= room:
        logger.warning("rows are checked without an image", extra={"tokens_of_image": len(ids), "room": room})
        return {}
    return {"prompt": ids, "images": (image.sha256,), "blobs": {image.sha256: image.data}}


_ARRAYS: Final = ("tokens", "logprobs", "steps", "advantages")


def _agree(ours: torch.Tensor, expected: torch.Tensor, share: float) -> bool:
    scale = expected.norm(dim=-1).max()
    close = (ours - expected).norm(dim=-1) <= _TOLERANCE[expected.dtype] * scale
    return bool(close.float().mean() >= share)
