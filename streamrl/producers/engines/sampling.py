"""Drawing tokens, with the exact log-probability of each draw."""

from __future__ import annotations

import torch


def sample(
    logits: torch.Tensor, temperature: torch.Tensor | None, generator: torch.Generator
) -> tuple[torch.Tensor, torch.Tensor]:
    """Draw one token per row from softmax(logits / temperature); at temperature 0 take the most probable one.

    Inverse of the cumulative distribution in fp64, one uniform number per row: a token of probability 0 is never drawn,
    and a row costs one random number whatever the vocabulary.

    Args:
        logits: shape (rows, vocabulary), any floating type.
        temperature: shape (rows,), at least 0; None for 1 everywhere.
        generator: source of randomness, on the device of the logits.

    Returns:
        tokens (int64) and their log-probabilities (fp32; those of temperature 1 where it is 0), both of shape (rows,).
        NaN logits give a NaN log-probability and a token that means nothing.
    """
    scores = logits.float()
    if temperature is not None:
        scores = scores / torch.where(temperature == 0, 1.0, temperature)[:, None]
    logprobs = torch.log_softmax(scores, dim=-1)
    cumulative = logprobs.double().exp_().cumsum_(dim=-1)
    uniform = torch.rand(len(logits), 1, dtype=torch.float64, device=logits.device, generator=generator)
    tokens = torch.searchsorted(cumulative, uniform.mul_(cumulative[:, -1:]), right=True)
    # rounding may put the product on the last sum itself, one past the end
    tokens.clamp_(max=logits.shape[-1] - 1)
    if temperature is not None:
        tokens = torch.where(temperature[:, None] == 0, scores.argmax(dim=-1, keepdim=True), tokens)
    return tokens[:, 0], logprobs.gather(1, tokens)[:, 0]
