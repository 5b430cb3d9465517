"""Log-probabilities of given tokens without ever holding the logits of a whole batch.

Logits are the largest tensor of language model training: tokens x vocabulary, 4 bytes each. Here they exist for one
chunk of tokens at a time. When there is more than one chunk, each is recomputed in the backward pass.
"""

from __future__ import annotations

from collections.abc import Callable
from enum import Enum

import torch
from torch.utils.checkpoint import checkpoint

_LOG_ZERO = -1e4
"""Stands for log 0: finite, and its `exp` is 0."""
Head = Callable[[torch.Tensor], torch.Tensor]
"""Hidden states of shape (n, hidden) to logits of shape (n, vocabulary)."""


class _Entropy(Enum):
    """Whether the entropy is computed, and with a gradient."""

    NONE = 0
    VALUE = 1
    GRADIENT = 2


def token_logprobs(
    head: Head,
    hidden: torch.Tensor,
    targets: torch.Tensor,
    *,
    temperature: float,
    chunk: int,
    entropy: bool = False,
    entropy_gradient: bool = False,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return the log-probability of each target, and the entropy of each distribution when asked for.

    Args:
        head: the output layer of the model, with whatever the model does to its logits.
        hidden: last hidden states at the places that predict the targets, shape (n, hidden).
        targets: token ids, shape (n,).
        temperature: softmax temperature, as the engine sampled with.
        chunk: most tokens whose logits exist at the same time, forward and backward.
        entropy: also return `-sum p log p` in nats.
        entropy_gradient: the entropy carries a gradient, which costs as much again.

    Returns:
        Two float32 tensors of shape (n,); the second is None without `entropy`. The softmax is taken in float32.
    """
    count = hidden.shape[0]
    want = _Entropy.NONE if not entropy else _Entropy.GRADIENT if entropy_gradient else _Entropy.VALUE
    if count <= chunk or not torch.is_grad_enabled():
        parts = [
            _chunk(head, hidden[start : start + chunk], targets[start : start + chunk], temperature, want)
            for start in range(0, count, chunk)
        ]
    else:
        parts = [
            checkpoint(
                _chunk,
                head,
                hidden[start : start + chunk],
                targets[start : start + chunk],
                temperature,
                want,
                use_reentrant=False,
                preserve_rng_state=False,
            )
            for start in range(0, count, chunk)
        ]
    if len(parts) == 1:
        return parts[0]
    logprobs = torch.cat([logprob for logprob, _ in parts])
    return logprobs, torch.cat([part for _, part in parts if part is not None]) if entropy else None


def _chunk(
    head: Head, hidden: torch.Tensor, targets: torch.Tensor, temperature: float, want: _Entropy
) -> tuple[torch.Tensor, torch.Tensor | None]:
    logits = head(hidden).float()
    if temperature != 1:
        logits = logits / temperature
    logprobs = torch.log_softmax(logits, dim=-1)
    # Not a gather and a view of it: FSDP hangs its backward hook on the result, and an in-place change would lose it.
    chosen = -torch.nn.functional.nll_loss(logprobs, targets, reduction="none")
    if want is _Entropy.NONE:
        return chosen, None
    known = logprobs if want is _Entropy.GRADIENT else logprobs.detach()
    # 0 * log 0 would be undefined for a token that the model rules out.
    return chosen, -(known.exp() * known.clamp(min=_LOG_ZERO)).sum(dim=-1)
