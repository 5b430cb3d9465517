"""One sample through all rewards of a run: deadline, retries with backoff, weighted sum."""

from __future__ import annotations

import asyncio
import inspect
import random
import traceback
from collections.abc import Sequence
from typing import Any, Final

from streamrl import wire
from streamrl.config import RewardWorkerConfig
from streamrl.consumers.plugins import LoadedReward
from streamrl.consumers.reward import RewardSample, Score, finite
from streamrl.consumers.threads import CallThreads
from streamrl.errors import DeadlineExceeded, StreamrlError

DETAIL_BYTES: Final = 4096
WHY_CHARACTERS: Final = 200
MAX_HANGING: Final = 256


class ScoringFailed(StreamrlError):
    """All attempts at a sample failed; `detail` is the traceback of the last one, at most `DETAIL_BYTES` long."""

    def __init__(self, message: str, detail: str = "") -> None:
        super().__init__(message)
        self.args = (message, detail)
        self.detail = detail


class Scorer:
    """Scores samples with the rewards of a run.

    Args:
        rewards: loaded rewards; names are unique.
        config: deadline of one attempt, number of attempts, first pause.
    """

    def __init__(self, rewards: Sequence[LoadedReward], config: RewardWorkerConfig) -> None:
        self.retried = 0
        self.threads = CallThreads()
        self._rewards = rewards
        self._config = config
        self._instant = all(reward.instant for reward in rewards)

    async def score(self, sample: RewardSample) -> wire.Score:
        """Return the weighted sum and every part; a part that was scored is kept when another one is tried again.

        Parts have the names of their rewards; the parts of a part are `name/part`.

        Raises:
            ScoringFailed: the last attempt failed too. Never a score of 0 instead.
            DeadlineExceeded: so many calls hang in their threads that only a new process helps.
        """
        if self.threads.abandoned >= MAX_HANGING:
            raise DeadlineExceeded(f"{MAX_HANGING} calls of sync rewards hang", "give the reward a time-out of its own")
        scores: dict[str, Score] = {}
        for attempt in range(1, self._config.attempts + 1):
            try:
                await self._attempt(sample, scores)
                return self._sum(scores)
            except Exception as error:
                if attempt == self._config.attempts:
                    raise ScoringFailed(self._why(error), _detail(error)) from error
            self.retried += 1
            pause = self._config.backoff * 2 ** (attempt - 1)
            await asyncio.sleep(random.uniform(0, pause))  # noqa: S311 (full jitter, no secret)
        raise AssertionError("attempts is at least 1")

    async def _attempt(self, sample: RewardSample, scores: dict[str, Score]) -> None:
        if self._instant:
            for reward in self._rewards:
                scores[reward.name] = await self._one(reward, sample)
            return
        missing = [reward for reward in self._rewards if reward.name not in scores]
        try:
            async with asyncio.timeout(self._config.deadline) as limit:
                calls = (self._one(reward, sample) for reward in missing)
                results = await asyncio.gather(*calls, return_exceptions=True)
        except TimeoutError as error:
            if not limit.expired():
                raise
            names = ", ".join(reward.name for reward in missing)
            raise TimeoutError(f"{names}: no score within {self._config.deadline:g} s") from error
        failures = [result for result in results if isinstance(result, BaseException)]
        scores.update(
            {
                reward.name: result
                for reward, result in zip(missing, results, strict=True)
                if not isinstance(result, BaseException)
            }
        )
        if failures:
            raise failures[0]

    async def _one(self, reward: LoadedReward, sample: RewardSample) -> Score:
        result: Any
        try:
            if reward.blocking and not reward.instant:
                result = await self.threads.run(reward.call, sample)
            else:
                result = reward.call(sample)
            if inspect.isawaitable(result):
                result = await result
        except SystemExit as error:  # asyncio would end the whole worker with it
            raise RuntimeError(f"the reward called sys.exit({error.code!r})") from error
        return result if type(result) is Score else Score(finite(result, "the value"))

    def _sum(self, scores: dict[str, Score]) -> wire.Score:
        value = 0.0
        parts: dict[str, float] = {}
        for reward in self._rewards:
            score = scores[reward.name]
            value += reward.weight * score.value
            parts[reward.name] = score.value
            parts.update({f"{reward.name}/{name}": part for name, part in score.parts.items()})
        return wire.Score(value=finite(value, "the weighted sum"), parts=parts)

    def _why(self, error: BaseException) -> str:
        tries = f" ({self._config.attempts} attempts)" if self._config.attempts > 1 else ""
        kind = "deadline" if isinstance(error, TimeoutError) else type(error).__name__
        return f"{kind}: {error}"[:WHY_CHARACTERS] + tries


def _detail(error: BaseException) -> str:
    """Return the end of the traceback: its last lines say most."""
    text = "".join(traceback.format_exception(error)).encode(errors="replace")
    return text[-DETAIL_BYTES:].decode(errors="ignore")
