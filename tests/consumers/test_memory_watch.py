"""Rewards that keep memory are found and named; those that only use some are not."""

import asyncio
import functools
import itertools
import tracemalloc
from types import SimpleNamespace

import pytest

from streamrl.consumers import memory
from streamrl.consumers.memory import Growth, MemoryWatch, kept_by, source_of, traced
from streamrl.consumers.rules.text import ExactMatch
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


async def test_allocations_are_charged_to_the_reward_they_were_made_under(monkeypatch):
    leaky = calls_of(loaded(keeps_memory.keeps, name="leaky"))
    tidy = calls_of(loaded(ExactMatch().score, name="tidy"))
    files = {calls.reward.name: source_of(calls) for calls in (leaky, tidy)}
    done = asyncio.Event()  # instead of a stretch of time, in which a busy host might do nothing
    monkeypatch.setattr(memory, "asyncio", SimpleNamespace(sleep=lambda _: done.wait(), to_thread=asyncio.to_thread))
    tracing = asyncio.create_task(traced(0.2))
    while not tracemalloc.is_tracing():  # noqa: ASYNC110 (nobody announces it)
        await asyncio.sleep(0)
    for _ in range(50):
        await leaky.score(seen(), leased())
        await tidy.score(seen(), leased())
    done.set()
    kept = kept_by(await tracing, files)
    keeps_memory.forget()
    assert kept["leaky"].bytes > 50 * keeps_memory.BYTES
    assert kept["leaky"].line.startswith("keeps_memory.py:")
    assert kept.get("tidy", memory.Kept(0, "")).bytes < 50 * keeps_memory.BYTES / 10
    assert not tracemalloc.is_tracing()


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


async def test_a_leak_is_named_in_log_and_figures(monkeypatch, caplog):
    """The sizes are played; the tracing and what it finds are real."""
    sizes = iter(range(0, 10**12, 4 * MIB))
    monkeypatch.setattr(memory, "resident_bytes", lambda: next(sizes))
    monkeypatch.setattr(memory, "_LOOK_SECONDS", 0.0)
    leaky = calls_of(loaded(keeps_memory.keeps, name="leaky"))
    tidy = calls_of(loaded(ExactMatch().score, name="tidy"))
    growth = Growth(window=1e-9, windows=3, least=MIB)
    monkeypatch.setattr(memory, "_SHARE", 1e-9)  # of a rate that was played
    watch = asyncio.create_task(MemoryWatch([tidy, leaky], growth, seconds=0.2).run())
    try:
        async with asyncio.timeout(60):
            while not leaky.figures.leaks:
                await leaky.score(seen(), leased())
                await asyncio.sleep(0)
    finally:
        watch.cancel()
        await asyncio.gather(watch, return_exceptions=True)
        keeps_memory.forget()
    assert "MB/s at keeps_memory.py:" in leaky.figures.leaks
    record = next(record for record in caplog.records if record.msg == "a reward keeps memory")
    assert (record.reward, record.line.split(":")[0]) == ("leaky", "keeps_memory.py")
    assert tidy.figures.leaks == ""


async def test_growth_that_no_reward_explains_is_said_without_a_name(monkeypatch, caplog):
    calls = calls_of(loaded(ExactMatch().score, name="tidy"))
    growth = Growth()
    growth.per_second = 1e9
    await MemoryWatch([calls], growth, seconds=0.01)._look_into(100 * MIB)
    assert "no reward's Python code is seen to keep it" in caplog.text
    assert calls.figures.leaks == ""


async def test_a_system_that_does_not_say_how_large_a_process_is_is_not_watched(monkeypatch):
    monkeypatch.setattr(memory, "resident_bytes", lambda: None)
    await asyncio.wait_for(MemoryWatch([]).run(), 30)


def test_this_process_has_a_size():
    assert MIB < memory.resident_bytes() < 1 << 40
