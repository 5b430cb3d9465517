"""Rewards that block, in a command: named while they do, ended at their deadline, ended by Ctrl-C."""

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
import threading
import time

import pytest

from streamrl.consumers.calls import ScoringFailed
from streamrl.consumers.watch import Foreground
from tests.consumers.calls_kit import calls_of, leased, loaded
from tests.consumers.samples import seen


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
        said.append(text)
        go.set()

    calls = calls_of(loaded(waits, name="mine"), attempts=1)
    with Foreground([calls], tell, seconds=0.2).watching():
        assert [score.value for score in await calls.score(seen(), leased())] == [1.0]
    assert len(said) == 1
    assert "mine, sample 0 of group 0: has been running" in said[0]
    assert "assert go.wait(60)" in said[0] or "threading.py" in said[0]


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
