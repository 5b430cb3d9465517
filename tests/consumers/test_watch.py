"""Rewards that hold the event loop are named: while they do it, and afterwards."""

import asyncio
import itertools
import logging
import re
import threading
import time

import pytest

from streamrl.consumers import RewardSample
from streamrl.consumers import watch as watch_module
from streamrl.consumers.watch import LoopWatch
from tests.consumers.calls_kit import calls_of, leased, loaded, scorer
from tests.consumers.samples import prompt, response, seen


async def watched(work, *calls, seconds=0.2, tell=lambda text: None):
    with LoopWatch(calls, tell, seconds).watching():
        return await work


class Named(logging.Handler):
    """Tells a reward that holds the loop when it has been named, from the thread that names it."""

    def __init__(self):
        super().__init__()
        self.records = []
        self.named = threading.Event()

    def emit(self, record):
        self.records.append(record)
        self.named.set()


@pytest.fixture
def named():
    handler = Named()
    logger = logging.getLogger("streamrl.consumers.watch")
    logger.addHandler(handler)
    yield handler
    logger.removeHandler(handler)


async def test_one_that_does_not_end_is_named_while_it_lasts(named):
    async def sleeps_where_it_should_await(sample):
        named.named.wait(60)
        return 1.0

    calls = calls_of(loaded(sleeps_where_it_should_await, deadline=120))
    sample = RewardSample.of(prompt(), response(), 17, 3)
    told: list[str] = []
    await watched(calls.score(sample, leased()), calls, tell=told.append)
    assert told[0].startswith("sleeps_where_it_should_await holds the event loop for ")
    assert f"at {__file__}:" in told[0]
    assert "named.named.wait(60)" in told[0]
    (record,) = named.records
    assert record.msg == "a reward holds the event loop"
    assert (record.reward, record.group, record.sample) == ("sleeps_where_it_should_await", 17, 3)
    assert "test_watch.py" in record.stack
    assert "sleeps_where_it_should_await" in record.stack


async def test_a_rule_and_a_group_reward_are_named_too(named):
    async def rule(sample):
        named.named.wait(60)
        return 1.0

    async def compare(samples):
        named.named.wait(60)
        return [1.0 for _ in samples]

    both = scorer(loaded(rule, instant=True), loaded(compare, group=True))
    await watched(both.score(seen()), *both.calls)
    named.named.clear()
    await watched(both.calls[1].score([seen()], leased()), *both.calls)
    assert [record.reward for record in named.records] == ["rule", "compare"]


async def test_who_does_not_call_a_reward_is_not_named(named, monkeypatch):
    looks = threading.Semaphore(0)

    class Looking(LoopWatch):
        def _look(self, *seen):
            super()._look(*seen)
            looks.release()

    calls = calls_of(loaded(computes))
    monkeypatch.setattr(watch_module, "HELD_SECONDS", 0.0)
    with Looking([calls], pytest.fail, 0.0).watching():
        for _ in range(3):
            assert looks.acquire(timeout=60)  # the loop stands still, and nobody calls a reward
    assert not named.records
    assert calls.figures.blocked == 0


async def computes(sample):
    await asyncio.sleep(0)
    return 1.0


@pytest.fixture
def counted(monkeypatch):
    """Waits until a time that a reward held the event loop has been counted, which a thread does."""

    def of(calls):
        loop, count, hold = asyncio.get_running_loop(), asyncio.Semaphore(0), calls.held_loop

        def held(seconds):
            hold(seconds)
            loop.call_soon_threadsafe(count.release)

        monkeypatch.setattr(calls, "held_loop", held)
        return count

    return of


async def test_a_step_that_took_long_is_counted_and_said_when_it_is_over(counted, caplog, monkeypatch):
    monkeypatch.setattr(watch_module, "HELD_SECONDS", 0.05)
    seen_by_watch = threading.Event()

    async def computes(sample):
        seen_by_watch.clear()
        assert seen_by_watch.wait(60)
        return 1.0

    calls = calls_of(loaded(computes))
    count = counted(calls)
    with LoopWatch([calls], lambda _: seen_by_watch.set(), 0.1).watching():
        for _ in range(4):
            await calls.score(seen(), leased())
            await asyncio.wait_for(count.acquire(), 60)
    line = calls.figures.line()
    assert line["blocked"] == 4
    assert line["blocked_seconds"] >= 0.1
    for seconds in (5000.0, 3.0):
        calls.figures.held_loop(seconds)
    assert calls.figures.line()["blocked_seconds"] == 5000.0, "the longest time counts, because a short one came later"
    said = [record for record in caplog.records if record.msg == "a reward held the event loop"]
    assert [record.times for record in said] == [1, 2, 4], "not once per sample"
    assert {record.reward for record in said} == {"computes"}


async def test_waiting_and_short_steps_are_not_holding():
    """The watch looks while a reward waits, and for longer than `HELD_SECONDS` while it computes in short steps."""
    looks = asyncio.Semaphore(0)
    loop = asyncio.get_running_loop()

    class Looking(LoopWatch):
        def _look(self, *seen):
            super()._look(*seen)
            loop.call_soon_threadsafe(looks.release)

    async def waits(sample):
        for _ in range(3):
            await looks.acquire()
        for _ in range(6):  # as a whole for longer than `HELD_SECONDS`
            end = time.perf_counter() + 0.3
            while time.perf_counter() < end:
                pass
            await asyncio.sleep(0)
        return 1.0

    calls = calls_of(loaded(waits))
    with Looking([calls], pytest.fail, 60.0).watching():
        await calls.score(seen(), leased())
        while not looks.locked():  # the looks that are over
            await looks.acquire()
        for _ in range(2):  # one may be under way; the next one sees that the call is over
            await looks.acquire()
    assert calls.figures.blocked == 0


@pytest.mark.slow
async def test_a_sync_reward_that_keeps_the_interpreter_is_named_afterwards(monkeypatch):
    lengths = itertools.count(24)

    def explodes(sample):
        # Twice as long as the time before without letting go of the GIL, however fast the machine is.
        return float(re.fullmatch(r"(a+)+b", "a" * next(lengths)) is None)

    async def innocent(sample):
        return 1.0

    calls, other = calls_of(loaded(explodes)), calls_of(loaded(innocent))
    held = []
    monkeypatch.setattr(calls, "held_loop", held.append)

    async def both():
        while not held:
            await calls.score(seen(), leased())
            await asyncio.sleep(0.6)  # the watch ticks

    await asyncio.wait_for(watched(both(), calls, other, seconds=60), 100)
    assert other.figures.blocked == 0
