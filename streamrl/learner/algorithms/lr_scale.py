"""The learning rate follows how much the data of a step are worth."""

from __future__ import annotations

import math
from typing import Literal

from streamrl.learner.algorithms.gates import Level
from streamrl.learner.algorithms.sums import TokenSums


def lr_factor(rule: Literal["none", "ess", "staleness"], sums: TokenSums, level: Level = "token") -> float:
    """Return the factor of the learning rate of an update, in (0, 1].

    ess (VCPO, arXiv 2602.17616, section 4.1): the square root of the normalised effective sample size
    `(sum w)^2 / (n sum w^2)` of the untruncated weights, as for AdamW the rate follows the square root of the number of
    samples. The paper's weights are those of responses; they count where the gate weighs at level sequence, else the
    weights of tokens do. staleness: `1 / sqrt(1 + mean staleness of a trained token in steps)`; ours: at 16 steps the
    whole division was slower than needed, and none at all too fast (docs/internals/staleness.md).

    Args:
        rule: `learner.correction.lr_scale`.
        sums: of the update, over all ranks.
        level: `Corrections.level`.
    """
    if rule == "ess":
        return math.sqrt(sums.response_ess if level == "sequence" else sums.ess)
    if rule == "staleness":
        return 1 / math.sqrt(1 + sums.mean("age"))
    return 1.0
