"""The response is the answer: the same text, or the same number."""

from __future__ import annotations

import math
import re
from typing import ClassVar, Final

from streamrl.consumers.reward import Reward, RewardSample, Score
from streamrl.consumers.rules.answers import answer_of, check_tag, inside
from streamrl.errors import DataError

_NUMBER: Final = re.compile(r"(?:(?<![\w)])[-+])?(?:(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)(?:\.\d*)?|\.\d+)(?:[eE][-+]?\d+)?")
_LONGEST: Final = 1 << 16


class ExactMatch(Reward):
    """1 when the response, stripped of white space at both ends, equals the answer that came with the prompt.

    Args:
        require_stop: a response that did not end by itself (`finish` is not `stop`) gets 0 even if its text is right.
        tag: only what is between the last `<tag>` and `</tag>` counts; without them the response gets 0.
    """

    instant: ClassVar[bool] = True

    def __init__(self, require_stop: bool = False, tag: str | None = None) -> None:
        self.require_stop = require_stop
        self.tag = check_tag(tag)

    async def score(self, sample: RewardSample) -> Score:
        """Return 1 or 0; `DataError` when the prompt has no answer."""
        answer = answer_of(sample)
        ended = sample.finish == "stop" or not self.require_stop
        text = inside(sample.text, self.tag)
        return Score(float(ended and text is not None and text.strip() == answer.strip()))


class NumberMatch(Reward):
    """1 when the last number in the response equals the answer numerically, to a relative tolerance.

    Thousands separators are read over, so `1,234.0` equals `1234`. Only the last 65,536 characters are read.

    Args:
        tolerance: largest relative difference that counts as equal.
        require_stop: a response that did not end by itself gets 0 even if its number is right.
        tag: only what is between the last `<tag>` and `</tag>` counts; without them the response gets 0.
    """

    instant: ClassVar[bool] = True

    def __init__(self, tolerance: float = 1e-6, require_stop: bool = False, tag: str | None = None) -> None:
        if not 0 <= tolerance < 1:
            raise ValueError("tolerance must be at least 0 and below 1")
        self.tolerance = tolerance
        self.require_stop = require_stop
        self.tag = check_tag(tag)

    async def score(self, sample: RewardSample) -> Score:
        """Return 1 or 0; `DataError` when the prompt has no answer or the answer has no number."""
        wanted = last_number(answer_of(sample))
        if wanted is None:
            raise DataError(f"the answer {sample.prompt.answer!r} of line {sample.prompt.line} has no number")
        found = last_number(inside(sample.text, self.tag) or "")
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
