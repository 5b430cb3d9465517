"""Batches with values and returns, and the plain way to compute values."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np
import torch
from tiny_policy import make_batch

from streamrl.learner.batch import TrainSample


def value_batch(seed: int, **options: int) -> list[TrainSample]:
    """As `make_batch`, with old values of 0 and returns that depend on the state."""
    batch = make_batch(seed, **options)
    return [
        replace(sample, values=np.zeros(len(sample.tokens), np.float32), returns=returns(sample)) for sample in batch
    ]


def returns(sample: TrainSample) -> np.ndarray:
    """A small known value function: 1 in states behind an even token, -1 in the others."""
    before = np.concatenate([sample.prompt[-1:], sample.tokens[:-1]])
    return (1.0 - 2.0 * (before % 2)).astype(np.float32)


def plain_values(model: torch.nn.Module, head: torch.nn.Linear, batch: Sequence[TrainSample]) -> Iterator[torch.Tensor]:
    """One forward pass of the bare model per sample, no padding."""
    for sample in batch:
        ids = torch.from_numpy(np.concatenate([sample.prompt, sample.tokens])).long()[None]
        hidden = model(input_ids=ids).last_hidden_state[0]
        yield head(hidden)[len(sample.prompt) - 1 : -1, 0]
