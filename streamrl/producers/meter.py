"""Metrics of a rollout replica: what it samples, how long it idles, and a time line to compare with the learner's."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping
from typing import Final

from streamrl.engine import EngineLoad
from streamrl.queues import Role
from streamrl.queues.pace import Pace

TICK_SECONDS: Final = 0.05
RECORD_SECONDS: Final = 1.0


class Meter:
    """A line a second: `tokens`, `idle_seconds`; `timeline`: [[monotonic seconds, tokens of the 50 ms before], ...]."""

    def __init__(
        self, role: Role, load: Callable[[], EngineLoad], weights: Callable[[], Mapping[str, int | float]]
    ) -> None:
        self._role, self._load, self._weights = role, load, weights
        self._start = self._reported_at = time.monotonic()
        self._busy_before = load().busy_seconds
        self._tokens = load().tokens_sampled
        self._pace = Pace()
        self._timeline: list[tuple[float, int]] = []

    async def run(self) -> None:
        """Measure until cancelled; the first line is written at once, what was not yet reported at the end."""
        self._report(time.monotonic())
        try:
            while True:
                await asyncio.sleep(TICK_SECONDS)
                self._tick(time.monotonic())
        finally:
            self._report(time.monotonic())

    def _tick(self, now: float) -> None:
        tokens = self._load().tokens_sampled
        if tokens > self._tokens:
            self._timeline.append((now, tokens - self._tokens))
            self._tokens = tokens
        if now - self._reported_at >= RECORD_SECONDS:
            self._report(now)

    def _report(self, now: float) -> None:
        load = self._load()
        idle = max(0.0, now - self._start - (load.busy_seconds - self._busy_before))
        self._pace.mark(now, self._tokens, idle)
        self._reported_at = now
        timeline, self._timeline = self._timeline, []
        shared = {
            "version": load.version,
            "tokens": self._tokens,
            "running": load.running,
            "waiting": load.waiting,
            "capacity": load.capacity,
            "servers": load.servers,
            "cache_use": round(load.cache_use, 3),
            **self._weights(),
        }
        self._role.status.update(shared, **self._pace.shown())
        self._role.record({**shared, "timeline": timeline, "idle_seconds": idle})
