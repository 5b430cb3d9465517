"""What an estimator of advantages knows of one group."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

FloatArray: TypeAlias = npt.NDArray[np.float64]
ROUNDING = 1e-9
"""Rewards that differ by less than this share of the largest one are equal: 0.1 + 0.2 is not 0.3 in floating point, and
a deviation of rounding errors must neither divide an advantage nor count as a contrast."""


def all_equal(values: FloatArray) -> bool:
    """Whether values are equal up to `ROUNDING`; one value, and none, are."""
    peak = np.max(np.abs(values), initial=0.0)
    # The peak is taken out first, so that the difference does not overflow on rewards like 1e308.
    return not peak or bool(np.ptp(values / peak) <= ROUNDING)


def difference(left: FloatArray, right: float) -> FloatArray:
    """Return `left - right`, exactly 0 where they are equal up to `ROUNDING`."""
    found = left - right
    found[np.abs(found) <= ROUNDING * np.maximum(np.abs(left), abs(right))] = 0
    return found


@dataclass(frozen=True, slots=True, eq=False)
class GroupData:
    """The k usable responses of one group; those with a cause of death are left out.

    Attributes:
        rewards: shape (k,), finite.
        lengths: sampled tokens of each response, shape (k,).
        behaviour: log-probability that each token was sampled with, one array per response.
        penalties: KL in the reward per token, times its coefficient; taken off the reward. None: none.
        values: of the critic, before each token. None: no critic.
        entropy: of the policy at the start of the step, in nats per token. None when not asked for.
        baseline_reward: reward of the greedy response. None without one.
        tokens: sampled token ids. None when not asked for.
        texts: text of each sampled token, one list per response. None when not asked for.
        prompt_text: of the prompt that all responses answer; empty when not asked for.

    Raises:
        ValueError: a reward is not finite, or arrays that do not have the lengths.
    """

    rewards: FloatArray
    lengths: npt.NDArray[np.int64]
    behaviour: Sequence[npt.ArrayLike]
    penalties: Sequence[npt.ArrayLike] | None = None
    values: Sequence[npt.ArrayLike] | None = None
    entropy: Sequence[npt.ArrayLike] | None = None
    baseline_reward: float | None = None
    tokens: Sequence[npt.ArrayLike] | None = None
    texts: Sequence[Sequence[str]] | None = None
    prompt_text: str = ""

    def __post_init__(self) -> None:
        rewards, lengths = np.asarray(self.rewards, dtype=np.float64), np.asarray(self.lengths, dtype=np.int64)
        object.__setattr__(self, "rewards", rewards)
        object.__setattr__(self, "lengths", lengths)
        known = rewards.tolist() if self.baseline_reward is None else [*rewards.tolist(), self.baseline_reward]
        if not np.all(np.isfinite(known)):
            raise ValueError(f"a reward is not finite: {known}")
        if rewards.ndim != 1 or rewards.shape != lengths.shape:
            raise ValueError(f"{rewards.size} rewards for {lengths.size} responses")
        for name in ("behaviour", "penalties", "values", "entropy", "tokens", "texts"):
            arrays = getattr(self, name)
            if arrays is not None and [len(array) for array in arrays] != lengths.tolist():
                raise ValueError(f"{name} of other lengths than the responses, {lengths.tolist()}")

    @property
    def totals(self) -> FloatArray:
        """Reward of each response without its penalties, shape (k,)."""
        if self.penalties is None:
            return self.rewards
        penalties = [float(np.sum(np.asarray(penalty, np.float64))) for penalty in self.penalties]
        return np.asarray(self.rewards - np.array(penalties, dtype=np.float64))

    def constant(self, per_response: FloatArray) -> list[FloatArray]:
        """Give every token the number of its response: shape (k,) to one array per response."""
        return [np.full(length, value) for value, length in zip(per_response, self.lengths, strict=True)]

    def token_rewards(self) -> list[FloatArray]:
        """Reward of each token: minus its penalty, and the reward of the response on its last one."""
        tokens = [np.zeros(length) for length in self.lengths]
        for index, reward in enumerate(self.rewards):
            if self.penalties is not None:
                tokens[index] -= np.asarray(self.penalties[index], dtype=np.float64)
            if tokens[index].size:
                tokens[index][-1] += reward
        return tokens
