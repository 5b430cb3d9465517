"""What a reward did in one process: outcomes, latency, values and cost. Counting takes about a microsecond."""

from __future__ import annotations

import math
from collections import Counter
from typing import Any, Final, Literal

FailureKind = Literal["error", "deadline", "unavailable"]

_PER_DOUBLING: Final = 4
"""Buckets of latency per factor two: a quantile is right to 9 %."""
_SHORTEST: Final = 1e-6
_MOST_VALUES: Final = 200
_WHOLE: Final = frozenset({0.0, 1.0})


class RewardFigures:
    """Counts since the process began; `seconds` of the calls since the last `line`.

    Attributes:
        ok: calls that gave a value, one for each sample.
        failures: attempts without one: `error` (raised, or no number), `deadline`, `unavailable`.
        retried: attempts that were followed by another one.
        dead: samples that this reward failed for good.
        tokens: cost, added up.
        values: how often each value was given, rounded to one digit.
        blocked: times that the reward held the event loop.
        blocked_seconds: the longest of them.
        leaks: what it keeps of memory, in words; empty: nothing known.
        miscounts: why its own counts could not be had the last time; empty: they could.
    """

    def __init__(self) -> None:
        self.ok = 0
        self.failures: Counter[FailureKind] = Counter()
        self.retried = 0
        self.dead = 0
        self.tokens = 0
        self.values: Counter[float] = Counter()
        self.blocked = 0
        self.blocked_seconds = 0.0
        self.leaks = ""
        self.miscounts = ""
        self._sum = 0.0
        self._squares = 0.0
        self._latency: Counter[int] = Counter()

    def took(self, seconds: float) -> None:
        """Note how long a call took that ended with a result."""
        self._latency[_bucket(seconds)] += 1

    def gave(self, value: float, tokens: int) -> None:
        """Note a value and its cost."""
        self.ok += 1
        self.tokens += tokens
        self._sum += value
        self._squares += value * value
        if value in self.values and value in _WHOLE:  # what rules give needs no rounding
            self.values[value] += 1
            return
        rounded = float(f"{value:.1g}")
        if rounded in self.values or len(self.values) < _MOST_VALUES:
            self.values[rounded] += 1

    def held_loop(self, seconds: float) -> None:
        """Note that the reward held the event loop."""
        self.blocked += 1
        self.blocked_seconds = max(self.blocked_seconds, seconds)

    def line(self) -> dict[str, Any]:
        """The figures for the role's record; the quantiles of latency begin anew."""
        latency, self._latency = self._latency, Counter()
        line: dict[str, Any] = {
            "ok": self.ok,
            "failed": {outcome: self.failures[outcome] for outcome in ("error", "deadline", "unavailable")},
            "retried": self.retried,
            "dead": self.dead,
            "tokens": self.tokens,
        }
        if latency:
            line["p50"], line["p95"] = quantile(latency, 0.5), quantile(latency, 0.95)
        if self.ok:
            mean = self._sum / self.ok
            line["mean"] = round(mean, 6)
            line["std"] = round(math.sqrt(max(0.0, self._squares / self.ok - mean * mean)), 6)
            line["values"] = {f"{value:g}": count for value, count in sorted(self.values.items())}
        if self.blocked:
            line["blocked"], line["blocked_seconds"] = self.blocked, round(self.blocked_seconds, 3)
        if self.leaks:
            line["leaks"] = self.leaks
        return line


def _bucket(seconds: float) -> int:
    return int(_PER_DOUBLING * math.log2(max(seconds, _SHORTEST) / _SHORTEST))


def quantile(buckets: Counter[int], share: float) -> float:
    """Seconds below which `share` of the calls in the buckets took, to 9 %."""
    left = share * sum(buckets.values())
    for bucket in sorted(buckets):
        left -= buckets[bucket]
        if left <= 0:
            return float(f"{_SHORTEST * 2 ** ((bucket + 0.5) / _PER_DOUBLING):.3g}")
    raise ValueError("no calls")
