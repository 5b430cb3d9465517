"""Generalized advantage estimation over masked sequences, many at a time (Schulman et al., arXiv 1506.02438)."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

FloatArray = npt.NDArray[np.float64]


def generalized_advantages(
    rewards: npt.ArrayLike,
    values: npt.ArrayLike,
    *,
    gamma: float,
    lam: float,
    mask: npt.ArrayLike | None = None,
    segments: npt.ArrayLike | None = None,
) -> FloatArray:
    """Return the advantage of every token.

    `delta_t = r_t + gamma V_{t+1} - V_t` and `A_t = delta_t + gamma lam A_{t+1}` (arXiv 1506.02438, equations 11 and
    16), where t + 1 is the next *sampled* token of the same segment: tokens that the policy did not sample (a tool's
    answer, the turn of a user) are no steps of its, so they neither discount nor carry a value. What is behind the last
    sampled token of a segment is worth 0. A reward on a token that was not sampled belongs to the sampled token before
    it. Returns, which are what a critic learns, are advantages plus values. With values of 0 and lam 1 the advantages
    are discounted returns.

    Args:
        rewards: shape (n,), token by token.
        values: value before each token, shape (n,); those of tokens that were not sampled are not read.
        gamma: discount per sampled token, 0 to 1.
        lam: 1: all later rewards; 0: one step.
        mask: whether the policy sampled the token, shape (n,); None: all.
        segments: sequence that each token belongs to, non-decreasing, shape (n,); None: one sequence.

    Returns:
        Shape (n,), 0 where nothing was sampled.

    Raises:
        ValueError: shapes that differ, segments out of order, or a reward before the first sampled token of a segment.
    """
    reward = np.asarray(rewards, dtype=np.float64)
    value = np.asarray(values, dtype=np.float64)
    sampled = np.ones(reward.shape, dtype=bool) if mask is None else np.asarray(mask).astype(bool)
    segment = np.zeros(reward.shape, dtype=np.int64) if segments is None else np.asarray(segments)
    if reward.ndim != 1 or not (reward.shape == value.shape == sampled.shape == segment.shape):
        raise ValueError(f"shapes of rewards {reward.shape}, values {value.shape}, mask or segments differ")
    if np.any(np.diff(segment) < 0):
        raise ValueError("segments are not in order")
    advantages = np.zeros_like(reward)
    places = np.flatnonzero(sampled)
    if not places.size:
        if np.any(reward):
            raise ValueError("a reward in a sequence without a sampled token")
        return advantages
    reward = _credited(reward, sampled, segment, places)
    _, rows, lengths = np.unique(segment[places], return_inverse=True, return_counts=True)
    columns = np.arange(places.size) - np.repeat(np.cumsum(lengths) - lengths, lengths)
    # One row per token of the longest segment, so that the recursion is one loop whatever the number of segments.
    grid = np.zeros((lengths.max() + 1, lengths.size))
    grid[columns, rows] = value[places]
    following = grid[columns + 1, rows]
    grid[columns, rows] = reward + gamma * following - value[places]
    for step in range(len(grid) - 2, -1, -1):
        grid[step] += gamma * lam * grid[step + 1]
    advantages[places] = grid[columns, rows]
    return advantages


def _credited(
    reward: FloatArray, sampled: npt.NDArray[np.bool_], segment: npt.NDArray[np.int64], places: npt.NDArray[np.int64]
) -> FloatArray:
    """Give each reward to the last sampled token at or before it, shape (sampled tokens,)."""
    owner = np.cumsum(sampled) - 1
    known = owner >= 0
    known[known] = segment[places[owner[known]]] == segment[known]
    if np.any(reward[~known]):
        raise ValueError("a reward before the first sampled token of its sequence")
    return np.bincount(owner[known], weights=reward[known], minlength=places.size).astype(np.float64)
