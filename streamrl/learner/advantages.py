"""Advantages of one whole group of responses to the same prompt.

Groups are always whole: a group reaches the learner when each of its samples has a score or a cause of death, so the
baseline never depends on which response happened to end first.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

STD_FLOOR = 1e-6


def group_advantages(rewards: Sequence[float], *, scale_by_std: bool = True) -> npt.NDArray[np.float64]:
    """Return the advantage of each response of one group.

    With `scale_by_std` this is GRPO (Shao et al., arXiv 2402.03300): `(r - mean) / (std + 1e-6)` with the unbiased
    standard deviation. Without, it is Dr. GRPO (Liu et al., arXiv 2503.20783): `r - mean`.

    A group whose rewards are all equal gets exactly zero. So does a group with one usable response: it would be its
    own baseline, and dividing its raw reward by a made-up standard deviation would turn GRPO into REINFORCE without a
    baseline, which nobody asked for.

    Args:
        rewards: rewards of the usable responses of the group; those with a cause of death are left out.
        scale_by_std: divide by the standard deviation of the group.

    Returns:
        Advantages in the order of `rewards`, shape (responses,).

    Raises:
        ValueError: a reward is not finite, or the rewards are so large that their difference is not.
    """
    values = np.asarray(rewards, dtype=np.float64)
    if not np.all(np.isfinite(values)):
        raise ValueError(f"a reward is not finite: {values.tolist()}")
    if values.size < 2 or np.all(values == values[0]):
        return np.zeros_like(values)
    # The peak is taken out first, so that neither the sum nor a square overflows on rewards like 1e300.
    peak = float(np.max(np.abs(values)))
    scaled = values / peak
    centred = scaled - scaled.mean()
    if scale_by_std:
        return np.asarray(centred / (scaled.std(ddof=1) + STD_FLOOR / peak))
    with np.errstate(over="ignore"):
        advantages = centred * peak
    if not np.all(np.isfinite(advantages)):
        raise ValueError(f"rewards are too far apart for a finite advantage: {values.tolist()}")
    return np.asarray(advantages)
