"""A sample, or a whole group, through all rewards of a run: in stages, up to each gate; then one score of all parts."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import logging
import random
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Any, Final

from streamrl import wire
from streamrl.config import RewardWorkerConfig, RunConfig, ScoringConfig
from streamrl.consumers.absence import may_pass
from streamrl.consumers.calls import RewardCalls, ScoringFailed, Together, described, detail_of
from streamrl.consumers.composition import Composition
from streamrl.consumers.plugins import LoadedReward, load_rewards, stages
from streamrl.consumers.reward import AskedModel, RewardContext, RewardSample, Score
from streamrl.consumers.threads import CallThreads
from streamrl.errors import DeadlineExceeded, PluginError, StreamrlError, Unreachable
from streamrl.queues.ledgers import Ledgers
from streamrl.queues.outage import Outage

__all__ = ["Scorer", "ScoringFailed", "models_of", "open_scorer"]

logger = logging.getLogger(__name__)

MAX_HANGING: Final = 256
_CLOSE_SECONDS: Final = 10.0
_OPEN_SHARE: Final = 0.9
"""Part of the start of a worker in which its rewards are tried again when a service is away."""


class Scorer:
    """Scores samples with the rewards of a run.

    `calls` are the rewards with their figures, in the order of the run file; `whole` says that one of them compares, so
    that groups are scored as a whole; `threads` are those of sync rewards.

    Args:
        rewards: loaded and open; names are unique.
        worker: limits of rewards that have none of their own.
        scoring: how the values make a score.
        longest: tokens of the longest response, for the penalty of long ones.
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
        self.whole = any(reward.group for reward in rewards)
        self._composition = Composition(rewards, scoring or ScoringConfig(), longest)
        self._dooms = worker.on_failure == "dead"
        found = iter(self.calls)
        self._stages = [[next(found) for _ in stage] for stage in stages(rewards)]

    @property
    def retried(self) -> int:
        """Attempts that were followed by another one, of all rewards."""
        return sum(calls.figures.retried for calls in self.calls)

    async def score(self, sample: RewardSample, until: float) -> wire.Score:
        """Return the score of one sample with every part; `docs/guides/combine-rewards.md` says how it is made.

        The rewards up to a gate are called at the same time, those behind it only if it lets the sample through. A
        reward that compares gets a group of one.

        Args:
            sample: to score.
            until: when its lease ends, by `time.monotonic`; until then it waits for rewards that nobody can give now.

        Raises:
            ScoringFailed: a reward failed for good, or the values make no finite number. Never a score of 0 instead.
            RewardUnavailable: nobody could give one of them until `until`: the sample goes back to its queue.
            DeadlineExceeded: so many calls hang in their threads that only a new process helps.
        """
        self._check_threads()
        scores: dict[str, Score] = {}
        together = Together(until)
        for stage in self._stages:
            await self._through(stage, sample, scores, together)
            if stage and not self._passes(stage[-1], scores):
                break
        return self._composed(scores, sample)

    async def score_group(self, samples: Sequence[RewardSample], until: float) -> list[wire.Score | ScoringFailed]:
        """Score the samples of one group together: for each its score, or why it has none.

        Rewards of single samples are called for each. One that compares gets those that no gate has held back and no
        reward has failed when the comparison begins: no reward up to the last gate before it, and none of its own
        stage that is instant. The others of its stage run beside it, and it may have compared what they fail. When it
        fails itself, all that it was given have no score.

        Raises:
            RewardUnavailable, DeadlineExceeded: as of `score`; then none of them has a score.
        """
        self._check_threads()
        scores: list[dict[str, Score]] = [{} for _ in samples]
        together = [Together(until) for _ in samples]
        going = list(range(len(samples)))
        for stage in self._stages:
            await self._group_through(stage, samples, going, scores, together)
            going = [index for index in going if together[index].failure is None]
            if stage:
                going = [index for index in going if self._passes(stage[-1], scores[index])]
        results: list[wire.Score | ScoringFailed] = []
        for index, sample in enumerate(samples):
            try:
                results.append(together[index].failure or self._composed(scores[index], sample))
            except ScoringFailed as error:
                results.append(error)
        return results

    async def _through(
        self, stage: Sequence[RewardCalls], sample: RewardSample, scores: dict[str, Score], together: Together
    ) -> None:
        """Call the rewards of a stage for one sample."""
        await _instantly(stage, sample, scores)
        slow = [calls for calls in stage if not calls.reward.instant]
        if not slow:
            return
        results = await _all_of([calls.score([sample] if calls.reward.group else sample, together) for calls in slow])
        if together.failure is not None:
            raise together.failure
        for calls, result in zip(slow, results, strict=True):
            (scores[calls.reward.name],) = result

    async def _group_through(
        self,
        stage: Sequence[RewardCalls],
        samples: Sequence[RewardSample],
        going: Sequence[int],
        scores: list[dict[str, Score]],
        together: Sequence[Together],
    ) -> None:
        """Call the rewards of a stage for those samples of a group that go on."""
        for index in going:
            try:
                await _instantly(stage, samples[index], scores[index])
            except ScoringFailed as error:
                together[index].failure = error
        going = [index for index in going if together[index].failure is None]
        singles = [calls for calls in stage if not (calls.reward.group or calls.reward.instant)]

        async def alone(index: int) -> None:
            try:
                await self._through(singles, samples[index], scores[index], together[index])
            except ScoringFailed as error:
                together[index].failure = error

        async def compared(calls: RewardCalls) -> None:
            try:
                found = await calls.score([samples[index] for index in going], Together(together[0].until))
            except ScoringFailed as error:
                for index in going:
                    together[index].failure = error
                return
            for index, score in zip(going, found, strict=True):
                scores[index][calls.reward.name] = score

        if going:
            comparing = [compared(calls) for calls in stage if calls.reward.group]
            await _all_of([*(alone(index) for index in going), *comparing])

    def _passes(self, last: RewardCalls, scores: dict[str, Score]) -> bool:
        return self._composition.passes(last.reward, scores[last.reward.name])

    def _composed(self, scores: dict[str, Score], sample: RewardSample) -> wire.Score:
        try:
            return self._composition.score(scores, len(sample.tokens))
        except (ValueError, TypeError, ArithmeticError) as error:
            message = f"{type(error).__name__}: {error}"
            raise ScoringFailed(message, detail_of(error), self._dooms) from error

    def _check_threads(self) -> None:
        if self.threads.abandoned >= MAX_HANGING:
            raise DeadlineExceeded(f"{MAX_HANGING} calls of sync rewards hang", "give the reward a time-out of its own")


async def _instantly(stage: Sequence[RewardCalls], sample: RewardSample, scores: dict[str, Score]) -> None:
    """Call the rules of a stage that take microseconds; `ScoringFailed`: one of them failed."""
    for calls in stage:
        if calls.reward.instant:
            scores[calls.reward.name] = await calls.instant(sample)


async def _all_of(coroutines: Sequence[Any]) -> list[Any]:
    """Await all, at the same time; results in their order, None for one that failed with `ScoringFailed`.

    Nobody is cancelled when one fails: a sync reward cannot be, and would count as one that hangs.

    Raises:
        Exception: any other, after all have ended.
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


def models_of(
    config: RunConfig, ledgers: Ledgers | None = None
) -> contextlib.AbstractAsyncContextManager[Mapping[str, AskedModel]]:
    """The `reward_models` of a run, open for the length of a block; without any, nothing is imported for them."""
    if not config.reward_models:
        return contextlib.nullcontext({})
    from streamrl.consumers.models import open_models  # an HTTP client, which takes a while

    return open_models(config, ledgers)


@contextlib.asynccontextmanager
async def open_scorer(
    config: RunConfig,
    context: RewardContext,
    rewards: Sequence[LoadedReward] | None = None,
    *,
    patience: float | None = None,
) -> AsyncIterator[Scorer]:
    """Load the rewards of a run, open them, and close them at the end of the block, also when opening fails.

    Args:
        config: of the run.
        context: what the rewards may use.
        rewards: loaded already; None: those of the run.
        patience: seconds for which a service that is away while a reward opens is tried again; None: most of
            `supervisor.start_deadline`.

    Raises:
        PluginError: a reward cannot be loaded or opened.
        Unreachable: a service stayed away while a reward opened, in a run that has scores already.
        ConfigError: what a reward says of its own settings.
        DeadlineExceeded: a reward was not open within `supervisor.start_deadline`.
    """
    rewards = load_rewards(config) if rewards is None else rewards
    patience = _OPEN_SHARE * config.supervisor.start_deadline if patience is None else patience
    begun: list[LoadedReward] = []
    try:
        for reward in rewards:
            await _open(reward, context, patience, begun)
        yield Scorer(rewards, config.reward_worker, config.scoring, config.sampling.max_new_tokens)
    finally:
        for reward in reversed(begun):
            await _close(reward)


async def _open(reward: LoadedReward, context: RewardContext, patience: float, begun: list[LoadedReward]) -> None:
    """Open one reward; a service that is away is tried again, with growing pauses, for up to `patience` seconds.

    The reward is in `begun`, those that have to be closed, from each `open` to the `close` that follows it.
    """
    if reward.life is None:
        return
    seconds = context.config.supervisor.start_deadline
    about = dataclasses.replace(context, deadline=reward.deadline(context.config.reward_worker))
    outage = Outage(patience)
    try:
        async with asyncio.timeout(seconds) as limit:
            while True:
                begun.append(reward)
                try:
                    await reward.life.open(about)
                except Exception as error:
                    if limit.expired() or not may_pass(error):
                        raise
                    pause = await _pause_before_next(reward, context, outage, error)
                    begun.pop()
                    await _close(reward)
                    await asyncio.sleep(pause)
                else:
                    return
    except TimeoutError as error:
        if not limit.expired():
            raise _not_opened(reward, error) from error
        raise DeadlineExceeded(f"reward {reward.name} was not open within {seconds:g} s", "see its `open`") from error
    except StreamrlError:
        raise
    except Exception as error:
        raise _not_opened(reward, error) from error


async def _pause_before_next(reward: LoadedReward, context: RewardContext, outage: Outage, error: Exception) -> float:
    """Seconds after which the reward may be opened again; it says from time to time that it cannot be opened yet.

    Raises:
        PluginError: it was tried for as long as `outage` allows; restarting does not help.
        Unreachable: the same, in a run that had scores: the service was there, so the worker is started again.
    """
    now = time.monotonic()
    pause = outage.failed(now, random.random())  # noqa: S311 (jitter, no secret)
    if pause is None or outage.since is None:
        scored = await context.scored()
        times = f", {outage.failures} times within {outage.patience:.3g} s"
        raise _not_opened(reward, error, times, Unreachable if scored else PluginError) from error
    if outage.failures & (outage.failures - 1) == 0:  # the first, second, fourth, ... time
        extra = {"reward": reward.name, "why": described(error), "times": outage.failures}
        logger.warning("a reward cannot be opened yet", extra=extra)
    return min(pause, outage.since + outage.patience - now)


def _not_opened(
    reward: LoadedReward, error: Exception, times: str = "", kind: type[StreamrlError] = PluginError
) -> StreamrlError:
    hint = "is the service that it asks running? then `streamrl up --resume` goes on" if times else ""
    return kind(f"reward {reward.name} cannot be opened{times}: {described(error)}", hint)


async def _close(reward: LoadedReward) -> None:
    """Close a reward; what goes wrong is said, and ends nothing: its scores are written."""
    if reward.life is None:
        return
    try:
        async with asyncio.timeout(_CLOSE_SECONDS):
            await reward.life.close()
    except Exception:
        logger.exception("a reward did not close", extra={"reward": reward.name})
