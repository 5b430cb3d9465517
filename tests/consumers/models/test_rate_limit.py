"""Rate limits: the turns of one worker against what a quota means, and several workers that share one."""

from __future__ import annotations

import asyncio
import itertools
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from streamrl.config import RunConfig
from streamrl.consumers.models import open_models
from streamrl.consumers.models.rate_limit import CAPACITY_MS, Quota, RateLimit, RateTurn, _plus
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
    """Seconds until the turn of a request that is the head of the line; it goes out then."""
    turn = RateTurn(tokens, limit._quota.cost(tokens, limit._workers))
    wait = limit._wait(turn)
    begin = 1000 * clock.now + wait
    limit._gone = _plus((max(limit._gone[0], begin), max(limit._gone[1], begin)), turn.costs)
    return wait / 1000


def play(limit: RateLimit, clock: Clock, requests: list[tuple[float, int]]) -> list[float]:
    """When each of some requests, pauses and tokens, has its turn."""
    went = []
    asked = clock.now
    for gap, tokens in requests:
        asked += gap
        clock.now = max(asked, clock.now)  # it is the head once the one before it has gone out
        clock.now += reserved(limit, clock, tokens)
        went.append(clock.now)
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


async def test_what_comes_back_lets_the_head_of_the_line_go_out():
    """The clock stands still: only the tokens that the first one did not use can let others through."""
    clock = Clock()
    limit = RateLimit("critic", Quota(None, 60_000), 1, clock)
    clock.now += MINUTE
    first = await limit.take(60_000, EVER)
    waiting = [asyncio.create_task(limit.take(900, EVER)) for _ in range(4)]
    await asyncio.sleep(0)
    limit.settle(first, 1000)
    await asyncio.wait_for(asyncio.gather(*waiting[:2]), 20.0)
    assert [task.done() for task in waiting] == [True, True, False, False]
    limit.settle(await waiting[0], 0)
    await asyncio.wait_for(waiting[2], 20.0)
    assert not waiting[3].done()
    waiting[3].cancel()


async def test_who_gets_no_turn_until_the_deadline_is_refused_and_pays_nothing():
    """What an answer used beyond its estimate makes those wait longer who are in line."""
    clock = Clock()
    limit = RateLimit("critic", Quota(None, 60_000), 1, clock)
    clock.now += MINUTE
    first = await limit.take(3000, EVER)
    waiting = asyncio.create_task(limit.take(10, 0.1))
    await asyncio.sleep(0)
    limit.settle(first, 60_000)
    with pytest.raises(RewardUnavailable, match=r"may go out in 60\.\d s"):
        await asyncio.wait_for(waiting, 20.0)
    assert limit._ahead == pytest.approx((0.0, 0.0))


async def test_thousands_of_waiting_requests_cost_one_look_each(monkeypatch):
    """A line of 2,000 that each looked at it cost Redis more than a second of every second."""
    looks, wait = [], RateLimit._wait

    def counted(limit: RateLimit, *args: Any) -> float:
        looks.append(args)
        return wait(limit, *args)

    monkeypatch.setattr(RateLimit, "_wait", counted)
    clock = Clock()
    limit = RateLimit("critic", Quota(None, 60 * 4000), 1, clock)
    clock.now += MINUTE
    first = await limit.take(12_000, 60.0)
    waiting = [asyncio.create_task(limit.take(5, 60.0)) for _ in range(2000)]
    await asyncio.sleep(0)
    limit.settle(first, 0)
    assert len(await asyncio.gather(*waiting)) == 2000
    assert len(looks) < 3 * 2000, "one as it asks, one as it is the head, a few for what came back"


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
