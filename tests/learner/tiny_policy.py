"""Tiny random models, batches and configurations for the tests of the policy and the processes they start."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
import transformers
from transformers import AutoModelForCausalLM

from streamrl.config import RunConfig
from streamrl.learner.batch import Microbatch, RowLimits, TrainSample, dummy
from streamrl.learner.sharding import ShardedModel

ModelT = TypeVar("ModelT", bound=ShardedModel)

VOCABULARY = 61
_COMMON: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 48,
    "max_position_embeddings": 128,
}
KINDS: dict[str, Any] = {
    "Qwen2": {**_COMMON, "num_key_value_heads": 2, "tie_word_embeddings": True},
    "Qwen3": {**_COMMON, "num_key_value_heads": 2, "head_dim": 8, "tie_word_embeddings": True},
    "Llama": {**_COMMON, "num_key_value_heads": 1, "tie_word_embeddings": False},
    "GPTNeoX": {**_COMMON, "attention_bias": False},
    # Scaled embeddings, norms of 1 + weight, heads wider than the hidden size.
    "Gemma": {**_COMMON, "num_key_value_heads": 1, "head_dim": 16},
    # Both kinds of attention with their own rotary bases.
    "Gemma3Text": {
        **_COMMON,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "query_pre_attn_scalar": 8,
        "sliding_window": 64,
        "layer_types": ["sliding_attention", "full_attention"],
    },
    # Soft caps on attention and logits, sliding window in every second layer, scaled embeddings.
    "Gemma2": {
        **_COMMON,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "query_pre_attn_scalar": 8,
        "sliding_window": 64,
        "final_logit_softcapping": 2.0,
    },
    # Learned positions, dropout that must stay off, other names of everything, a fused projection.
    "GPT2": {"vocab_size": VOCABULARY, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 70},
    # Logits are divided by a constant after the output layer.
    "Granite": {**_COMMON, "num_key_value_heads": 2, "logits_scaling": 4.0},
    # Calls `model.decoder`, has a position offset.
    "OPT": {
        "vocab_size": VOCABULARY,
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "ffn_dim": 48,
        "max_position_embeddings": 128,
        "word_embed_proj_dim": 32,
    },
    "Qwen3Moe": {
        **_COMMON,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 16,
    },
}


def make_model(kind: str, folder: Path, *, std: float = 0.15, **values: Any) -> Path:
    """Write a model with random weights; large ones, so that distributions are far from uniform.

    `values` of its configuration come in the place of those in `KINDS`.
    """
    torch.manual_seed(0)
    make_config = getattr(transformers, f"{kind}Config")
    config = make_config(**(values or KINDS[kind]), eos_token_id=2, bos_token_id=1, pad_token_id=0)
    model = AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(std=std)
    model.save_pretrained(folder / kind)
    return folder / kind


def run_config(
    model: Path, *, ranks: int = 1, temperature: float = 1.0, dtype: str = "float32", **learner: Any
) -> RunConfig:
    """A run configuration with all that the policy reads."""
    return RunConfig.model_validate(
        {
            "model": {"path": str(model), "dtype": dtype, "context": 128, "attention": "eager"},
            "sampling": {"temperature": temperature, "max_new_tokens": 64},
            "learner": {"lr": 1e-2, "threads": 1, "ranks": ranks, "collective_deadline": 90, **learner},
            "engine": {"kind": "vllm"},  # which takes versions of every kind
        }
    )


@torch.no_grad()
def untried(limits: RowLimits, states: Callable[[Microbatch], object], *_: object) -> RowLimits:
    """In the place of `rows.checked`, which makes twenty passes: the one that FSDP needs to be set up."""
    states(dummy())
    return limits


def passes_of(model: ShardedModel) -> list[Microbatch]:
    """What the model runs forward and backward from now on, one after the other."""
    found: list[Microbatch] = []
    backward = model._backward

    def noted(parts, loss):
        found.extend(parts)
        backward(parts, loss)

    model._backward = noted
    return found


def train_sample(
    group_id: int, prompt: Any, tokens: Any, logprobs: Any, advantage: float, step: int = 0
) -> TrainSample:
    """A response whose tokens all have one advantage and were sampled at one step."""
    sample = TrainSample(
        group_id, prompt, tokens, logprobs, np.full(len(tokens), step, dtype=np.int64), advantage, np.zeros(len(tokens))
    )
    return with_advantage(sample, advantage)


def with_advantage(sample: TrainSample, advantage: float) -> TrainSample:
    """The same response with one advantage for all of its tokens."""
    return replace(sample, advantages=np.full(len(sample.tokens), advantage, dtype=np.float32))


def make_batch(seed: int, groups: int = 4, size: int = 4, *, zero: int = 0, longest: int = 30) -> list[TrainSample]:
    """Groups of responses of uneven lengths and made-up behaviour log-probs; advantage 0 in the first `zero`."""
    random = np.random.default_rng(seed)

    def ids(count: int) -> np.ndarray[Any, Any]:
        return random.integers(0, VOCABULARY, count).astype(np.int32)

    batch = []
    for group_id in range(groups):
        prompt = ids(int(random.integers(1, 12)))
        for _ in range(size):
            tokens = ids(int(random.integers(1, longest)))
            logprobs = random.normal(-3, 1, len(tokens)).astype(np.float32)
            advantage = 0.0 if group_id < zero else float(random.normal())
            batch.append(train_sample(group_id, prompt, tokens, logprobs, advantage))
    return batch


LAYOUTS: dict[str, dict[str, Any]] = {
    "rows of like length": {},
    "packed": {"packed": True},
    "apart": {"shared": 1},  # every row is wider: padded, without a mask
    "alone": {"shared": 0},
}


def lay_out(model: ModelT, layout: str) -> ModelT:
    """Have an actor or a critic lay its rows out like this, whatever suits its device."""
    model.limits = replace(model.limits, **LAYOUTS[layout])
    return model


def count_tokens(batch: list[TrainSample]) -> int:
    return sum(len(sample.tokens) for sample in batch)


def without_key_biases(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """All but the biases of keys: softmax does not see them, their gradient is rounding noise, and AdamW makes
    whole steps of noise. They differ between any two orders of summation and change nothing."""
    return {name: tensor for name, tensor in tensors.items() if not name.endswith("k_proj.bias")}
