"""How the losses of tokens become one number: a weight per token and one divisor per update.

Both are known on the host before anything is computed. The gradient of an update is
`sum over tokens of weight x loss / normaliser`, where the sum runs over all ranks, micro-batches and rows, so it does
not matter how the responses were cut up, padded or packed, or on which rank they lie. Tokens are counted before any
gate drops some: dropping tokens makes a step smaller, it does not turn up the others.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import numpy as np
import numpy.typing as npt

Aggregate = Literal["token_mean", "sequence_mean", "constant_length"]


def token_weights(
    counts: Sequence[int] | npt.NDArray[np.int64], aggregate: Aggregate, max_new_tokens: int
) -> npt.NDArray[np.float32]:
    """Return the weight of each token, responses one behind the other, shape (sum of counts,).

    token_mean: 1. sequence_mean (GRPO, arXiv 2402.03300): 1 / length of its response. constant_length (Dr. GRPO, arXiv
    2503.20783): 1 / max_new_tokens, so the length of a response changes nothing but how many tokens it adds.

    Args:
        counts: sampled tokens of each response.
        aggregate: `learner.loss.aggregate`.
        max_new_tokens: `sampling.max_new_tokens`.
    """
    lengths = np.asarray(counts, dtype=np.int64)
    if aggregate == "token_mean":
        each = np.ones(len(lengths))
    elif aggregate == "sequence_mean":
        each = 1 / np.maximum(lengths, 1)
    else:
        each = np.full(len(lengths), 1 / max_new_tokens)
    return np.repeat(each, lengths).astype(np.float32)


def normaliser(aggregate: Aggregate, *, tokens: int, responses: int) -> int:
    """Return what the weighted sum of an update is divided by; at least 1.

    Args:
        aggregate: `learner.loss.aggregate`.
        tokens: sampled tokens of the update on all ranks, dropped ones and those of zero-advantage responses included.
        responses: of the update on all ranks, those of zero advantage included.
    """
    return max(1, tokens if aggregate == "token_mean" else responses)
