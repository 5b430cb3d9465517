"""Rate limits: the turns of one worker against what a quota means, and several workers that share one."""

from __future__ import annotations

import asyncio
import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from streamrl.config import RunConfig
from streamrl.consumers.models import open_models
from streamrl.consumers.models.rate_limit import CAPACITY_MS, Quota, RateLimit, RateTurn
from streamrl.errors import RewardUnavailable
from streamrl.queues import Role, open_ledgers
from tests.queues.ledger_kit import until

EVER = 1e9
MINUTE = 60.0
unhurried = settings(deadline=None)
"""How long an example takes says nothing on a busy host."""


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def reserved(limit: RateLimit, clock: Clock, tokens: int = 0) -> float:
    """Seconds until the turn of a request that asks now, and stays in the line."""
    return limit._place(tokens, 1000 * clock.now, EVER).begin / 1000 - clock.now


def play(limit: RateLimit, clock: Clock, requests: list[tuple[float, int]]) -> list[float]:
    """When each of some requests, pauses and tokens, has its turn."""
    went = []
    for gap, tokens in requests:
        clock.now += gap
        went.append(clock.now + reserved(limit, clock, tokens))
    return went


arrivals = st.lists(st.floats(0, 5), min_size=1, max_size=80)


@unhurried
@given(st.integers(4, 60), st.integers(400, 9000), st.integers(1, 4), st.integers(1, 100), arrivals)
def test_no_minute_of_all_workers_sees_more_than_the_quota(requests, tokens, workers, size, gaps):
    """As long as the part of a worker is one request or more."""
    went: list[float] = []
    for worker in range(workers):
        clock = Clock()
        limit = RateLimit("critic", Quota(requests, tokens), workers, clock)
        went += play(limit, clock, [(gap, size) for gap in gaps[worker::workers]])
    went.sort()
    for first, begin in enumerate(went):
        minute = sum(time < begin + MINUTE - 0.002 for time in went[first:])
        assert minute <= requests
        assert minute * size <= tokens


@unhurried
@given(st.integers(1, 60), st.lists(st.floats(0, 5), min_size=1, max_size=80))
def test_no_minute_of_one_worker_sees_more_requests_than_its_quota(quota, gaps):
    clock = Clock()
    went = play(RateLimit("critic", Quota(quota, None), 1, clock), clock, [(gap, 0) for gap in gaps])
    for first, begin in enumerate(went):
        assert sum(time < begin + MINUTE - 0.002 for time in went[first:]) <= quota


@unhurried
@given(
    st.lists(st.tuples(st.floats(0, 3), st.sampled_from([10, 500, 1000, 3000, 6000, 10_000])), min_size=1, max_size=20)
)
def test_turns_come_in_the_order_of_asking_and_as_soon_as_they_may(requests):
    """Next to a plain level that is filled by time, for the bucket of tokens."""
    clock = Clock()
    per_second = 950.0
    limit = RateLimit("critic", Quota(None, 60_000), 1, clock)
    level, at, arrived, full = 0.0, 0.0, 0.0, CAPACITY_MS / 1000 * per_second
    for (gap, size), found in zip(requests, play(limit, clock, requests), strict=True):
        arrived += gap
        begin = max(arrived, at)
        level = min(full, level + (begin - at) * per_second)
        missing = max(0.0, min(size, full) - level)
        level, at = min(full, level + missing) - size, begin + missing / per_second
        assert found == pytest.approx(at, abs=1e-6)


def test_a_worker_that_is_started_again_and_again_exceeds_nothing():
    went = []
    clock = Clock()
    for _ in range(50):
        limit = RateLimit("critic", Quota(60, None), 1, clock)
        clock.now += reserved(limit, clock)
        went.append(clock.now)
    assert all(later - earlier >= 1 for earlier, later in itertools.pairwise(went))


async def test_a_turn_that_does_not_come_in_time_is_refused_at_once_and_costs_nothing():
    clock = Clock()
    limit = RateLimit("critic", Quota(6, None), 1, clock)
    first = reserved(limit, clock)
    for _ in range(3):
        with pytest.raises(RewardUnavailable, match=r"may go out in 1\d\.\d s") as caught:
            await asyncio.wait_for(limit.take(0, 1.0), 20.0)
        assert "reward_models.critic.requests_per_minute" in caught.value.hint
    assert reserved(limit, clock) == pytest.approx(first + 60 / 0.95 / 6, abs=0.01)


async def test_who_is_cancelled_leaves_the_line_and_pays_nothing():
    clock = Clock()
    limit = RateLimit("critic", Quota(6, None), 1, clock)
    first = reserved(limit, clock)
    waiting = [asyncio.create_task(limit.take(0, EVER)) for _ in range(5)]
    await asyncio.sleep(0)
    for task in waiting:
        task.cancel()
    await asyncio.wait(waiting)
    assert all(task.cancelled() for task in waiting)
    assert reserved(limit, clock) == pytest.approx(first + 60 / 0.95 / 6, abs=0.01)


async def test_tokens_that_were_not_used_come_back_once():
    clock = Clock()
    limit = RateLimit("critic", Quota(None, 60_000), 1, clock)
    clock.now += 100
    turn = await limit.take(3000, 1.0)
    for _ in range(3):
        limit.settle(turn, 2000)
    left = CAPACITY_MS / 1000 * 950 - 2000
    assert reserved(limit, clock, 2000) == pytest.approx((2000 - left) / 950)


async def test_thousands_of_waiting_requests_cost_one_look_each(monkeypatch):
    """A line of 2,000 that each looked at it cost Redis more than a second of every second."""
    looks, place = [], RateLimit._place

    def counted(limit: RateLimit, tokens: int, now: float, deadline: float) -> RateTurn:
        looks.append(tokens)
        return place(limit, tokens, now, deadline)

    monkeypatch.setattr(RateLimit, "_place", counted)
    limit = RateLimit("critic", Quota(60 * 4000, None))
    turns = await asyncio.gather(*(limit.take(0, 60.0) for _ in range(2000)))
    assert (len(turns), len(looks)) == (2000, 2000)


async def test_workers_that_join_get_their_part_of_the_quota(redis_run):
    model = {"kind": "openai", "model": "m", "url": ["http://127.0.0.1:9"], "requests_per_minute": 60}
    judge = {"use": "judge", "args": {"model": "critic"}}
    keys = {"name": "t", "redis": redis_run.config.model_dump(), "rewards": [judge], "reward_models": {"critic": model}}
    config = RunConfig.model_validate(keys)
    async with open_ledgers(config, redis_run.run_dir) as ledgers:
        roles = [Role(f"reward.{number}", config, redis_run.run_dir, ledgers) for number in range(3)]
        for role in [*roles, Role("reward_model.critic.0", config, redis_run.run_dir, ledgers)]:
            await role.beat()
        async with open_models(config, ledgers) as models:
            limit = models["critic"]._limit
            assert limit is not None
            await until(lambda: limit._workers == 3)
        for role in roles:
            role.close()
