"""Rules that take microseconds and run in the event loop (`instant`): they look at the text or length of a response."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from typing import ClassVar, Final, Literal, get_args

import numpy as np
import numpy.typing as npt
from typing_extensions import override

from streamrl.consumers.reward import Reward, RewardSample, Score
from streamrl.errors import DataError
from streamrl.plugin_import import one_of

_NAME_CHARACTERS: Final = frozenset("<>/ \t\n")


def answer_of(sample: RewardSample) -> str:
    """The answer of the prompt as text; `DataError`: it has none."""
    answer = sample.prompt.answer
    if answer is None:
        raise DataError(
            f"line {sample.prompt.line} of the data set has no answer to compare with", "give each line an `answer`"
        )
    return answer if isinstance(answer, str) else str(answer)


def check_tag(tag: str | None) -> str | None:
    """`tag`, the name between `<` and `>`; `ValueError` if it cannot be one."""
    if tag is not None and (not tag or _NAME_CHARACTERS & set(tag)):
        raise ValueError(f"{tag!r} is not a tag: write its name only, for example answer for <answer>")
    return tag


def inside(text: str, tag: str | None) -> str | None:
    """The text between the last `</tag>` and the `<tag>` before it, or None."""
    if tag is None:
        return text
    end = text.rfind(f"</{tag}>")
    start = text.rfind(f"<{tag}>", 0, max(end, 0))
    return None if end < 0 or start < 0 else text[start + len(tag) + 2 : end]


_NUMBER: Final = re.compile(r"(?:(?<![\w)])[-+])?(?:(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)(?:\.\d*)?|\.\d+)(?:[eE][-+]?\d+)?")
_LONGEST: Final = 1 << 16


class ExactMatch(Reward):
    """1 if the response equals the prompt's answer, ignoring white space at both ends.

    Args:
        require_stop: a response that did not end by itself (`finish` is not `stop`) gets 0 even if its text is right.
        tag: only the text between the last `<tag>` and `</tag>` counts; without them the response gets 0.
    """

    instant: ClassVar[bool] = True

    def __init__(self, require_stop: bool = False, tag: str | None = None) -> None:
        self.require_stop = require_stop
        self.tag = check_tag(tag)

    @override
    async def score(self, sample: RewardSample) -> Score:
        answer = answer_of(sample)
        ended = sample.finish == "stop" or not self.require_stop
        text = inside(sample.text, self.tag)
        return Score(float(ended and text is not None and text.strip() == answer.strip()))


class NumberMatch(Reward):
    """1 if the last number in the response equals the answer numerically, to a relative tolerance.

    Thousands separators are ignored, so `1,234.0` equals `1234`. Only the last 65,536 characters are read.

    Args:
        tolerance: largest relative difference that counts as equal.
        require_stop: a response that did not end by itself gets 0 even if its number is right.
        tag: only the text between the last `<tag>` and `</tag>` counts; without them the response gets 0.
    """

    instant: ClassVar[bool] = True

    def __init__(self, tolerance: float = 1e-6, require_stop: bool = False, tag: str | None = None) -> None:
        if not 0 <= tolerance < 1:
            raise ValueError("tolerance must be at least 0 and below 1")
        self.tolerance = tolerance
        self.require_stop = require_stop
        self.tag = check_tag(tag)

    @override
    async def score(self, sample: RewardSample) -> Score:
        wanted = last_number(answer_of(sample))
        if wanted is None:
            raise DataError(f"the answer {sample.prompt.answer!r} of line {sample.prompt.line} has no number")
        found = last_number(inside(sample.text, self.tag) or "")
        ended = sample.finish == "stop" or not self.require_stop
        equal = found is not None and math.isclose(found, wanted, rel_tol=self.tolerance)
        return Score(float(ended and equal))


def last_number(text: str) -> float | None:
    for digits in reversed(_NUMBER.findall(text[-_LONGEST:])):
        number = float(digits.replace(",", ""))
        if math.isfinite(number):
            return number
    return None


_TAGS: Final = ("think", "answer")


class Format(Reward):
    """1 if the response consists of the given tags in order; otherwise 0, or partial credit.

    A tag is right if it is opened once and closed once, comes after the earlier tags, is not empty, and has only white
    space between itself and the tag (or the start of the response) before it; after the last tag, too, only white space
    may follow. Good as a gate: `gate: 1`.

    Args:
        tags: names, in their order.
        opened: the prompt ends with the first opening tag, as in the templates of many reasoning models, so the
            response starts inside of it. The response may repeat that tag at its start.
        outside: text between, before and after the tags is allowed.
        empty: tags with only white space in them are allowed.
        partial: otherwise the score is the share of right tags instead of 0.
    """

    instant: ClassVar[bool] = True

    def __init__(
        self,
        tags: Sequence[str] = _TAGS,
        opened: bool = False,
        outside: bool = False,
        empty: bool = False,
        partial: bool = False,
    ) -> None:
        if isinstance(tags, str) or not tags or len(set(tags)) != len(tags):
            raise ValueError("tags is a list of different names")
        for tag in tags:
            check_tag(tag)
        self.tags = tuple(tags)
        self.opened = opened
        self.outside = outside
        self.empty = empty
        self.partial = partial

    @override
    async def score(self, sample: RewardSample) -> Score:
        text = sample.text
        if self.opened and not text.lstrip().startswith(f"<{self.tags[0]}>"):
            text = f"<{self.tags[0]}>{text}"
        right = self._right(text)
        return Score(1.0 if right == len(self.tags) else right / len(self.tags) if self.partial else 0.0)

    def _right(self, text: str) -> int:
        right, end = 0, 0
        for tag in self.tags:
            opening, closing = f"<{tag}>", f"</{tag}>"
            start, stop = text.find(opening), text.find(closing)
            if text.count(opening) != 1 or text.count(closing) != 1 or not end <= start < stop:
                continue
            before, content = text[end:start], text[start + len(opening) : stop]
            end = stop + len(closing)
            alone = tag != self.tags[-1] or not text[end:].strip()
            right += (self.outside or (not before.strip() and alone)) and (self.empty or bool(content.strip()))
        return right


Unit = Literal["tokens", "words", "characters"]
_UNITS: Final = get_args(Unit)


class Length(Reward):
    """1 for lengths from `least` to `most`, falling linearly to 0 at `slack` beyond them.

    `{least: 0, most: 0, slack: 1000}` is 1 - length / 1000, at least 0: shorter is better. `scoring.overlong` is the
    soft penalty of responses near `sampling.max_new_tokens`. Part: `length`.

    Args:
        least: shortest good length.
        most: longest good length; None: no limit.
        slack: how far beyond either end the score falls to 0; 0: at once.
        unit: `tokens` (sampled ids, including the end-of-sequence token), `words` (separated by white space) or
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
        self.unit = one_of("unit", unit, _UNITS)

    @override
    async def score(self, sample: RewardSample) -> Score:
        if self.unit == "tokens":
            length = len(sample.tokens)
        else:
            length = len(sample.text.split() if self.unit == "words" else sample.text)
        most = length if self.most is None else self.most
        beyond = max(self.least - length, length - most, 0)
        value = 1.0 if beyond == 0 else max(0.0, 1 - beyond / self.slack) if self.slack else 0.0
        return Score(value, {"length": length})


_MIX: Final = np.uint64(0x9E3779B97F4A7C15)
_BASE: Final = np.uint64(0xD6E8FEB86659FD93)
_MOST: Final = 256


class Repetition(Reward):
    """1 if hardly any n-gram occurs twice, falling linearly to 0 as all of them are repeated.

    With r the share of n-grams that occurred before in the response, the score is 1 up to r = `allowed`, then
    (1 - r) / (1 - allowed). A response with fewer units than `n` has no repetition. Part: `repeated`, which is r.

    Args:
        n: units in an n-gram, 1 to 256. Good text repeats small ones too.
        allowed: share of repeated n-grams without a penalty, from 0 to below 1.
        unit: `tokens`, `words` (separated by white space, case ignored) or `characters`.
    """

    instant: ClassVar[bool] = True

    def __init__(self, n: int = 8, allowed: float = 0.0, unit: Unit = "tokens") -> None:
        if not 1 <= n <= _MOST or not 0 <= allowed < 1:
            raise ValueError(f"n is 1 to {_MOST}, allowed at least 0 and below 1")
        self.n = n
        self.allowed = allowed
        self.unit = one_of("unit", unit, _UNITS)

    @override
    async def score(self, sample: RewardSample) -> Score:
        share = repeated(_units(sample, self.unit), self.n)
        value = 1.0 if share <= self.allowed else (1 - share) / (1 - self.allowed)
        return Score(value, {"repeated": share})


def repeated(units: npt.NDArray[np.integer], n: int) -> float:
    """The share of n-grams that occurred before, from 0 to below 1; 0 if there are none. `units` has shape (length,).

    N-grams are compared by a 64-bit hash: two of a million collide with a probability of 3e-8.
    """
    count = len(units) - n + 1
    if count < 1:
        return 0.0
    mixed = units.astype(np.uint64) * _MIX
    mixed ^= mixed >> np.uint64(32)
    grams = np.zeros(count, np.uint64)
    for at in range(n):  # Horner's rule, in arithmetic modulo 2^64
        grams = grams * _BASE + mixed[at : at + count]
    return 1 - len(np.unique(grams)) / count


def _units(sample: RewardSample, unit: Unit) -> npt.NDArray[np.integer]:
    if unit == "tokens":
        return sample.tokens
    if unit == "characters":
        return np.frombuffer(sample.text.encode("utf-32-le", "surrogatepass"), np.uint32)
    numbers: dict[str, int] = {}
    return np.array([numbers.setdefault(word, len(numbers)) for word in sample.text.lower().split()], np.int64)
