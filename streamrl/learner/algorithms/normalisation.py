"""Advantages normalised over a whole step, exactly the same on any number of ranks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal, TypeAlias, get_args

import numpy as np
import numpy.typing as npt

FloatArray: TypeAlias = npt.NDArray[np.float64]
AllSum: TypeAlias = Callable[[FloatArray], FloatArray]
"""Adds a float64 array up over all ranks; called by all of them, the same number of times."""
Normalisation = Literal["none", "whiten", "std", "nonzero"]
NORMALISATIONS: tuple[str, ...] = get_args(Normalisation)

_STD_FLOOR = 1e-6
_ROUNDING = 1e-12
"""A deviation below this share of the values themselves is rounding, not contrast."""


def normalise(arrays: Sequence[FloatArray], kind: Normalisation, all_sum: AllSum) -> list[FloatArray]:
    """Normalise the advantages of a step.

    * `none`: as they are.
    * `whiten`: `(A - mean) / (std + 1e-6)` over the tokens of the step (REINFORCE++, arXiv 2501.03262; PPO).
    * `std`: `A / (std + 1e-6)` over the responses of the step, each with the mean of its tokens (ScaleRL, arXiv
      2510.13786; TRL `scale_rewards="batch"`). The mean stays, so 0 stays 0.
    * `nonzero`: `A responses / responses with an advantage` (GPG, arXiv 2504.02546): what has no gradient does not
      thin out the rest.

    Standard deviations are unbiased. Where there is no contrast, `whiten` and `std` give 0: a single token (or
    response) is not its own baseline.

    Args:
        arrays: advantages of this rank's responses, shape (tokens,) each; may be empty on a rank.
        kind: one of the above, the same on all ranks.
        all_sum: sums a float64 array over all ranks.

    Returns:
        New arrays in the same order.

    Raises:
        ValueError: an unknown kind, or advantages so large that their squares are not finite; on all ranks alike.
    """
    if kind == "none":
        return list(arrays)
    filled = [array for array in arrays if array.size]
    if kind == "nonzero":
        counted = all_sum(np.asarray([len(filled), sum(bool(array.any()) for array in filled)], dtype=np.float64))
        return [array * (counted[0] / max(1.0, counted[1])) for array in arrays]
    if kind == "whiten":
        mean, std = _moments(np.concatenate(filled) if filled else np.zeros(0), all_sum)
        return [np.zeros_like(array) if std == 0 else (array - mean) / (std + _STD_FLOOR) for array in arrays]
    if kind == "std":
        _, std = _moments(np.asarray([array.mean() for array in filled], dtype=np.float64), all_sum)
        return [np.zeros_like(array) if std == 0 else array / (std + _STD_FLOOR) for array in arrays]
    raise ValueError(f"there is no normalisation {kind}: {', '.join(NORMALISATIONS)}")


def _moments(values: FloatArray, all_sum: AllSum) -> tuple[float, float]:
    """Mean and unbiased standard deviation over all ranks; 0 for the latter where there is no contrast."""
    with np.errstate(over="ignore", invalid="ignore"):
        count, total = all_sum(np.asarray([values.size, values.sum()], dtype=np.float64))
        mean = total / max(1.0, count)
        squares, magnitude = all_sum(np.asarray([((values - mean) ** 2).sum(), np.abs(values).sum()]))
    if not np.isfinite(squares):
        raise ValueError("advantages of a step are too large to be normalised")
    std = float(np.sqrt(squares / max(1.0, count - 1)))
    return float(mean), 0.0 if std <= _ROUNDING * magnitude / max(1.0, count) else std
