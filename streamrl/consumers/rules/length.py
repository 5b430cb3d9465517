"""The response has a wanted length."""

from __future__ import annotations

from typing import ClassVar, Final, Literal, get_args

from streamrl.consumers.reward import Reward, RewardSample, Score
from streamrl.consumers.rules.answers import one_of

Unit = Literal["tokens", "words", "characters"]
UNITS: Final = get_args(Unit)


class Length(Reward):
    """1 for lengths from `least` to `most`, falling along a line to 0 at `slack` beyond them.

    `{least: 0, most: 0, slack: 1000}` is 1 - length / 1000, at least 0: the shorter the better. The soft penalty of
    responses near `sampling.max_new_tokens` is `scoring.overlong`. Part: `length`.

    Args:
        least: shortest length that is good.
        most: longest length that is good; None: no limit.
        slack: how far beyond either end the score falls to 0; 0: at once.
        unit: `tokens` (sampled ids, the end-of-sequence token among them), `words` (between white space) or
            `characters`.
    """

    instant: ClassVar[bool] = True

    def __init__(self, least: int = 0, most: int | None = None, slack: int = 0, unit: Unit = "tokens") -> None:
        if least < 0 or slack < 0 or (most is not None and most < least):
            raise ValueError("least and slack must be at least 0, and most at least as large as least")
        if least == 0 and most is None:
            raise ValueError("give least, most or both: without them every length is good")
        self.least = least
        self.most = most
        self.slack = slack
        self.unit = one_of("unit", unit, UNITS)

    async def score(self, sample: RewardSample) -> Score:
        """Return a number from 0 to 1."""
        length = length_of(sample, self.unit)
        most = length if self.most is None else self.most
        beyond = max(self.least - length, length - most, 0)
        value = 1.0 if beyond == 0 else max(0.0, 1 - beyond / self.slack) if self.slack else 0.0
        return Score(value, {"length": length})


def length_of(sample: RewardSample, unit: Unit) -> int:
    """Return the length of a response."""
    if unit == "tokens":
        return len(sample.tokens)
    return len(sample.text.split()) if unit == "words" else len(sample.text)
