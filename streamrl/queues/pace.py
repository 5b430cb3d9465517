"""How fast a role works now, for its heartbeat: tokens per second, and the share of the time in which it waits."""

from __future__ import annotations

from collections import deque
from typing import Final

_SECONDS: Final = 10.0


class Pace:
    """Work over the last seconds, from marks of (monotonic seconds, tokens in all, idle seconds in all)."""

    def __init__(self) -> None:
        self._marks: deque[tuple[float, float, float]] = deque()

    def mark(self, mono: float, tokens: float, idle: float) -> None:
        """Add a mark; marks older than ten seconds before it are forgotten, except the last of them."""
        self._marks.append((mono, tokens, idle))
        while len(self._marks) > 2 and self._marks[1][0] <= mono - _SECONDS:
            self._marks.popleft()

    def shown(self) -> dict[str, float]:
        """`tokens_per_second` and `waits` (0 to 1) as fields of a heartbeat; none before two marks."""
        if len(self._marks) < 2:
            return {}
        (since, tokens, idle), (now, all_tokens, all_idle) = self._marks[0], self._marks[-1]
        seconds = now - since
        if seconds <= 0:
            return {}
        waits = min(1.0, max(0.0, all_idle - idle) / seconds)
        return {"tokens_per_second": round((all_tokens - tokens) / seconds, 1), "waits": round(waits, 4)}
