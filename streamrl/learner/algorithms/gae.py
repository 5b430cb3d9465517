"""Generalized advantage estimation, many sequences at a time (Schulman et al., arXiv 1506.02438)."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

FloatArray = npt.NDArray[np.float64]


def generalized_advantages(
    rewards: npt.ArrayLike, values: npt.ArrayLike, *, gamma: float, lam: float, lengths: npt.ArrayLike
) -> FloatArray:
    """Return the advantage of every token of sequences that stand one behind the other.

    `delta_t = r_t + gamma V_{t+1} - V_t` and `A_t = delta_t + gamma lam A_{t+1}` (arXiv 1506.02438, equations 11 and
    16). What is behind the last token of a sequence is worth 0. Returns, which are what a critic learns, are advantages
    plus values. With values of 0 and lam 1 the advantages are discounted returns.

    Args:
        rewards: shape (n,), token by token.
        values: value before each token, shape (n,).
        gamma: discount per token, 0 to 1.
        lam: 1: all later rewards; 0: one step.
        lengths: tokens of each sequence, shape (sequences,); they add up to n.

    Returns:
        Shape (n,).

    Raises:
        ValueError: shapes that differ.
    """
    reward, value = np.asarray(rewards, dtype=np.float64), np.asarray(values, dtype=np.float64)
    counts = np.asarray(lengths, dtype=np.int64)
    if reward.ndim != 1 or reward.shape != value.shape or counts.sum() != reward.size:
        raise ValueError(f"rewards {reward.shape} and values {value.shape} for {counts.sum()} tokens")
    rows = np.repeat(np.arange(counts.size), counts)
    columns = np.arange(reward.size) - np.repeat(np.cumsum(counts) - counts, counts)
    # One row per token of the longest sequence, so that the recursion is one loop whatever the number of sequences.
    grid = np.zeros((counts.max(initial=0) + 1, counts.size))
    grid[columns, rows] = value
    following = grid[columns + 1, rows]
    grid[columns, rows] = reward + gamma * following - value
    for step in range(len(grid) - 2, -1, -1):
        grid[step] += gamma * lam * grid[step + 1]
    return grid[columns, rows]
