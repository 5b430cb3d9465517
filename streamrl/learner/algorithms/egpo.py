"""Entropy-guided policy optimisation (EGPO): how sure of itself a response was, next to the others of its group."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import numpy as np
import numpy.typing as npt

FloatArray = npt.NDArray[np.float64]
Mask = npt.NDArray[np.bool_]
Part = Literal["joint", "thinking", "answer"]


def part_of(
    texts: Sequence[str], part: Part, prompt: str = "", *, opening: str = "<think>", closing: str = "</think>"
) -> Mask:
    """Which tokens of a response, given by their texts, are in a part of it, shape (tokens,).

    Thinking is between the tags, the answer behind the closing one; a token with any character of a tag is in neither.
    Without both tags there is no thinking, without the closing one no answer. A prompt that ends with the opening
    tag, as chat templates make them, has begun the thinking. `ValueError`: an unknown part, or a tag without text.
    """
    if part not in {"thinking", "answer"}:
        raise ValueError(f"there is no part {part}: joint, thinking or answer")
    if not (opening and closing):
        raise ValueError("opening and closing are the tags around the thinking: text that is not empty")
    ends = np.cumsum([len(text) for text in texts], dtype=np.int64)
    starts = ends - [len(text) for text in texts]
    whole = "".join(texts)
    first, last = _thinking(whole, prompt, opening, closing)
    if last < 0:
        return np.zeros(len(texts), dtype=bool)
    if part == "answer":
        return np.asarray(starts >= last + len(closing))
    return np.asarray((starts >= first) & (ends <= last))


def _thinking(response: str, prompt: str, opening: str, closing: str) -> tuple[int, int]:
    """Where the thinking begins and ends in the text of a response; the end is -1 where there is none."""
    begin = response.find(opening)
    opens_first = begin >= 0 and not response[:begin].strip()
    if prompt.rstrip().endswith(opening) and not opens_first:
        return 0, response.find(closing)
    if begin < 0:
        return 0, -1
    begin += len(opening)
    return begin, response.find(closing, begin)


def mean_uncertainty(per_token: Sequence[npt.ArrayLike], masks: Sequence[Mask] | None = None) -> FloatArray:
    """Mean of each response over its tokens in `masks` (None: all), at least 0; NaN where there are none."""
    means = np.full(len(per_token), np.nan)
    for index, values in enumerate(per_token):
        chosen = np.asarray(values, dtype=np.float64)
        if masks is not None:
            chosen = chosen[masks[index]]
        if chosen.size:
            # Engines round: a log-probability may come back as 1e-7.
            means[index] = max(0.0, float(chosen.mean()))
    return means


def confidence_weights(uncertainty: FloatArray, *, lambda_min: float, lambda_max: float) -> FloatArray:
    """`clip(mean(H) / (H_i + 1e-6), lambda_min, lambda_max)`, shape (responses,).

    A response without uncertainty (NaN) has weight 1 and is not part of the mean.
    """
    if not 0 <= lambda_min <= lambda_max:
        raise ValueError(f"lambda_min {lambda_min}, lambda_max {lambda_max}: 0 <= lambda_min <= lambda_max")
    weights = np.ones_like(uncertainty)
    known = ~np.isnan(uncertainty)
    if known.any():
        mean = uncertainty[known].mean()
        # A group that is sure of every token has no contrast; the ratio 0 / epsilon would say that all are unsure.
        if mean > 0:
            weights[known] = np.clip(mean / (uncertainty[known] + 1e-6), lambda_min, lambda_max)
    return weights


def entropy_bonus(advantages: FloatArray, uncertainty: FloatArray, *, scale: float, share: float) -> FloatArray:
    """`A_i + scale clip(H_i, -|A_i| / share, |A_i| / share)`; an advantage of 0 stays 0, and NaN gives no bonus."""
    if not 0 <= scale < share:
        raise ValueError(f"bonus {scale} must be at least 0 and below bonus_share {share}: a sign could flip")
    bound = np.abs(advantages) / share
    return np.asarray(advantages + scale * np.clip(np.nan_to_num(uncertainty), -bound, bound))


def failures_only(
    advantages: FloatArray, weights: FloatArray, rewards: FloatArray, *, wrong: float, degenerate: float
) -> FloatArray:
    """Mode asymmetric: ours, in the spirit of arXiv 2602.22751.

    A group of failures only has no contrast of rewards; there the contrast of confidence stands in.
    """
    if degenerate < 0:
        raise ValueError(f"degenerate {degenerate} is negative: it would reward overconfident failures")
    if rewards.size > 1 and np.all(rewards <= wrong) and not np.any(advantages):
        return np.asarray(degenerate * (weights.mean() - weights))
    return np.where(advantages < 0, advantages * np.maximum(weights, 1.0), advantages)
