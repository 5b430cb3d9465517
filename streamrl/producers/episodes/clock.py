"""The time of one episode: a deadline for all of it, and a share for each kind of work."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Literal, TypeAlias, get_args

from streamrl.config import EpisodeConfig
from streamrl.errors import StreamrlError
from streamrl.wire import StopReason

Part: TypeAlias = Literal["start", "model", "tools", "scoring"]
"""Parts of the time of an episode, each with a share of its deadline (`episode.shares`)."""


class EpisodeOver(StreamrlError):
    """A limit ends the episode, which keeps what there is. `stop` says which."""

    def __init__(self, stop: StopReason, message: str = "") -> None:
        super().__init__(message or f"the episode ended: {stop}")
        self.stop = stop


class EpisodeClock:
    """Runs from its construction. `late` says which time ran out, in words; empty: none."""

    def __init__(self, config: EpisodeConfig) -> None:
        self._deadline = config.deadline
        self._shares = config.shares
        self._begun = asyncio.get_running_loop().time()
        self._spent = dict.fromkeys(get_args(Part), 0.0)
        self._open: dict[Part, tuple[int, float]] = {}
        self._whole: asyncio.Timeout | None = None
        self._alarm: asyncio.TimerHandle | None = None
        self._reached = self._begun
        self.late = ""

    @asynccontextmanager
    async def whole(self) -> AsyncIterator[None]:
        """Cancel the block when only the time that is kept for `scoring` is left; EpisodeOver then.

        An open part ends by itself. What follows a part that took all its time, and a block that scores, may use the
        time that is kept: there the deadline is the end.
        """
        try:
            async with asyncio.timeout_at(None) as self._whole:
                self._set_alarm()
                yield
        except TimeoutError:
            assert self._whole is not None
            self._check(self._whole, lambda at: f"it took {at - self._begun:.6g} s")
            raise
        finally:
            self._stop_alarm()
            self._whole = None

    @asynccontextmanager
    async def part(self, name: Part) -> AsyncIterator[None]:
        """Count the time of the block to a part, and cancel it when the share of the part is used up: EpisodeOver then.

        Blocks of the same part that overlap count once. Other parts end before the time that is kept for `scoring`.
        """
        share = self._deadline * getattr(self._shares, name)
        count, since = self._open.get(name, (0, self._now()))
        self._open[name] = count + 1, since
        whole, own = self._end(scoring=name == "scoring"), since + share - self._spent[name]

        def why(_: float) -> str:
            if whole < own:
                return f"{whole - self._begun:.6g} s were over during {name}"
            return f"{name} took its share of {share:g} s (episode.shares.{name})"

        limit = asyncio.timeout_at(min(whole, own))
        try:
            async with limit:
                yield
        except TimeoutError:
            self._check(limit, why)
            raise
        finally:
            count, since = self._open.pop(name)
            if count > 1:
                self._open[name] = count - 1, since
            else:
                self._spent[name] += self._now() - since

    def _end(self, *, scoring: bool = False) -> float:
        """When the episode ends, with or without the time that is kept for `scoring`."""
        return self._begun + self._deadline * (1 if scoring else 1 - self._shares.scoring)

    def _set_alarm(self) -> None:
        self._alarm = asyncio.get_running_loop().call_at(self._end(), self._ring)

    def _stop_alarm(self) -> None:
        if self._alarm is not None:
            self._alarm.cancel()

    def _ring(self) -> None:
        """Cancel `whole` now. If a part is open, or used its time up, cancel it at the deadline instead."""
        assert self._whole is not None
        self._whole.reschedule(self._end(scoring=bool(self._open) or self._reached >= self._end()))

    def _check(self, limit: asyncio.Timeout, why: Callable[[float], str]) -> None:
        """EpisodeOver: this limit has cancelled its block."""
        at = limit.when()
        if at is None or not limit.expired():
            return
        self._reached = max(self._reached, at)
        self.late = self.late or self._told(why(at))
        raise EpisodeOver("rollout_timeout", self.late)

    def _told(self, why: str) -> str:
        running = {name: self._now() - since for name, (_, since) in self._open.items()}
        parts = ", ".join(f"{name} {seconds + running.get(name, 0):.3g} s" for name, seconds in self._spent.items())
        return f"the episode ran out of time: {why}; so far: {parts} (episode.deadline {self._deadline:g} s)"

    def _now(self) -> float:
        return asyncio.get_running_loop().time()
