"""The batches of the training benchmark: lengths of the sort task, and equal lengths."""

from __future__ import annotations

import random
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
import transformers
from tokenizers import Tokenizer, models

PAD, BOS, EOS, FIRST, VOCABULARY = 0, 1, 2, 3, 128
CONTEXT = 128
EQUAL = (16, 48)
"""Tokens of each prompt and of each response of the batch of equal lengths."""


class Response(NamedTuple):
    """A sampled response with what both trainers need of it."""

    group: int
    prompt: list[int]
    tokens: list[int]
    advantage: float


def make_batch(kind: str, groups: int, size: int) -> list[Response]:
    """Groups of a kind: `sort`, lengths log-normal as in the sort task, or `equal`; no advantage is 0."""
    source, ids = random.Random(11), np.random.default_rng(0)
    batch = []
    for group in range(groups):
        digits = min(40, max(2, round(source.lognormvariate(np.log(7), 0.75))))
        before, after = (digits + 1, digits + 1) if kind == "sort" else EQUAL
        prompt = ids.integers(FIRST, VOCABULARY, before).tolist()
        for number in range(size):
            tokens = ids.integers(FIRST, VOCABULARY, after).tolist()
            batch.append(Response(group, prompt, tokens, 1.0 if number % 2 else -1.0))
    return batch


def through_model(batch: list[Response]) -> int:
    """Tokens that go through a model when each response is computed by itself, without padding."""
    return sum(len(response.prompt) + len(response.tokens) - 1 for response in batch)


def write_model(folder: Path) -> None:
    """Write the sort task's 1M-parameter model with random weights, and a tokenizer that trl wants to have."""
    torch.manual_seed(0)
    config = transformers.Qwen2Config(
        vocab_size=VOCABULARY,
        hidden_size=128,
        intermediate_size=512,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=CONTEXT,
        tie_word_embeddings=True,
        pad_token_id=PAD,
        bos_token_id=BOS,
        eos_token_id=EOS,
    )
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    words = models.WordLevel({"<pad>": PAD, "<bos>": BOS, "<eos>": EOS, "a": FIRST}, unk_token="<pad>")
    transformers.PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(words), pad_token="<pad>", bos_token="<bos>", eos_token="<eos>"
    ).save_pretrained(folder)
