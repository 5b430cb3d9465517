"""The time of one episode: one deadline, whose last part is kept for its score."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Literal, TypeAlias

from streamrl.config import EpisodeConfig
from streamrl.errors import StreamrlError
from streamrl.wire import StopReason

Part: TypeAlias = Literal["start", "model", "tools", "scoring"]


class EpisodeOver(StreamrlError):
    """A limit ends the episode, which keeps what there is; `stop` says which."""

    def __init__(self, stop: StopReason, message: str = "") -> None:
        super().__init__(message or f"the episode ended: {stop}")
        self.stop = stop


class EpisodeClock:
    """Runs from its construction. `late` says what the time ran out for, in words; empty: it did not."""

    def __init__(self, config: EpisodeConfig, end: Callable[[StopReason], None]) -> None:
        self._say_end = end
        self._seconds = config.deadline
        self._kept = config.deadline * config.scoring_share
        self._deadline = asyncio.get_running_loop().time() + self._seconds
        self._end = self._deadline - self._kept
        self._parts = 0
        self.late = ""

    @asynccontextmanager
    async def whole(self) -> AsyncIterator[None]:
        """Cancel the block when only the time that is kept for the score is left: EpisodeOver then.

        A part that is open at that moment ends by itself, and what follows it has the time that is kept.
        """
        loop = asyncio.get_running_loop()
        async with self._until(self._deadline, "run") as limit:
            alarm = loop.call_at(self._end, lambda: None if self._parts else limit.reschedule(loop.time()))
            try:
                yield
            finally:
                alarm.cancel()

    @asynccontextmanager
    async def part(self, name: Part) -> AsyncIterator[None]:
        """Cancel the block when its time is over: EpisodeOver then. Only `scoring` has the time that is kept for it."""
        self._parts += 1
        try:
            async with self._until(self._deadline if name == "scoring" else self._end, name):
                yield
        except EpisodeOver as over:
            self._say_end(over.stop)  # whatever the user's code makes of it
            raise
        finally:
            self._parts -= 1

    @asynccontextmanager
    async def _until(self, when: float, what: str) -> AsyncIterator[asyncio.Timeout]:
        limit = asyncio.timeout_at(when)
        try:
            async with limit:
                yield limit
        except TimeoutError as error:
            if not limit.expired():
                raise
            times = f"episode.deadline {self._seconds:g} s, {self._kept:g} s of it for the score"
            self.late = self.late or f"the episode ran out of time during {what} ({times})"
            raise EpisodeOver("rollout_timeout", self.late) from error
