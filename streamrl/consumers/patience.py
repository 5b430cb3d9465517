"""Scoring outside of a run, without a queue that a sample could go back to: it waits as in a run, to a limit."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, Final, TypeVar

from streamrl import wire
from streamrl.config import LeaseConfig
from streamrl.consumers.calls import RewardCalls
from streamrl.consumers.plugins import HOLD_SHARE
from streamrl.consumers.reward import RewardSample
from streamrl.consumers.scoring import Scorer, ScoringFailed
from streamrl.errors import RewardUnavailable, Unreachable

logger = logging.getLogger(__name__)

_R = TypeVar("_R")
_LOOK_SECONDS: Final = 0.25
_END_SECONDS: Final = 10.0
"""Seconds in which scoring that was given up has to end."""
TELL_SECONDS: Final = 10.0
"""Seconds between two lines about who is waited for."""


class PatientScorer:
    """Scores as a reward worker does: that nobody can score now is no attempt. Made and used in one event loop.

    A worker gives back what nobody could score for nearly as long as a lease may be held. Here it is taken again at
    once, as long as others were scored, or failed, in that time. When nobody was, all is given up.

    Args:
        scorer: open.
        lease: of the run file; its `max_hold` is the limit.
        patience: seconds for which it waits for rewards that say who is away, where that is less.
    """

    def __init__(self, scorer: Scorer, lease: LeaseConfig, patience: float | None = None) -> None:
        self._scorer = scorer
        self._limit = HOLD_SHARE * lease.max_hold
        self._patience = self._limit if patience is None else min(patience, self._limit)
        self._hint = "lease.max_hold" if patience is None else "--wait"
        self._hint += " is how long it is waited for"
        self._ended = 0

    @property
    def whole(self) -> bool:
        """Whether a reward compares, so that groups are scored as a whole."""
        return self._scorer.whole

    @property
    def calls(self) -> Sequence[RewardCalls]:
        """The rewards with their figures."""
        return self._scorer.calls

    async def score_group(self, samples: Sequence[RewardSample]) -> list[wire.Score | ScoringFailed]:
        """Score samples of one group, as `Scorer.score_group`.

        Raises:
            Unreachable: nobody could score anything for as long as a lease may be held.
            DeadlineExceeded: as of `Scorer.score_group`.
        """
        while True:
            began, ended = time.monotonic(), self._ended
            try:
                results = await self._within_patience(self._scorer.score_group(samples, began + self._limit))
            except RewardUnavailable as error:
                if self._ended == ended:
                    raise Unreachable(
                        f"nothing could be scored for {time.monotonic() - began:.0f} s: {error.message}",
                        error.hint or self._hint,
                    ) from error
            else:
                self._ended += 1
                return results

    async def _within_patience(self, scoring: Coroutine[Any, Any, _R]) -> _R:
        """Await it.

        Raises:
            Unreachable: a reward has been away for longer than patience, and nothing was scored meanwhile.
        """
        task = asyncio.ensure_future(scoring)
        since, ended = time.monotonic(), self._ended
        try:
            while not (await asyncio.wait({task}, timeout=_LOOK_SECONDS))[0]:
                away = [(calls.reward.name, why) for calls in self.calls if (why := calls.away)]
                now = time.monotonic()
                if not away or self._ended != ended:
                    since, ended = now, self._ended
                elif now - since >= self._patience:
                    name, why = away[0]
                    raise Unreachable(
                        f"nothing could be scored for {now - since:.0f} s, {name} is away: {why}", self._hint
                    )
        finally:
            if not task.done():
                task.cancel()
                await asyncio.wait({task}, timeout=_END_SECONDS)
            if not task.done():
                logger.warning("scoring that was given up does not end", extra={"seconds": _END_SECONDS})
        return task.result()

    async def tell(self, say: Callable[[str], None]) -> None:
        """Say again and again which rewards are waited for, and why. Runs until it is cancelled."""
        before = dict.fromkeys((calls.reward.name for calls in self.calls), 0)
        while True:
            await asyncio.sleep(TELL_SECONDS)
            for calls in self.calls:
                name, refused = calls.reward.name, calls.figures.failures["unavailable"]
                if away := calls.away:
                    say(f"waiting for {name}, {self._patience:.0f} s at most while nothing is scored: {away}")
                elif refused > before[name]:
                    say(f"waiting for {name}: those who score are busy")
                before[name] = refused
