"""Rewards that hold the event loop are named and, in a command, ended; those called while memory grows are named."""

import asyncio
import contextlib
import itertools
import logging
import mmap
import os
import re
import signal
import subprocess
import sys
import sysconfig
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from streamrl.consumers import RewardSample
from streamrl.consumers import watch as watch_module
from streamrl.consumers.calls import ScoringFailed
from streamrl.consumers.watch import Foreground, LoopWatch, MemoryWatch, resident_bytes
from tests.consumers.calls_kit import calls_of, leased, loaded, scorer
from tests.consumers.samples import prompt, response, seen

MIB = 1 << 20


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


async def tidies(sample):
    return 1.0


def frames(*files):
    """The innermost of frames in these files, the outermost first."""
    frame = None
    for line, file in enumerate(files, start=1):
        code = SimpleNamespace(co_filename=file, co_name=Path(file).stem)
        frame = SimpleNamespace(f_code=code, f_lineno=line, f_back=frame)
    return frame


@pytest.mark.parametrize(
    ("files", "named"),
    [
        (("{ours}/calls.py", "/home/u/rewards.py", "{lib}/socket.py"), "/home/u/rewards.py:2 in rewards"),
        (("{ours}/calls.py", "/home/u/rewards.py", "<frozen os>"), "/home/u/rewards.py:2 in rewards"),
        (("{ours}/calls.py", "{site}/theirs/reward.py", "{lib}/socket.py"), "{site}/theirs/reward.py:2 in reward"),
    ],
)
def test_the_line_that_is_named_is_of_the_reward(files, named):
    folders = {"ours": str(Path(watch_module.__file__).parent)}
    folders |= {"lib": sysconfig.get_path("stdlib"), "site": sysconfig.get_path("purelib")}
    place = watch_module._place(frames(*(file.format(**folders) for file in files)))
    assert place.startswith(named.format(**folders) + ":")


# --- in a worker ------------------------------------------------------------------------------------------------------


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


def looking(loop_watch, looked):
    """A watch that calls `looked` after each look."""

    class Looking(loop_watch):
        def _look(self, *seen):
            super()._look(*seen)
            looked()

    return Looking


async def test_who_does_not_call_a_reward_is_not_named(named, monkeypatch):
    looks = threading.Semaphore(0)
    calls = calls_of(loaded(tidies))
    monkeypatch.setattr(watch_module, "HELD_SECONDS", 0.0)
    with looking(LoopWatch, looks.release)([calls], pytest.fail, 0.0).watching():
        for _ in range(3):
            assert looks.acquire(timeout=60)  # the loop stands still, and nobody calls a reward
    assert not named.records
    assert calls.figures.blocked == 0


async def test_a_step_that_took_long_is_counted_and_said_when_it_is_over(caplog, monkeypatch):
    monkeypatch.setattr(watch_module, "HELD_SECONDS", 0.05)
    seen_by_watch = threading.Event()

    async def computes(sample):
        seen_by_watch.clear()
        assert seen_by_watch.wait(60)
        return 1.0

    calls = calls_of(loaded(computes))
    loop, count, hold = asyncio.get_running_loop(), asyncio.Semaphore(0), calls.held_loop

    def held(seconds):
        hold(seconds)
        loop.call_soon_threadsafe(count.release)

    monkeypatch.setattr(calls, "held_loop", held)
    with LoopWatch([calls], lambda _: seen_by_watch.set(), 0.1).watching():
        for _ in range(4):
            await calls.score(seen(), leased())
            await asyncio.wait_for(count.acquire(), 60)  # the thread of the watch has counted it
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
    looks, loop = asyncio.Semaphore(0), asyncio.get_running_loop()

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
    watch = looking(LoopWatch, lambda: loop.call_soon_threadsafe(looks.release))
    with watch([calls], pytest.fail, 60.0).watching():
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

    calls, other = calls_of(loaded(explodes)), calls_of(loaded(tidies))
    held = []
    monkeypatch.setattr(calls, "held_loop", held.append)

    async def both():
        while not held:
            await calls.score(seen(), leased())
            await asyncio.sleep(0.6)  # the watch ticks

    await asyncio.wait_for(watched(both(), calls, other, seconds=60), 100)
    assert other.figures.blocked == 0


# --- in a command -----------------------------------------------------------------------------------------------------


async def sleeps(sample):
    time.sleep(60)  # noqa: ASYNC251
    return 1.0


async def computes(sample):
    with contextlib.suppress(Exception):  # a reward that swallows errors ends as well
        while True:
            pass


async def steps(sample):
    for _ in range(4):
        time.sleep(0.1)  # noqa: ASYNC251
        await asyncio.sleep(0)
    return 1.0


@pytest.mark.parametrize(("reward", "line"), [(sleeps, "time.sleep(60)"), (computes, "while True:")])
async def test_what_holds_the_event_loop_is_named_and_ends_at_its_deadline(reward, line):
    said: list[str] = []
    calls = calls_of(loaded(reward, name="mine", deadline=1.0), attempts=1)
    with Foreground([calls], said.append, seconds=0.2).watching(), pytest.raises(ScoringFailed) as caught:
        await calls.score(seen(), leased())
    assert len(said) == 1
    assert said[0].startswith("mine, sample 0 of group 0: holds the event loop for 0 s at ")
    assert __file__ in said[0]
    assert line in said[0]
    assert caught.value.message.startswith("deadline: mine held the event loop for 1 s, at ")
    assert calls.figures.failures["deadline"] == 1
    assert f"in {reward.__name__}" in caught.value.detail


async def test_steps_that_end_in_time_are_not_ended_whatever_they_make_together():
    calls = calls_of(loaded(steps, deadline=0.3), attempts=1)
    with Foreground([calls], pytest.fail, seconds=0.2).watching():
        tasks = [asyncio.create_task(calls._call(seen())) for _ in range(3)]
        assert await asyncio.gather(*tasks) == [1.0] * 3


async def test_a_sync_reward_that_blocks_its_thread_is_named():
    go, said = threading.Event(), []

    def waits(sample):
        assert go.wait(60)
        return 1.0

    def tell(text):
        if "has been running" in text:  # on a busy host the start of the thread may hold the event loop
            said.append(text)
            go.set()

    calls = calls_of(loaded(waits, name="mine"), attempts=1)
    with Foreground([calls], tell, seconds=0.2).watching():
        assert [score.value for score in await calls.score(seen(), leased())] == [1.0]
    assert len(said) == 1
    assert said[0].startswith("mine, sample 0 of group 0: has been running")
    assert "assert go.wait(60)" in said[0], "the line of the reward, and not that of the library below it"


async def test_signals_are_as_before_when_it_ends():
    given = signal.signal(signal.SIGINT, signal.default_int_handler)  # the tests may run where Ctrl-C is ignored
    try:
        with Foreground([], print).watching():
            assert signal.getsignal(signal.SIGINT) != signal.default_int_handler
        assert signal.getsignal(signal.SIGINT) == signal.default_int_handler
    finally:
        signal.signal(signal.SIGINT, given)


BLOCKING = """
import pathlib, time

async def blocks(sample):
    pathlib.Path("began").touch()
    time.sleep(600)
"""


def test_a_reward_that_blocks_ends_at_the_first_ctrl_c_without_a_traceback(tmp_path):
    (tmp_path / "blocking.py").write_text(BLOCKING)
    (tmp_path / "samples.jsonl").write_text('{"prompt": "x", "response": "y"}\n' * 3)
    command = [sys.executable, "-m", "streamrl", "reward", "test", "blocking:blocks", "--sample", "samples.jsonl"]
    with subprocess.Popen(
        command,
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),  # noqa: PLW1509 (one thread here)
    ) as running:
        try:
            end = time.monotonic() + 60
            while not (tmp_path / "began").exists() and time.monotonic() < end:
                time.sleep(0.02)
            os.kill(running.pid, signal.SIGINT)
            out, _ = running.communicate(timeout=60)
        finally:
            running.kill()
    assert running.returncode == 130
    assert "Traceback" not in out
    assert len(out.splitlines()) <= 2


# --- memory -----------------------------------------------------------------------------------------------------------


async def warnings_at(caplog, sizes, *rewards, step=1.0):
    """Times of the warnings while the sizes of the process are played, and all rewards are called."""
    watch, found = MemoryWatch(rewards, window=10, windows=6, least=64 * MIB), []
    for second, size in enumerate(sizes):
        for calls in rewards:
            await calls.score(seen(), leased())
        watch.look(second * step, size)
        if caplog.records:
            found.append(second)
            caplog.clear()
    return found


async def test_growth_without_a_pause_is_named_and_again_at_twice_the_size(caplog):
    calls = calls_of(loaded(tidies))
    found = await warnings_at(caplog, [second * 2 * MIB for second in range(400)], calls)
    assert len(found) == 3
    assert found[0] == 60
    assert all(later >= 1.7 * sooner for sooner, later in itertools.pairwise(found))
    assert calls.figures.leaks == f"the worker grows by {2 * MIB / 1e6:.3g} MB/s while it is called"


@pytest.mark.parametrize(
    ("sizes", "step"),
    [
        ([100 * MIB] * 300, 1.0),
        ([100 * MIB + (second % 10) * 50 * MIB for second in range(300)], 1.0),  # comes and goes
        ([min(second, 40) * 10 * MIB for second in range(300)], 1.0),  # grows while it starts
        ([second * MIB // 10 for second in range(300)], 1.0),  # a little
        ([second * 2 * MIB if second % 50 else 0 for second in range(300)], 1.0),  # goes back in between
        ([100 * MIB] * 20, 3600.0),  # was suspended for hours
    ],
)
async def test_what_does_not_go_on_growing_is_no_leak(caplog, sizes, step):
    assert await warnings_at(caplog, sizes, step=step) == []


async def test_a_leak_is_named_in_log_and_figures(caplog):
    """The clock is played; the growth of this process is real."""
    kept = []

    async def keeps(sample):
        kept.append(mmap.mmap(-1, MIB))  # pages of its own: the heap of the process may have free ones
        kept[-1].write(b"x" * MIB)
        return 1.0

    leaky, idle = calls_of(loaded(keeps, name="leaky")), calls_of(loaded(tidies, name="idle"))
    memory = MemoryWatch([idle, leaky], window=10, windows=4, least=16 * MIB)
    await idle.score(seen(), leased())
    memory.look(-100, resident_bytes())
    memory.look(-90, resident_bytes())
    for second in range(80):
        memory.look(second, resident_bytes())
        await leaky.score(seen(), leased())
    assert "the worker grows by" in leaky.figures.leaks
    record = next(record for record in caplog.records if record.msg == "the worker grows while a reward is called")
    assert (record.reward, record.together_with) == ("leaky", "")
    assert record.mib_per_second == pytest.approx(1, rel=0.2)
    assert idle.figures.leaks == ""


async def test_rewards_that_are_called_together_are_named_together_and_growth_without_any_is_said(caplog):
    both = [calls_of(loaded(tidies, name=name)) for name in ("one", "other")]
    growth = [second * 2 * MIB for second in range(80)]
    assert await warnings_at(caplog, growth, *both) == [60]
    assert [calls.figures.leaks.rpartition(" ")[2] for calls in both] == ["other", "one"]
    memory = MemoryWatch([calls_of(loaded(tidies))], window=10, windows=6, least=64 * MIB)
    for second, size in enumerate(growth):
        memory.look(second, size)
    assert "not while rewards are called" in caplog.text


async def test_a_watch_that_runs_looks_again_and_again(monkeypatch):
    """The size of the process and the pause between two looks are played; the clock is real."""
    sizes = itertools.count(MIB, MIB)
    monkeypatch.setattr(watch_module, "resident_bytes", lambda: next(sizes))
    monkeypatch.setattr(watch_module, "_MEMORY_SECONDS", 0)
    calls = calls_of(loaded(tidies))
    async with asyncio.timeout(60):
        watching = asyncio.create_task(MemoryWatch([calls], window=0.01, windows=4, least=MIB).run())
        while not calls.figures.leaks:
            await calls.score(seen(), leased())
            assert not watching.done()
            await asyncio.sleep(0)
    watching.cancel()
    with pytest.raises(asyncio.CancelledError):
        await watching
    monkeypatch.setattr(watch_module, "resident_bytes", lambda: None)  # on a system that does not say
    await asyncio.wait_for(MemoryWatch([]).run(), 30)
