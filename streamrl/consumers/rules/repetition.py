"""The response does not repeat itself."""

from __future__ import annotations

from typing import ClassVar, Final

import numpy as np
import numpy.typing as npt

from streamrl.consumers.reward import Reward, RewardSample, Score
from streamrl.consumers.rules.answers import one_of
from streamrl.consumers.rules.length import UNITS, Unit

_MIX: Final = np.uint64(0x9E3779B97F4A7C15)
_BASE: Final = np.uint64(0xD6E8FEB86659FD93)
_MOST: Final = 256


class Repetition(Reward):
    """1 when hardly any n-gram occurs twice, falling along a line to 0 when all that can be repeated is.

    With r the share of n-grams that have occurred before in the response, the score is 1 up to r = `allowed`, then
    (1 - r) / (1 - allowed). A response with fewer units than `n` has no repetition. Part: `repeated`, which is r.

    Args:
        n: units in an n-gram, 1 to 256. Small ones are repeated by good text too.
        allowed: share of repeated n-grams that does no harm, from 0 to below 1.
        unit: `tokens`, `words` (between white space, upper and lower case the same) or `characters`.
    """

    instant: ClassVar[bool] = True

    def __init__(self, n: int = 8, allowed: float = 0.0, unit: Unit = "tokens") -> None:
        if not 1 <= n <= _MOST or not 0 <= allowed < 1:
            raise ValueError(f"n is 1 to {_MOST}, allowed at least 0 and below 1")
        self.n = n
        self.allowed = allowed
        self.unit = one_of("unit", unit, UNITS)

    async def score(self, sample: RewardSample) -> Score:
        """Return a number from 0 to 1."""
        share = repeated(_units(sample, self.unit), self.n)
        value = 1.0 if share <= self.allowed else (1 - share) / (1 - self.allowed)
        return Score(value, {"repeated": share})


def repeated(units: npt.NDArray[np.integer], n: int) -> float:
    """Return the share of n-grams that have occurred before, from 0 to below 1; 0 when there are none.

    N-grams are told apart by a 64-bit hash: a million of them share one with a chance of 3e-8.

    Args:
        units: shape (length,); equal numbers are equal units.
        n: units in an n-gram.
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
