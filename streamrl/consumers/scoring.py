"""Scores a sample, or a whole group, with all rewards of a run: stage by stage up to each gate, then one score."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, Final, TypeVar

from streamrl import wire
from streamrl.config import LeaseConfig, RewardWorkerConfig, ScoringConfig
from streamrl.consumers.calls import CallThreads, RewardCalls, SampleState, ScoringFailed, detail_of
from streamrl.consumers.composition import Composition
from streamrl.consumers.plugins import HOLD_SHARE, LoadedReward, stages
from streamrl.consumers.reward import RewardSample, Score
from streamrl.errors import DeadlineExceeded, RewardUnavailable, Unreachable

logger = logging.getLogger(__name__)

MAX_HANGING: Final = 256


class Scorer:
    """Scores samples with the rewards of a run.

    `calls`: the rewards with their figures, in the order of the run file. `group_scored`: a reward compares, so groups
    are scored as a whole. `threads`: of sync rewards.
    """

    def __init__(
        self,
        rewards: Sequence[LoadedReward],
        worker: RewardWorkerConfig,
        scoring: ScoringConfig | None = None,
        longest: int | None = None,
    ) -> None:
        self.threads = CallThreads()
        self.calls = [RewardCalls(reward, worker, self.threads) for reward in rewards]
        self.group_scored = any(reward.group for reward in rewards)
        self._composition = Composition(rewards, scoring or ScoringConfig(), longest)
        self._fails_group = worker.on_failure == "dead"

    @property
    def retried(self) -> int:
        return sum(calls.figures.retried for calls in self.calls)

    async def score(self, sample: RewardSample, until: float) -> wire.SampleScore:
        """Return the score of one sample with every part (docs/guides/combine-rewards.md).

        A reward that compares gets a group of one. `until`: end of the sample's lease, by `time.monotonic`.

        Raises:
            ScoringFailed: a reward failed for good, or the values make no finite number. Never a score of 0 instead.
            RewardUnavailable: no server could score until then: the sample goes back to its queue.
            DeadlineExceeded: so many calls hang in their threads that only a new process helps.
        """
        (result,) = await self.score_group([sample], until)
        if isinstance(result, ScoringFailed):
            raise result
        return result

    async def score_group(
        self, samples: Sequence[RewardSample], until: float
    ) -> list[wire.SampleScore | ScoringFailed]:
        """Score the samples of one group together; returns a score or a failure for each.

        Rewards up to a gate run concurrently, later ones only for samples that pass it. Rewards of single samples are
        called for each sample. A reward that compares gets the samples that passed all earlier gates and that no
        earlier stage, and no instant rule of its own stage, has failed. Slow rewards of its stage run concurrently, so
        it may compare samples that they fail. If the comparison fails, all its samples fail. Rewards with `when` are
        called for their sources only; a source that no reward scores fails.

        Raises `RewardUnavailable` and `DeadlineExceeded` as `score`; then no sample has a score.
        """
        self._check_threads()
        source = samples[0].prompt.source
        routed = [calls for calls in self.calls if calls.reward.spec.applies(source)]
        if not any(calls.reward.spec.adds for calls in routed):
            why = f"no reward scores prompts of source {source!r}: see when.source of rewards"
            return [ScoringFailed(why, fail_group=self._fails_group) for _ in samples]
        scores: list[dict[str, Score]] = [{} for _ in samples]
        states = [SampleState(until) for _ in samples]
        going = list(range(len(samples)))
        found = iter(routed)
        for stage in [[next(found) for _ in stage] for stage in stages(calls.reward for calls in routed)]:
            await self._through(stage, samples, going, scores, states)
            going = [index for index in going if states[index].failure is None]
            if stage:
                going = [index for index in going if self._passes(stage[-1], scores[index])]
        results: list[wire.SampleScore | ScoringFailed] = []
        for index, sample in enumerate(samples):
            try:
                results.append(states[index].failure or self._composed(scores[index], sample))
            except ScoringFailed as error:
                results.append(error)
        return results

    async def _through(
        self,
        stage: Sequence[RewardCalls],
        samples: Sequence[RewardSample],
        going: Sequence[int],
        scores: list[dict[str, Score]],
        states: Sequence[SampleState],
    ) -> None:
        for index in going:
            try:
                for calls in stage:
                    if calls.reward.instant:
                        scores[index][calls.reward.name] = await calls.instant(samples[index])
            except ScoringFailed as error:
                states[index].failure = error
        going = [index for index in going if states[index].failure is None]
        singles = [calls for calls in stage if not (calls.reward.group or calls.reward.instant)]

        async def alone(index: int) -> None:
            found = await _all_of([calls.score(samples[index], states[index]) for calls in singles])
            if states[index].failure is None:
                scores[index].update((calls.reward.name, one) for calls, (one,) in zip(singles, found, strict=True))

        async def compared(calls: RewardCalls) -> None:
            try:
                found = await calls.score([samples[index] for index in going], SampleState(states[0].until))
            except ScoringFailed as error:
                for index in going:
                    states[index].failure = error
                return
            for index, score in zip(going, found, strict=True):
                scores[index][calls.reward.name] = score

        work = [alone(index) for index in going] if singles else []
        if work := [*work, *(compared(calls) for calls in stage if calls.reward.group and going)]:
            await _all_of(work)

    def _passes(self, last: RewardCalls, scores: dict[str, Score]) -> bool:
        return self._composition.passes(last.reward, scores[last.reward.name])

    def _composed(self, scores: dict[str, Score], sample: RewardSample) -> wire.SampleScore:
        try:
            return self._composition.score(scores, len(sample.tokens))
        except (ValueError, TypeError, ArithmeticError) as error:
            message = f"{type(error).__name__}: {error}"
            raise ScoringFailed(message, detail_of(error), self._fails_group) from error

    def _check_threads(self) -> None:
        if self.threads.abandoned >= MAX_HANGING:
            raise DeadlineExceeded(f"{MAX_HANGING} calls of sync rewards hang", "give the reward a time-out of its own")


async def _all_of(coroutines: Sequence[Any]) -> list[Any]:
    """Await all concurrently; results in order, None for each `ScoringFailed`.

    A failure cancels no other: a sync reward cannot be cancelled, and would count as hanging.
    """
    if len(coroutines) == 1:
        with contextlib.suppress(ScoringFailed):
            return [await coroutines[0]]
        return [None]
    results = await asyncio.gather(*coroutines, return_exceptions=True)
    for result in results:
        if isinstance(result, BaseException) and not isinstance(result, ScoringFailed):
            raise result
    return [None if isinstance(result, BaseException) else result for result in results]


_R = TypeVar("_R")
_LOOK_SECONDS: Final = 0.25
_END_SECONDS: Final = 10.0
"""Seconds in which cancelled scoring has to end."""
TELL_SECONDS: Final = 10.0
"""Seconds between two messages about rewards that are waited for."""


class PatientScorer:
    """Scores outside of a run, where no queue takes a sample back: it waits as in a run, up to a limit.

    A worker hands back a sample after almost `lease.max_hold` without a server. Here it is tried again if another
    sample was decided meanwhile; otherwise scoring ends with `Unreachable`, for a reward that is known to be away after
    `patience` seconds.
    """

    def __init__(self, scorer: Scorer, lease: LeaseConfig, patience: float | None = None) -> None:
        self._scorer = scorer
        self._limit = HOLD_SHARE * lease.max_hold
        self._patience = self._limit if patience is None else min(patience, self._limit)
        self._hint = "lease.max_hold" if patience is None else "--wait"
        self._hint += " is how long it is waited for"
        self._ended = 0

    @property
    def group_scored(self) -> bool:
        return self._scorer.group_scored

    @property
    def calls(self) -> Sequence[RewardCalls]:
        return self._scorer.calls

    async def score_group(self, samples: Sequence[RewardSample]) -> list[wire.SampleScore | ScoringFailed]:
        """As `Scorer.score_group`; `Unreachable` if nothing could be scored for too long."""
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
        """Report every `TELL_SECONDS` which rewards are waited for, until cancelled."""
        before = dict.fromkeys((calls.reward.name for calls in self.calls), 0)
        while True:
            await asyncio.sleep(TELL_SECONDS)
            for calls in self.calls:
                name, refused = calls.reward.name, calls.figures.failures["unavailable"]
                if away := calls.away:
                    say(f"waiting for {name}, {self._patience:.0f} s at most while nothing is scored: {away}")
                elif refused > before[name]:
                    say(f"waiting for {name}: its servers are busy")
                before[name] = refused
