"""Rewards that keep memory are found and named; those that only use some are not."""

import asyncio
import functools
import itertools

import pytest

from streamrl.consumers import watch
from streamrl.consumers.watch import Growth, MemoryWatch, resident_bytes, source_of
from tests.consumers import keeps_memory
from tests.consumers.calls_kit import calls_of, leased, loaded
from tests.consumers.samples import seen

MIB = 1 << 20


def feed(growth, sizes, seconds=1.0):
    """Times at which growth was found."""
    return [second for second, size in enumerate(sizes) if growth.add(second * seconds, size)]


def test_growth_without_a_pause_is_found_and_again_when_there_is_twice_as_much():
    found = feed(Growth(window=10, windows=6, least=64 * MIB), [second * 2 * MIB for second in range(400)])
    assert len(found) == 3
    assert found[0] == 60
    assert all(later >= 1.7 * sooner for sooner, later in itertools.pairwise(found))


def test_the_rate_is_that_of_the_growth():
    growth = Growth(window=10, windows=6, least=64 * MIB)
    feed(growth, [second * 2 * MIB for second in range(61)])
    assert growth.per_second == pytest.approx(2 * MIB, rel=0.05)


@pytest.mark.parametrize(
    "sizes",
    [
        [100 * MIB] * 300,
        [100 * MIB + (second % 10) * 50 * MIB for second in range(300)],  # comes and goes
        [min(second, 40) * 10 * MIB for second in range(300)],  # grows while it starts
        [second * MIB // 10 for second in range(300)],  # a little
        [second * 2 * MIB if second % 50 else 0 for second in range(300)],  # goes back in between
    ],
)
def test_what_does_not_go_on_growing_is_no_leak(sizes):
    assert feed(Growth(window=10, windows=6, least=64 * MIB), sizes) == []


def test_a_process_that_was_suspended_for_hours_is_no_leak():
    growth = Growth(window=10, windows=6, least=64 * MIB)
    assert not [True for second in range(20) if growth.add(second * 3600.0, 100 * MIB)]


def test_the_file_of_every_form_of_a_reward_is_found():
    class Compares:
        async def score_group(self, samples):
            return []

    forms = [
        keeps_memory.keeps,
        functools.partial(keeps_memory.keeps),
        keeps_memory.Keeper().score,
        keeps_memory.Keeper(),
    ]
    for form in forms:
        assert source_of(calls_of(loaded(form, name="x"))).endswith("keeps_memory.py")
    assert source_of(calls_of(loaded(Compares().score_group, name="x", group=True))).endswith("test_memory_watch.py")
    assert source_of(calls_of(loaded(len, name="x"))) is None


async def test_a_leak_is_named_in_log_and_figures(caplog):
    """The clock is played; the growth of this process is real."""
    leaky, idle = calls_of(loaded(keeps_memory.keeps, name="leaky")), calls_of(loaded(tidies, name="idle"))
    memory = MemoryWatch([idle, leaky], Growth(window=10, windows=4, least=16 * MIB))
    await idle.score(seen(), leased())
    memory.look(-100, resident_bytes())
    for second in range(80):
        memory.look(second, resident_bytes())
        await leaky.score(seen(), leased())
    keeps_memory.forget()
    assert "the worker grows by" in leaky.figures.leaks
    record = next(record for record in caplog.records if record.msg == "the worker grows while a reward is called")
    assert (record.reward, record.together_with) == ("leaky", "")
    assert record.mib_per_second == pytest.approx(keeps_memory.BYTES / MIB, rel=0.2)
    assert idle.figures.leaks == ""


async def tidies(sample):
    return 1.0


async def test_rewards_that_are_called_together_are_named_together():
    both = [calls_of(loaded(tidies, name=name)) for name in ("one", "other")]
    memory = MemoryWatch(both, Growth(window=10, windows=4, least=16 * MIB))
    for second in range(80):
        for calls in both:
            await calls.score(seen(), leased())
        memory.look(second, second * MIB)
    assert [calls.figures.leaks.rpartition(" ")[2] for calls in both] == ["other", "one"]


async def test_growth_while_no_reward_is_called_is_said_without_a_name(caplog):
    calls = calls_of(loaded(tidies))
    memory = MemoryWatch([calls], Growth(window=10, windows=4, least=16 * MIB))
    for second in range(80):
        memory.look(second, second * MIB)
    assert "not while rewards are called" in caplog.text
    assert calls.figures.leaks == ""


async def test_a_watch_that_runs_looks_again_and_again(monkeypatch):
    """The size of the process and the pause between two looks are played; the clock is real."""
    sizes = itertools.count(MIB, MIB)
    monkeypatch.setattr(watch, "resident_bytes", lambda: next(sizes))
    monkeypatch.setattr(watch, "_MEMORY_SECONDS", 0)
    calls = calls_of(loaded(tidies))
    async with asyncio.timeout(60):
        watching = asyncio.create_task(MemoryWatch([calls], Growth(window=0.01, windows=4, least=MIB)).run())
        while not calls.figures.leaks:
            await calls.score(seen(), leased())
            assert not watching.done()
            await asyncio.sleep(0)
    watching.cancel()
    with pytest.raises(asyncio.CancelledError):
        await watching
    assert "the worker grows by" in calls.figures.leaks


async def test_a_system_that_does_not_say_how_large_a_process_is_is_not_watched(monkeypatch):
    monkeypatch.setattr(watch, "resident_bytes", lambda: None)
    await asyncio.wait_for(MemoryWatch([]).run(), 30)


def test_this_process_has_a_size():
    assert MIB < resident_bytes() < 1 << 40
