"""Which tokens must go so that the mean squared log ratio of the others is at most tau (M2PO, arXiv 2510.01161).

Dropping the largest first until the mean fits is the same as keeping the longest prefix, in ascending order, whose
mean is at most tau; the mean of a prefix only grows. So one number says it all: the smallest value that is dropped.
Over one micro-batch a sort finds it. Over a step that lies on several ranks it is found digit by digit, from sums.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import numpy.typing as npt
import torch

AllSum = Callable[[npt.NDArray[np.float64]], npt.NDArray[np.float64]]
"""Sum of an array over all ranks, element by element; collective. With one rank: the identity."""
_DIGITS = ((21, 11), (10, 11), (0, 10))
"""(shift, width) in bits of the digits of a non-negative float32, the highest first; its sign bit is 0."""


def smallest_masked(squares: torch.Tensor, movable: torch.Tensor, tau: float) -> torch.Tensor:
    """Return the smallest value to be dropped, a tensor of shape (); infinity when all may stay.

    Args:
        squares: squared log ratios, at least 0, shape (n,).
        movable: which of them count, bool, shape (n,).
        tau: bound on their mean.
    """
    # Those that do not count are put behind all others, so no shape depends on data and nothing waits for the device.
    ordered = torch.where(movable, squares, math.inf).sort().values
    means = ordered.double().cumsum(0) / torch.arange(1, ordered.numel() + 1, device=ordered.device)
    kept = (means <= tau).sum()
    return torch.cat([ordered, ordered.new_full((1,), math.inf)]).index_select(0, kept[None])[0]


def step_limit(squares: npt.NDArray[np.float32], tau: float, all_sum: AllSum) -> float:
    """Return the smallest value to be dropped over the values of all ranks; infinity when all may stay. Collective.

    The bits of non-negative floats are ordered like their values. Three rounds of sums per digit (all_sum of 2 x 2048
    numbers) find the value exactly, however the values are spread over ranks.

    Args:
        squares: this rank's squared log ratios, those that count, at least 0 and finite; possibly none.
        tau: bound on the mean.
        all_sum: sums over ranks.
    """
    bits = np.ascontiguousarray(squares, dtype=np.float32).view(np.uint32).astype(np.int64)
    values = squares.astype(np.float64)
    prefix, below = 0, np.zeros(2)
    for place, (shift, width) in enumerate(_DIGITS):
        mine = bits >> (shift + width) == prefix
        digit = (bits[mine] >> shift) & ((1 << width) - 1)
        sums = [np.bincount(digit, weights=weights, minlength=1 << width) for weights in (None, values[mine])]
        counts, totals = np.cumsum(all_sum(np.stack(sums).astype(np.float64)), axis=1) + below[:, None]
        over = np.flatnonzero(totals > tau * counts)
        if not over.size and not place:
            return math.inf
        # Rounding may let the last digits fit what the digit before them did not: then the greatest value goes.
        chosen = int(over[0]) if over.size else int(np.flatnonzero(np.diff(counts, prepend=below[0]))[-1])
        if chosen:
            below = np.array([counts[chosen - 1], totals[chosen - 1]])
        prefix = prefix << width | chosen
    return float(np.uint32(prefix).view(np.float32))
