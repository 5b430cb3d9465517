"""Rate limits: the buckets as numbers, the scripts against them, and many processes on one Redis.

Clocks that jump are played by the argument of the pure buckets, and by the script with its one line that reads the
clock replaced; the buckets and the script are compared on any order of calls.
"""

from __future__ import annotations

import asyncio
import contextlib
import heapq
import itertools
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from streamrl.consumers.models.rate_limit import CAPACITY_MS, LOOK_SECONDS, LocalStore, Quota, RateLimit, RedisStore
from streamrl.errors import RewardUnavailable
from streamrl.queues import Ledgers
from streamrl.queues.connection import load_scripts
from tests.queues.conftest import both_versions
from tests.queues.ledger_kit import until_async
from tests.queues.rate_oracle import Buckets
from tests.redis_kit import Probe, RedisRun

LOOK = 1000 * LOOK_SECONDS
EVER = 1 << 40
MINUTE = 60_000
TAKER = Path(__file__).parent / "limit_taker.py"

Costs = tuple[float, float]
Jump = tuple[float, float]
"""When the clock jumps, and by how much, in milliseconds."""

costs = st.tuples(st.floats(0, 3 * CAPACITY_MS), st.floats(0, 3 * CAPACITY_MS))
arrivals = st.lists(st.tuples(st.floats(0, CAPACITY_MS), costs), min_size=1, max_size=12)
unhurried = settings(deadline=None)
"""How long an example takes says nothing on a busy host."""
jumps = st.lists(st.tuples(st.floats(0, 30 * CAPACITY_MS), st.floats(-1e9, 1e9)), max_size=4)


def play(requests: list[tuple[float, Costs]], clock: list[Jump] = []) -> list[float]:  # noqa: B006 (never changed)
    """When each of some requests has its turn, in true time; requests are gaps and costs."""
    buckets, went = Buckets(), [0.0] * len(requests)
    starts = itertools.accumulate(gap for gap, _ in requests)
    looks = [(start, number) for number, start in enumerate(starts)]
    heapq.heapify(looks)
    while looks:
        now, number = heapq.heappop(looks)
        shown = now + sum(size for at, size in clock if at <= now)
        wait = buckets.take(str(number), requests[number][1], EVER, shown)
        assert wait >= 0
        if wait:
            heapq.heappush(looks, (now + (min(wait, LOOK) if clock else wait), number))
        else:
            went[number] = now
    return went


def most(went: list[float], sizes: list[float], clock: list[Jump] = []) -> float:  # noqa: B006 (never changed)
    """By how much the fullest stretch of time is above what it may hold, in milliseconds."""
    largest = max([CAPACITY_MS, *sizes])
    turns = sorted(zip(went, sizes, strict=True))
    excess = -float("inf")
    for first, (begin, _) in enumerate(turns):
        total = 0.0
        for end, size in turns[first:]:
            total += size
            # Whom a leap gives its turn goes at its next look: the leap may be that much before.
            leaps = sum(begin - LOOK <= at <= end for at, size in clock if size > 0)
            excess = max(excess, total - (end - begin) - largest * (1 + leaps))
    return excess


@unhurried
@given(arrivals)
def test_no_stretch_of_time_holds_more_than_its_length_and_one_bucket(requests):
    went = play(requests)
    for bucket in (0, 1):
        assert most(went, [cost[bucket] for _, cost in requests]) <= 2


@unhurried
@given(st.integers(1, 60), st.lists(st.floats(0, 5000), min_size=1, max_size=80))
def test_no_minute_sees_more_requests_than_its_quota(quota, gaps):
    cost = Quota(quota, None).cost(1)
    went = sorted(play([(gap, cost) for gap in gaps]))
    for first, begin in enumerate(went):
        assert sum(time < begin + MINUTE - 2 for time in went[first:]) <= quota


@unhurried
@given(arrivals)
def test_turns_come_in_the_order_of_asking_and_as_soon_as_they_may(requests):
    """Next to a plain level that is filled by time, for one bucket."""
    requests = [(gap, (cost[0], 0.0)) for gap, cost in requests]
    level, at, arrived = float(CAPACITY_MS), 0.0, 0.0
    for place, ((gap, (cost, _)), found) in enumerate(zip(requests, play(requests), strict=True)):
        arrived += gap
        begin = max(arrived, at)
        level = min(CAPACITY_MS, level + begin - at)
        missing = max(0.0, min(cost, CAPACITY_MS) - level)
        level, at = min(CAPACITY_MS, level + missing) - cost, begin + missing
        assert found == pytest.approx(at, abs=2 + 2 * place), "each look is late by less than a millisecond"


@unhurried
@example([(1151, (135, 0)), (0, (3157, 0)), (0, (0, 131)), (132, (159, 10))], [(1283, 3348)])
@given(arrivals, jumps)
def test_a_clock_that_jumps_gives_one_bucket_at_most_and_stalls_nobody(requests, clock):
    went = play(requests, clock)
    for bucket in (0, 1):
        assert most(went, [cost[bucket] for _, cost in requests], clock) <= 2
    lost = sum(LOOK for _, size in clock if size < 0)
    arrived = owed = 0.0
    for place, ((gap, cost), found) in enumerate(zip(requests, went, strict=True)):
        arrived += gap
        owed += max(cost)
        assert found <= arrived + owed + lost + 2 * (place + 1), "as if no time had passed before the jump"


def test_a_request_larger_than_the_bucket_goes_alone_and_leaves_a_debt():
    large, small = (10.0 * CAPACITY_MS, 0.0), (1.0, 0.0)
    went = play([(0, small), (0, large), (0, small)])
    assert went[0] == 0
    assert went[1] == 1, "the bucket has to be full"
    assert went[2] == 1 + 9 * CAPACITY_MS + 1
    assert play([(0, large), (20 * CAPACITY_MS, small)])[1] == 20 * CAPACITY_MS, "which an idle time pays as well"


def test_what_is_refused_is_not_in_the_line():
    buckets = Buckets()
    assert buckets.take("a", (CAPACITY_MS, 0), 0, 0) == 0
    assert buckets.take("b", (1000, 0), 999, 0) == -1001
    assert buckets.take("c", (500, 0), 999, 0) == 500


@unhurried
@given(st.lists(costs, min_size=2, max_size=20), st.integers(0, 19))
def test_what_comes_back_comes_back_once(requests, given_back):
    """Some have had their turn, some wait: who gives back twice brings the next no further than who does it once."""
    waits = []
    for times in (1, 2):
        buckets = Buckets()
        for number, cost in enumerate(requests):
            buckets.take(str(number), cost, EVER, 0)
        for _ in range(times):
            buckets.settle(str(given_back), requests[min(given_back, len(requests) - 1)])
        waits.append(buckets.take("next", (3 * CAPACITY_MS, 3 * CAPACITY_MS), EVER, 0))
    assert waits[0] == waits[1]


@unhurried
@given(st.lists(costs, min_size=1, max_size=20))
def test_when_all_comes_back_it_is_as_if_nobody_had_asked(requests):
    buckets = Buckets()
    for number, cost in enumerate(requests):
        buckets.take(str(number), cost, EVER, 0)
    for number, cost in enumerate(requests):
        buckets.settle(str(number), cost)
    full = (CAPACITY_MS - 0.001, CAPACITY_MS - 0.001)  # adding and taking away rounds
    assert buckets.take("next", full, 0, 0) == 0
    assert buckets.take("another", (1, 1), EVER, 0) >= 1


def test_tokens_that_were_not_needed_bring_those_who_wait_forward():
    buckets = Buckets()
    buckets.take("a", (0, CAPACITY_MS), EVER, 0)
    assert buckets.take("b", (0, 1000), EVER, 0) == 1000
    buckets.settle("a", (0, 900))
    assert buckets.take("b", (0, 1000), EVER, 0) == 100
    buckets.settle("a", (0, 900))
    assert buckets.take("b", (0, 1000), EVER, 0) == 100
    buckets.take("b", (0, 1000), EVER, 100)
    buckets.settle("b", (0, -2000))
    assert buckets.take("c", (0, 1), EVER, 100) == 2001, "what was used beyond the estimate is owed"


def test_a_quota_says_what_gets_through():
    assert Quota(None, None).within(60, 5) is None
    assert Quota(100, None).within(60, 5) == 95
    assert Quota(100, 1000).within(60, 500) == 1
    assert Quota(1, None).within(1, 5) == 1


# The scripts.


def with_a_clock(text: str) -> str:
    """The script as it is, but for the line that reads the clock."""
    line = "local t = redis.call('TIME')"
    assert text.count(line) == text.count("TIME") == 1
    return text.replace(line, "local t = { ARGV[4], ARGV[5] }")


halves = st.integers(0, 4 * CAPACITY_MS).map(lambda number: number / 2)
calls = st.lists(
    st.tuples(
        st.integers(0, 7),
        st.sampled_from(["take", "take", "take", "settle"]),
        st.sampled_from([0, 1, 100, 1000, 5000, -1000, 80_000, -80_000]),  # in an hour nothing is forgotten
        st.sampled_from([0, 500, EVER]),
    ),
    max_size=40,
)


@both_versions
def test_the_scripts_do_what_the_buckets_do(run: RedisRun):
    take, settle = with_a_clock(load_scripts()["limit_take"].text), load_scripts()["limit_settle"].text
    rounds = itertools.count()
    with Probe(str(run.config.url)) as probe:

        @settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
        @given(st.lists(st.tuples(halves, halves), min_size=8, max_size=8), calls)
        def same(sizes: list[Costs], calls: list[tuple[int, str, int, int]]) -> None:
            keys = [f"{{x}}:{next(rounds)}:{name}" for name in ("limit", "waiting", "granted")]
            buckets, now = Buckets(), 10**12
            commands, wanted = [], []
            for number, what, passed, patience in calls:
                cost, now = sizes[number], now + passed
                name = f"n:{number} {cost[0]!r} {cost[1]!r}"
                if what == "settle":
                    wanted.append(None)
                    buckets.settle(name, cost)
                    commands.append(("EVAL", settle, 3, *keys, name, *cost))
                else:
                    wanted.append(buckets.take(name, cost, patience, now))
                    clock = (now // 1000, now % 1000 * 1000)
                    commands.append(("EVAL", take, 3, *keys, name, CAPACITY_MS, patience, *clock))
            found = probe.pipeline(commands)
            assert [reply for reply, want in zip(found, wanted, strict=True) if want is not None] == [
                want for want in wanted if want is not None
            ]

        same()


@pytest.fixture
def limit(ledgers: Ledgers) -> RateLimit:
    """One request in a minute: the first goes at once, nobody sees the turn of the second."""
    return RateLimit("critic", Quota(1, 1000), RedisStore(ledgers.connection, ledgers.train.keys, "critic"))


async def line(ledgers: Ledgers, name: str = "waiting") -> int:
    return int(await ledgers.connection.read("ZCARD", f"{{sr:test}}:limit:critic:{name}"))


async def level(ledgers: Ledgers, bucket: str) -> float:
    return float(await ledgers.connection.read("HGET", "{sr:test}:limit:critic", bucket))


async def test_a_repeat_changes_nothing(ledgers: Ledgers):
    store = RedisStore(ledgers.connection, ledgers.train.keys, "critic")
    one, two = "n:1 60000.0 0.0", "n:2 60000.0 0.0"
    for _ in range(3):
        assert await store.take(one, (60000, 0), 0) == 0
        assert await store.take(two, (60000, 0), EVER) > 0
        assert (await line(ledgers), await line(ledgers, "granted")) == (1, 1)
    assert await level(ledgers, "requests") < 0
    for _ in range(3):
        await store.settle(one, (60000, 0))
        await store.settle(two, (60000, 0))
    assert (await line(ledgers), await line(ledgers, "granted")) == (0, 0)
    assert await level(ledgers, "requests") <= 2 * CAPACITY_MS, "came back once"


async def test_a_turn_that_does_not_come_in_time_is_refused_at_once(ledgers: Ledgers, limit: RateLimit):
    await limit.take(10, 60.0)
    with pytest.raises(RewardUnavailable, match="may go out in") as caught:
        await asyncio.wait_for(limit.take(10, 30.0), 20.0)
    assert "reward_models.critic.requests_per_minute" in caught.value.hint
    assert await line(ledgers) == 0


async def test_who_is_cancelled_leaves_the_line(ledgers: Ledgers, limit: RateLimit):
    await limit.take(10, 60.0)
    waiting = asyncio.create_task(limit.take(10, 600.0))
    await until_async(lambda: line(ledgers))
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    assert (await line(ledgers), await line(ledgers, "granted")) == (0, 1)


async def test_a_turn_is_settled_once(ledgers: Ledgers, limit: RateLimit):
    turn = await limit.take(500, 60.0)
    before = await level(ledgers, "tokens")
    await limit.settle(turn, 100)
    after = await level(ledgers, "tokens")
    assert after - before == pytest.approx(Quota(1, 1000).cost(400)[1])
    await limit.settle(turn, 0)
    assert await level(ledgers, "tokens") == after
    assert await line(ledgers, "granted") == 0


async def test_a_redis_that_is_away_ends_the_wait_at_its_deadline(run: RedisRun, limit: RateLimit):
    run.pause()
    try:
        with pytest.raises(RewardUnavailable, match=r"within 0\.2 s"):
            await limit.take(10, 0.2)
    finally:
        run.wake()


async def test_who_died_in_the_line_stops_nobody(ledgers: Ledgers):
    store = RedisStore(ledgers.connection, ledgers.train.keys, "critic")
    assert await store.take("dead:1 3157.0 0.0", (3157, 0), 0) == 0
    assert await store.take("dead:2 100.0 0.0", (100, 0), EVER) > 0
    limit = RateLimit("critic", Quota(1000, None), store)
    turn = await limit.take(0, 60.0)
    assert not turn.settled


@unhurried
@given(arrivals)
def test_without_a_run_turns_come_when_they_would_come_from_redis(requests):
    """As long as nothing comes back."""

    async def ask() -> None:
        now = 0.0
        store = LocalStore(lambda: now / 1000)
        for place, ((gap, cost), found) in enumerate(zip(requests, play(requests), strict=True)):
            now += gap
            assert now + await store.take(str(place), cost, EVER) == pytest.approx(found, abs=4 + 2 * place)

    asyncio.run(ask())


async def test_without_a_run_what_comes_back_comes_back_once():
    now, full = 0.0, (CAPACITY_MS, CAPACITY_MS)
    store = LocalStore(lambda: now / 1000)
    assert await store.take("a", full, 0) == 0
    assert await store.take("b", full, CAPACITY_MS - 1) == -1 - CAPACITY_MS, "it does not wait in the line"
    for _ in range(2):
        await store.settle("a", (500.0, 1000.0))
        await store.settle("b", full)
    assert await store.take("c", (0.0, 1000.0), EVER) == 0
    assert await store.take("d", (500.0, 0.0), EVER) == 0
    assert await store.take("e", (10.0, 0.0), EVER) == 10
    await store.settle("e", (10.0, 0.0))
    assert await store.take("f", (20.0, 0.0), EVER) == 20, "who leaves the line pays nothing"
    now = 15.0
    assert await store.take("f", (20.0, 0.0), EVER) == 5


async def test_without_a_run_the_limit_is_kept_by_the_process():
    limit = RateLimit("critic", Quota(1, None), LocalStore())
    turn = await limit.take(0, 60.0)
    with pytest.raises(RewardUnavailable):
        await limit.take(0, 1.0)
    await limit.settle(turn, 0)


async def test_many_processes_together_never_exceed_the_quota(run: RedisRun, ledgers: Ledgers):
    quota, each = 1200, 27
    size = Quota(quota, None).cost(0)[0]
    url = str(run.config.url)
    command = [sys.executable, str(TAKER), url, "shared", str(quota), str(each)]
    processes = [await asyncio.create_subprocess_exec(*command, stdout=subprocess.PIPE) for _ in range(4)]
    try:
        said = await asyncio.gather(*(process.communicate() for process in processes))
    finally:
        for process in processes:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
    assert [process.returncode for process in processes] == [0] * 4
    went = dict(row.split("|") for out, _ in said for row in out.decode().splitlines())
    rows = await ledgers.connection.read("ZRANGE", "{sr:test}:limit:shared:granted", 0, -1, "WITHSCORES")
    granted = {name.decode(): float(at) for name, at in rows}
    assert granted.keys() == went.keys()
    assert len(granted) == 4 * each
    assert all(int(went[name]) >= at for name, at in granted.items()), "nobody goes before its turn"
    times = sorted(granted.values())
    for first, begin in enumerate(times):
        for count, end in enumerate(times[first:], 1):
            assert count * size <= end - begin + CAPACITY_MS + 1
