"""What a reward did in one process: outcomes, latency, values and cost. A count takes about a microsecond."""

from __future__ import annotations

import math
from collections import Counter
from typing import Any, Final, Literal

FailureKind = Literal["error", "deadline", "unavailable"]

_PER_DOUBLING: Final = 4
"""Buckets of latency per factor two, so a quantile is right to 9 %."""
_SHORTEST: Final = 1e-6
_MOST_VALUES: Final = 200
_WHOLE: Final = frozenset({0.0, 1.0})


class RewardFigures:
    """Counts since the process began. Only latency is since the last `line`."""

    def __init__(self) -> None:
        self.ok = 0  # values given, one per sample
        self.failures: Counter[FailureKind] = Counter()  # attempts; `error`: raised, or the result is no number
        self.retried = 0
        self.dead = 0  # samples that this reward failed for good
        self.tokens = 0  # cost
        self.values: Counter[float] = Counter()  # rounded to one digit
        self.blocked = 0  # times that the reward held the event loop
        self.blocked_seconds = 0.0  # the longest of them
        self.leaks = ""  # what is known of memory that it keeps
        self.miscounts = ""  # why its own counts failed the last time
        self._sum = 0.0
        self._squares = 0.0
        self._latency: Counter[int] = Counter()

    def took(self, seconds: float) -> None:
        self._latency[_bucket(seconds)] += 1

    def gave(self, value: float, tokens: int) -> None:
        self.ok += 1
        self.tokens += tokens
        self._sum += value
        self._squares += value * value
        if value in self.values and value in _WHOLE:  # 0 and 1, the values of most rules, need no rounding
            self.values[value] += 1
            return
        rounded = float(f"{value:.1g}")
        if rounded in self.values or len(self.values) < _MOST_VALUES:
            self.values[rounded] += 1

    def held_loop(self, seconds: float) -> None:
        self.blocked += 1
        self.blocked_seconds = max(self.blocked_seconds, seconds)

    def line(self) -> dict[str, Any]:
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
    left = share * sum(buckets.values())
    for bucket in sorted(buckets):
        left -= buckets[bucket]
        if left <= 0:
            return float(f"{_SHORTEST * 2 ** ((bucket + 0.5) / _PER_DOUBLING):.3g}")
    raise ValueError("no calls")
