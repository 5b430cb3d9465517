"""Log-probabilities of given tokens without ever holding the logits of a whole batch.

Logits are the largest tensor of language model training: tokens x vocabulary, 4 bytes each. Here they exist for one
chunk of tokens at a time. When there is more than one chunk, each is recomputed in the backward pass.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch.utils.checkpoint import checkpoint

Head = Callable[[torch.Tensor], torch.Tensor]
"""Hidden states of shape (n, hidden) to logits of shape (n, vocabulary)."""


def token_logprobs(
    head: Head,
    hidden: torch.Tensor,
    targets: torch.Tensor,
    *,
    temperature: float,
    chunk: int,
    entropy: bool = False,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return the log-probability of each target, and the entropy of each distribution when asked for.

    Args:
        head: the output layer of the model, with whatever the model does to its logits.
        hidden: last hidden states at the places that predict the targets, shape (n, hidden).
        targets: token ids, shape (n,).
        temperature: softmax temperature, as the engine sampled with.
        chunk: most tokens whose logits exist at the same time, forward and backward.
        entropy: also return `-sum p log p` in nats. It carries a gradient where one is recorded.

    Returns:
        Two float32 tensors of shape (n,); the second is None without `entropy`. The softmax is taken in float32.
    """
    count = hidden.shape[0]
    if count <= chunk or not torch.is_grad_enabled():
        parts = [
            _chunk(head, hidden[start : start + chunk], targets[start : start + chunk], temperature, entropy)
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
                entropy,
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
    head: Head, hidden: torch.Tensor, targets: torch.Tensor, temperature: float, entropy: bool
) -> tuple[torch.Tensor, torch.Tensor | None]:
    logits = head(hidden).float()
    if temperature != 1:
        logits = logits / temperature
    logprobs = torch.log_softmax(logits, dim=-1)
    # Not a gather and a view of it: FSDP hangs its backward hook on the result, and an in-place change would lose it.
    chosen = -torch.nn.functional.nll_loss(logprobs, targets, reduction="none")
    # entr(0) is 0, while 0 * log 0 would be undefined for a token that the model rules out.
    return chosen, torch.special.entr(logprobs.exp()).sum(dim=-1) if entropy else None
