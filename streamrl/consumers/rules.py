"""Rewards that are rules: no model, no network, microseconds per sample."""

from __future__ import annotations

import math
import re
from typing import ClassVar, Final

from streamrl.consumers.reward import Reward, RewardSample, Score

_NUMBER: Final = re.compile(r"(?:(?<![\w)])[-+])?(?:(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)(?:\.\d*)?|\.\d+)(?:[eE][-+]?\d+)?")
_LONGEST: Final = 1 << 16


class ExactMatch(Reward):
    """1 when the response, stripped of white space at both ends, equals the answer that came with the prompt.

    Args:
        require_stop: a response that did not end by itself (`finish` is not `stop`) gets 0 even if its text is right.
    """

    instant: ClassVar[bool] = True

    def __init__(self, require_stop: bool = False) -> None:
        self.require_stop = require_stop

    async def score(self, sample: RewardSample) -> Score:
        """Return 1 or 0; `ValueError` when the prompt has no answer."""
        answer = _answer(sample)
        ended = sample.finish == "stop" or not self.require_stop
        return Score(float(ended and sample.text.strip() == answer.strip()))


class NumberMatch(Reward):
    """1 when the last number in the response equals the answer numerically, to a relative tolerance.

    Thousands separators are read over, so `1,234.0` equals `1234`. Only the last 65,536 characters are read.

    Args:
        tolerance: largest relative difference that counts as equal.
        require_stop: a response that did not end by itself gets 0 even if its number is right.
    """

    instant: ClassVar[bool] = True

    def __init__(self, tolerance: float = 1e-6, require_stop: bool = False) -> None:
        if not 0 <= tolerance < 1:
            raise ValueError("tolerance must be at least 0 and below 1")
        self.tolerance = tolerance
        self.require_stop = require_stop

    async def score(self, sample: RewardSample) -> Score:
        """Return 1 or 0; `ValueError` when the prompt has no answer or the answer has no number."""
        wanted = last_number(_answer(sample))
        if wanted is None:
            raise ValueError(f"the answer {sample.prompt.answer!r} of line {sample.prompt.line} has no number")
        found = last_number(sample.text)
        ended = sample.finish == "stop" or not self.require_stop
        equal = found is not None and math.isclose(found, wanted, rel_tol=self.tolerance)
        return Score(float(ended and equal))


def last_number(text: str) -> float | None:
    """Return the last finite number written in `text`, or None when there is none."""
    for digits in reversed(_NUMBER.findall(text[-_LONGEST:])):
        number = float(digits.replace(",", ""))
        if math.isfinite(number):
            return number
    return None


def _answer(sample: RewardSample) -> str:
    answer = sample.prompt.answer
    if answer is None:
        raise ValueError(f"line {sample.prompt.line} of the data set has no answer to compare with")
    return answer if isinstance(answer, str) else str(answer)
