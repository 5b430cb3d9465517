"""Loaded rewards made of functions, for the tests of scoring."""

from __future__ import annotations

import inspect
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from streamrl import wire
from streamrl.config import RewardSpec, RewardWorkerConfig, ScoringConfig
from streamrl.consumers import RewardSample
from streamrl.consumers.calls import CallThreads, RewardCalls, SampleState, ScoringFailed
from streamrl.consumers.plugins import LoadedReward
from streamrl.consumers.scoring import Scorer
from tests.consumers.samples import prompt, response

LEASE = 600.0
QUICK = {"attempts": 2, "backoff": 0.001, "deadline": 60.0}


def loaded(call: Callable[..., Any], *, instant: bool = False, group: bool = False, **spec: Any) -> LoadedReward:
    """A reward of one function; `spec` as in the run file."""
    use = spec.pop("use", "tests:reward")
    keys = RewardSpec(use=use, name=spec.pop("name", getattr(call, "__name__", "reward")), **spec)
    return LoadedReward(
        name=keys.name or "",
        call=call,
        blocking=not inspect.iscoroutinefunction(call),
        instant=instant,
        group=group,
        spec=keys,
    )


def lease_end(seconds: float = LEASE) -> float:
    """When a lease ends that began now."""
    return time.monotonic() + seconds


def leased(seconds: float = LEASE) -> SampleState:
    """A sample that is leased for so many seconds."""
    return SampleState(lease_end(seconds))


class HeldScorer(Scorer):
    """Scores what is leased for `LEASE` where a test does not say for how long."""

    async def score(self, sample: RewardSample, until: float | None = None) -> wire.SampleScore:
        return await super().score(sample, lease_end() if until is None else until)

    async def score_group(
        self, samples: Sequence[RewardSample], until: float | None = None
    ) -> list[wire.SampleScore | ScoringFailed]:
        return await super().score_group(samples, lease_end() if until is None else until)


def scorer(
    *rewards: LoadedReward, scoring: dict[str, Any] | None = None, longest: int = 256, **worker: Any
) -> HeldScorer:
    """A scorer of these rewards; `worker` are keys of `reward_worker`."""
    limits = RewardWorkerConfig(**{**QUICK, **worker})
    return HeldScorer(rewards, limits, ScoringConfig(**(scoring or {})), longest)


def calls_of(reward: LoadedReward, **worker: Any) -> RewardCalls:
    """The calls of one reward; `worker` are keys of `reward_worker`."""
    return RewardCalls(reward, RewardWorkerConfig(**{**QUICK, **worker}), CallThreads())


def numbered(index: int, group_id: int = 0) -> RewardSample:
    """The sample of this place in a group."""
    return RewardSample.of(prompt(), response(), group_id, index)


def failing(
    error: Exception, times: int = 10**9, value: float = 1.0
) -> tuple[Callable[[RewardSample], Awaitable[float]], list[RewardSample]]:
    """A reward that raises `error` so many times, and its list of calls."""
    made: list[RewardSample] = []

    async def reward(sample: RewardSample) -> float:
        made.append(sample)
        if len(made) <= times:
            raise error
        return value

    return reward, made
