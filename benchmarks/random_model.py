"""Causal language models of a given size with random weights, for benchmarks."""

from __future__ import annotations

from pathlib import Path

import torch
import transformers
from safetensors.torch import save_file

SCALE = 0.02


def config_of(parameters: int, context: int = 512) -> transformers.Qwen2Config:
    """A Qwen2 with about so many parameters; the head is tied to the embeddings."""
    hidden = 64 if parameters < 1 << 22 else 512 if parameters < 1 << 27 else 1024
    vocabulary = 1024 if hidden == 64 else 16 * hidden
    layers = max(1, round((parameters - vocabulary * hidden) / (16 * hidden**2)))
    return transformers.Qwen2Config(
        vocab_size=vocabulary,
        hidden_size=hidden,
        intermediate_size=4 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=hidden // 32,
        num_key_value_heads=hidden // 32,
        max_position_embeddings=context,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=0,
    )


def write_model(folder: Path, parameters: int, dtype: torch.dtype, context: int = 512) -> dict[str, torch.Tensor]:
    """Write a model into `folder` and return its weights by their Hugging Face names."""
    config = config_of(parameters, context)
    with torch.device("meta"):
        skeleton = transformers.AutoModelForCausalLM.from_config(config)
    generator = torch.Generator().manual_seed(0)
    weights = {}
    for name, tensor in skeleton.named_parameters():
        if name.endswith("norm.weight"):
            weights[name] = torch.ones(tensor.shape, dtype=dtype)
        else:
            weights[name] = (SCALE * torch.randn(tensor.shape, generator=generator)).to(dtype)
    config.architectures = [type(skeleton).__name__]
    config.dtype = dtype
    config.save_pretrained(folder)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return weights
