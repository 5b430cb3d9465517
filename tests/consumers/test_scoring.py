import asyncio
import threading
import time

import numpy as np
import pytest

from streamrl.consumers import Score, scoring
from streamrl.consumers.calls import DETAIL_BYTES, ScoringFailed
from streamrl.errors import DeadlineExceeded
from tests.consumers.calls_kit import loaded, scorer
from tests.consumers.samples import seen


def make(*calls, **worker):
    return scorer(*map(loaded, calls), **worker)


async def test_the_value_is_the_weighted_sum_and_every_part_is_kept():
    async def right(sample):
        return Score(1.0, {"format": 0.5})

    def length(sample):
        return 4

    score = await scorer(loaded(right, weight=2.0), loaded(length, weight=-0.25)).score(seen())
    assert score.value == 1.0  # 2 * 1 - 0.25 * 4
    assert score.parts == {"right": 1.0, "right/format": 0.5, "length": 4.0}


@pytest.mark.parametrize(
    ("result", "kind"),
    [
        (float("nan"), "ValueError"),
        (float("inf"), "ValueError"),
        ("1.0", "TypeError"),
        (None, "TypeError"),
        (True, "TypeError"),
        (np.bool_(True), "TypeError"),
        (np.float32("nan"), "ValueError"),
        ({"score": 1}, "TypeError"),
        (np.zeros(3), "TypeError"),
        (1j, "TypeError"),
    ],
)
async def test_what_is_no_finite_number_is_an_error_and_never_zero(result, kind):
    async def reward(sample):
        return result

    with pytest.raises(ScoringFailed) as caught:
        await make(reward).score(seen())
    assert caught.value.message.startswith(kind)
    assert "(2 attempts)" in caught.value.message
    assert "Traceback" in caught.value.detail


@pytest.mark.parametrize("result", [1, 0, -3, np.float32(0.5), np.int64(2), np.asarray(0.25)])
async def test_numbers_of_any_kind_are_numbers(result):
    async def reward(sample):
        return result

    assert (await make(reward).score(seen())).value == float(np.asarray(result).item())


def test_a_score_refuses_parts_that_are_no_numbers():
    with pytest.raises(TypeError, match="part format"):
        Score(1.0, {"format": None})  # type: ignore[dict-item]
    with pytest.raises(TypeError, match="the value"):
        Score("1")  # type: ignore[arg-type]


async def test_weights_that_overflow_the_sum_are_an_error():
    async def reward(sample):
        return 1e308

    with pytest.raises(ScoringFailed, match="weighted sum"):
        await scorer(loaded(reward, weight=1e10)).score(seen())


async def test_only_the_reward_that_failed_is_tried_again():
    calls = []

    async def steady(sample):
        calls.append("steady")
        return 1.0

    async def flaky(sample):
        calls.append("flaky")
        if calls.count("flaky") < 3:
            raise ConnectionError("judge is away")
        return 2.0

    made = make(steady, flaky, attempts=3)
    assert (await made.score(seen())).value == 3.0
    assert (calls.count("steady"), calls.count("flaky")) == (1, 3)
    assert made.retried == 2


async def test_a_traceback_is_capped_and_keeps_its_end():
    async def reward(sample):
        raise RuntimeError("x" * 10_000 + "the end")

    with pytest.raises(ScoringFailed) as caught:
        await make(reward, attempts=1).score(seen())
    assert len(caught.value.detail.encode()) <= DETAIL_BYTES
    assert caught.value.detail.rstrip().endswith("the end")
    assert len(caught.value.message) <= 220


async def test_an_async_reward_that_hangs_meets_its_deadline():
    async def reward(sample):
        await asyncio.Event().wait()

    with pytest.raises(ScoringFailed, match=r"deadline: reward: no score within 0.02 s"):
        await make(reward, deadline=0.02).score(seen())


async def test_a_timeout_of_the_reward_itself_is_not_taken_for_ours():
    async def reward(sample):
        raise TimeoutError("judge took 5 s")

    with pytest.raises(ScoringFailed, match="judge took 5 s"):
        await make(reward).score(seen())


async def test_a_sync_reward_that_hangs_neither_blocks_the_loop_nor_other_samples():
    release = threading.Event()

    def reward(sample):
        if sample.text == "hang":
            release.wait()
        return 1.0

    made = make(reward, attempts=1, deadline=1.0)
    hanging = asyncio.create_task(made.score(seen("hang")))
    others = await asyncio.gather(*(made.score(seen("fine")) for _ in range(20)))
    assert [score.value for score in others] == [1.0] * 20
    with pytest.raises(ScoringFailed, match="deadline"):
        await hanging
    assert made.threads.abandoned == 1
    release.set()
    while made.threads.abandoned:  # noqa: ASYNC110 (the thread comes back and is used again)
        await asyncio.sleep(0)
    started = made.threads.started
    await made.score(seen("fine"))
    assert made.threads.started == started


async def test_too_many_hanging_threads_ask_for_a_new_process_instead_of_killing_innocents(monkeypatch):
    monkeypatch.setattr(scoring, "MAX_HANGING", 2)
    release = threading.Event()

    def reward(sample):
        release.wait()

    made = make(reward, attempts=1, deadline=0.01)
    for _ in range(2):
        with pytest.raises(ScoringFailed):
            await made.score(seen())
    with pytest.raises(DeadlineExceeded) as caught:
        await made.score(seen())
    assert caught.value.exit_code == 75
    release.set()


async def test_sys_exit_in_a_reward_is_a_failure_of_the_sample_not_the_end_of_the_worker():
    async def reward(sample):
        raise SystemExit(3)

    def sync(sample):
        raise SystemExit(4)

    for call in (reward, sync):
        with pytest.raises(ScoringFailed, match=r"exit|SystemExit"):
            await make(call).score(seen())


async def test_an_awaitable_from_a_sync_callable_is_awaited():
    async def real(sample):
        return 1.5

    def wrapper(sample):
        return real(sample)

    assert (await make(wrapper).score(seen())).value == 1.5


async def test_sync_rewards_of_many_samples_run_at_the_same_time():
    together = threading.Barrier(8)

    def reward(sample):
        together.wait(timeout=10)
        return 1.0

    made = make(reward, attempts=1)
    scores = await asyncio.gather(*(made.score(seen()) for _ in range(8)))
    assert len(scores) == 8


async def test_cancelling_a_score_leaves_nothing_running():
    started = asyncio.Event()

    async def reward(sample):
        started.set()
        await asyncio.Event().wait()

    task = asyncio.create_task(make(reward).score(seen()))
    await started.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert len(asyncio.all_tasks()) == 1


def test_a_process_with_a_hanging_sync_reward_can_still_end():
    import subprocess
    import sys

    code = (
        "import asyncio, threading\n"
        "from streamrl.consumers.threads import CallThreads\n"
        "async def main():\n"
        "    try:\n"
        "        await asyncio.wait_for(CallThreads().run(lambda _: threading.Event().wait(), None), 0.05)\n"
        "    except TimeoutError: print('gave up')\n"
        "asyncio.run(main())\n"
    )
    begun = time.monotonic()
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout) == (0, "gave up\n"), done.stderr
    assert time.monotonic() - begun < 50
