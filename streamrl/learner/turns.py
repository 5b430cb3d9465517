"""Rewards of turns as what is still to come after each sampled token.

The reward of a turn is for the actions up to it: for each sampled token of the turns that it continues, and of itself.
So a token's return is the reward of its sample plus the rewards of all turns that follow on its branches. What a turn
got before an action is not part of that action's return. The baseline is taken over samples, never per place of a turn:
subtracting a mean from each reward, before returns are summed, would charge that mean for every further turn
(verl issue 7244).
"""

from __future__ import annotations

import numpy as np

from streamrl.learner.tree import FloatArray, Tree


def return_to_go(tree: Tree | None) -> FloatArray | None:
    """Sum of the rewards of turns from each sampled token on, shape (n,); None where no turn has a reward."""
    if tree is None or not any(tree.rewards):
        return None
    going = list(tree.rewards)
    for turn in range(len(going) - 1, -1, -1):
        if tree.parents[turn] >= 0:
            going[tree.parents[turn]] += going[turn]
    return np.repeat(np.asarray(going, dtype=np.float64), tree.sampled)


def total_reward(tree: Tree | None) -> float:
    """Sum of the rewards of all turns."""
    return 0.0 if tree is None else float(sum(tree.rewards))
