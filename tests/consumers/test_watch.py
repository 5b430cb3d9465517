"""Rewards that hold the event loop are named: while they do it, and afterwards."""

import asyncio
import itertools
import logging
import re
import threading

import pytest

from streamrl.consumers import RewardSample, steps
from streamrl.consumers import watch as watch_module
from streamrl.consumers.steps import Timed
from streamrl.consumers.watch import LoopWatch, held_by
from tests.consumers.calls_kit import calls_of, leased, loaded, scorer
from tests.consumers.samples import prompt, response, seen


async def watched(work, *calls, seconds=0.2, tell=lambda text: None):
    watch = asyncio.create_task(LoopWatch(calls, seconds, tell).run())
    await asyncio.sleep(0)
    try:
        return await work
    finally:
        watch.cancel()
        await asyncio.gather(watch, return_exceptions=True)


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

    def look(frame):
        looks.release()
        return held_by(frame)

    monkeypatch.setattr(watch_module, "held_by", look)

    async def reward(sample):
        return 1.0

    async def somebody_else():
        for _ in range(2):  # the second look begins when the first has said all it had to say
            assert looks.acquire(timeout=60)

    await watched(somebody_else(), calls_of(loaded(reward)))
    assert not named.records


class Clock:
    """The clock of steps, moved by the test."""

    def __init__(self):
        self.now = 0.0

    def perf_counter(self):
        return self.now


@pytest.fixture
def clock(monkeypatch):
    clock = Clock()
    monkeypatch.setattr(steps, "time", clock)
    return clock


async def test_a_step_that_took_long_is_counted_and_said(clock, caplog):
    async def computes(sample):
        await asyncio.sleep(0)
        clock.now += 1.5
        return 1.0

    calls = calls_of(loaded(computes))
    for _ in range(4):
        await calls.score(seen(), leased())
    line = calls.figures.line()
    assert (line["blocked"], line["blocked_seconds"]) == (4, 1.5)
    said = [record for record in caplog.records if record.msg == "a reward held the event loop"]
    assert [record.times for record in said] == [1, 2, 4], "not once per sample"
    assert {record.reward for record in said} == {"computes"}


async def test_waiting_is_not_holding(clock):
    begun, over = asyncio.Event(), asyncio.Event()

    async def waits(sample):
        begun.set()
        await over.wait()
        return 1.0

    calls = calls_of(loaded(waits))
    scoring = asyncio.create_task(calls.score(seen(), leased()))
    await begun.wait()
    clock.now += 100
    over.set()
    await scoring
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


async def test_timed_passes_results_exceptions_and_cancellation():
    held = []

    async def gives(value):
        await asyncio.sleep(0)
        return value

    async def raises():
        await asyncio.sleep(0)
        raise KeyError("x")

    cleaned = asyncio.Event()

    async def hangs():
        try:
            await asyncio.Event().wait()
        finally:
            cleaned.set()

    async def timed(coroutine):
        return await Timed(coroutine, 60, held.append)

    assert await timed(gives(3)) == 3
    with pytest.raises(KeyError):
        await timed(raises())
    task = asyncio.create_task(timed(hangs()))
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert cleaned.is_set()
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(timed(hangs()), 0.01)
    assert not held
