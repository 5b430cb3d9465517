"""A sample and a group through several rewards: stages up to gates, failures, one score; and outside of a run."""

from __future__ import annotations

import asyncio
import contextlib
import subprocess
import sys
import threading
import time

import numpy as np
import pytest

from streamrl.config import LeaseConfig
from streamrl.consumers import RewardSample, Score
from streamrl.consumers import scoring as scoring_module
from streamrl.consumers.calls import DETAIL_BYTES, ScoringFailed
from streamrl.consumers.scoring import PatientScorer
from streamrl.errors import ConfigError, DeadlineExceeded, RewardBusy, RewardUnavailable, Unreachable
from tests.consumers.calls_kit import loaded, scorer
from tests.consumers.samples import prompt, response, seen


def make(*calls, **worker):
    return scorer(*map(loaded, calls), **worker)


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
    monkeypatch.setattr(scoring_module, "MAX_HANGING", 2)
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
    code = (
        "import asyncio, threading\n"
        "from streamrl.consumers.calls import CallThreads\n"
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


# --- stages and groups ------------------------------------------------------------------------------------------------


def group(*texts):
    return [RewardSample.of(prompt(), response(text), 5, index) for index, text in enumerate(texts)]


async def is_formatted(sample):
    if sample.text == "raise":
        raise ValueError("the format cannot be told")
    return float(sample.text != "bad")


def counting(name, value=1.0):
    asked = []

    async def reward(sample):
        asked.append(sample.index)
        return value

    reward.__name__ = name
    return reward, asked


async def test_rewards_behind_a_gate_are_saved_when_it_does_not_let_through():
    before, asked_before = counting("before")
    behind, asked_behind = counting("behind", 3.0)
    scoring = scorer(loaded(before), loaded(is_formatted, gate=1), loaded(behind), scoring={"gated": -1})
    assert (await scoring.score(seen("good"))).value == 4.0
    score = await scoring.score(seen("bad"))
    assert (score.value, len(asked_before), len(asked_behind)) == (-1.0, 2, 1)
    assert score.parts == {"before": 1.0, "is_formatted": 0.0, "is_formatted/passed": 0.0}


async def test_two_gates_are_two_stages():
    first, asked_first = counting("first", 0.0)
    second, asked_second = counting("second")
    last, _ = counting("last")
    scoring = scorer(loaded(first, gate=0.5), loaded(second, gate=0.5), loaded(last))
    assert (await scoring.score(seen())).value == 0.0
    assert (asked_first, asked_second) == ([0], [])


async def test_rewards_of_a_stage_run_at_the_same_time():
    both = asyncio.Barrier(2)

    async def left(sample):
        await both.wait()
        return 1.0

    async def right(sample):
        await both.wait()
        return 1.0

    assert (await scorer(loaded(left), loaded(right)).score(seen())).value == 2.0


async def test_one_that_failed_for_good_ends_the_attempts_of_the_others():
    failed = asyncio.Event()
    tries = []

    async def fails(sample):
        failed.set()
        raise ConfigError("no such rubric")

    async def retries(sample):
        tries.append(sample.index)
        await failed.wait()
        raise ConnectionError("away")

    scoring = scorer(loaded(fails), loaded(retries, on_failure="retry"), backoff=0.001)
    with pytest.raises(ScoringFailed, match="no such rubric"):
        await scoring.score(seen())
    assert tries == [0]
    assert [calls.figures.dead for calls in scoring.calls] == [1, 0]


async def test_values_that_make_no_number_end_as_the_worker_says():
    async def negative(sample):
        return -1.0

    scoring = scorer(loaded(negative, weight=0.5), scoring={"combine": "product"}, on_failure="dead")
    with pytest.raises(ScoringFailed, match=r"has no power 0\.5") as caught:
        await scoring.score(seen())
    assert caught.value.fail_group


async def compared(samples):
    if any(sample.text == "poison" for sample in samples):
        raise RuntimeError("cannot compare these")
    return [float(len(samples)) for _ in samples]


async def test_a_group_is_compared_without_those_that_a_gate_held_back_or_that_failed():
    scoring = scorer(loaded(is_formatted, gate=1), loaded(compared, group=True), scoring={"gated": -1}, attempts=1)
    results = await scoring.score_group(group("good", "bad", "raise", "good"))
    assert [result.value for result in results if not isinstance(result, ScoringFailed)] == [2.0, -1.0, 2.0]
    assert isinstance(results[2], ScoringFailed)
    assert "cannot be told" in results[2].message


def is_short(sample):
    if sample.text == "untold":
        raise ValueError("its length cannot be told")
    return 1.0


async def test_what_an_instant_rule_fails_is_not_compared_although_there_is_no_gate_between():
    rules = [loaded(compared, group=True), loaded(is_short, instant=True)]
    scoring = scorer(*rules, attempts=1)
    results = await scoring.score_group(group("good", "untold", "good"))
    assert [result.value for result in results if not isinstance(result, ScoringFailed)] == [3.0, 3.0]
    assert "cannot be told" in results[1].message
    assert [calls.figures.ok for calls in scoring.calls] == [2, 2], "each was called once for each sample"
    gone = await scoring.score_group(group("untold", "untold"))
    assert all(isinstance(result, ScoringFailed) for result in gone)
    assert scoring.calls[0].figures.ok == 2, "nothing was left to compare"


async def test_a_slow_reward_of_the_stage_of_a_comparison_runs_beside_it():
    """So what it fails may have been compared: the documentation says what to do about it."""
    both = asyncio.Barrier(2)
    seen_by_it = []

    async def slow(sample):
        if sample.text == "late":
            await both.wait()
            raise ValueError("too late for the comparison")
        return 1.0

    async def ranked(samples):
        seen_by_it.extend(sample.text for sample in samples)
        await both.wait()
        return [1.0 for _ in samples]

    results = await scorer(loaded(slow), loaded(ranked, group=True), attempts=1).score_group(group("good", "late"))
    assert (results[0].value, seen_by_it) == (2.0, ["good", "late"])
    assert "too late" in results[1].message


async def test_a_comparison_that_fails_leaves_no_sample_with_a_score():
    steady, _ = counting("steady")
    scoring = scorer(loaded(steady), loaded(compared, group=True, on_failure="dead"), attempts=1)
    results = await scoring.score_group(group("good", "poison"))
    assert all(isinstance(result, ScoringFailed) and result.fail_group for result in results)


async def test_a_group_of_which_no_sample_goes_on_is_not_compared():
    scoring = scorer(loaded(is_formatted, gate=1), loaded(compared, group=True))
    results = await scoring.score_group(group("bad", "bad"))
    assert [result.value for result in results] == [0.0, 0.0]
    assert scoring.calls[1].figures.ok == 0


async def test_a_single_sample_is_a_group_of_one_for_what_compares():
    scoring = scorer(loaded(compared, group=True))
    assert scoring.group_scored
    assert (await scoring.score(seen())).value == 1.0


# --- outside of a run -------------------------------------------------------------------------------------------------


LONG = LeaseConfig(max_hold=900)


class Played:
    """A scorer that does what the sample says."""

    def __init__(self):
        self.asked = []
        self.began, self.other = asyncio.Event(), asyncio.Event()

    async def score_group(self, samples, until):
        (sample,) = samples
        self.asked.append(sample.text)
        self.began.set()
        if sample.text == "works":
            self.other.set()
            return [1.0]
        if sample.text == "starves" and self.other.is_set():
            return [2.0]
        if sample.text == "starves":
            await self.other.wait()
        raise RewardUnavailable("all asleep", "wake them")


async def test_a_sample_that_finds_no_slot_while_others_are_scored_is_taken_again():
    played = Played()
    patient = PatientScorer(played, LONG)
    starving = asyncio.create_task(patient.score_group([seen("starves")]))
    await played.began.wait()
    assert await patient.score_group([seen("works")]) == [1.0]
    assert await starving == [2.0]
    assert played.asked == ["starves", "works", "starves"]


async def test_when_nothing_is_scored_all_the_time_it_is_given_up():
    patient = PatientScorer(Played(), LONG)
    with pytest.raises(Unreachable, match=r"nothing could be scored for \d+ s: all asleep") as caught:
        await patient.score_group([seen("away")])
    assert (type(caught.value), caught.value.hint) == (Unreachable, "wake them")


async def test_scoring_that_does_not_end_when_it_is_given_up_holds_up_nothing(monkeypatch, caplog):
    monkeypatch.setattr(scoring_module, "_END_SECONDS", 0.01)
    release = asyncio.Event()

    class Stubborn(Played):
        calls = ()

        async def score_group(self, samples, until):
            self.began.set()
            while not release.is_set():
                with contextlib.suppress(asyncio.CancelledError):
                    await release.wait()
            return [1.0]

    played = Stubborn()
    scoring = asyncio.create_task(PatientScorer(played, LONG).score_group([seen()]))
    await played.began.wait()
    scoring.cancel()
    try:
        done, _ = await asyncio.wait({scoring}, timeout=20)
        assert done
        assert scoring.cancelled()
        assert "does not end" in caplog.text
    finally:
        release.set()


async def test_people_are_told_who_is_waited_for(monkeypatch):
    monkeypatch.setattr(scoring_module, "TELL_SECONDS", 0.001)
    kinds, said = [RewardUnavailable, RewardBusy], asyncio.Queue()

    async def judge(sample):
        raise kinds[0]("all asleep")

    async def quick(sample):
        return 1.0

    for kind, line in (
        (RewardBusy, "waiting for judge: its servers are busy"),
        (RewardUnavailable, "waiting for judge, "),
    ):
        kinds[0] = kind
        patient = PatientScorer(scorer(loaded(judge), loaded(quick), attempts=1), LONG)
        async with asyncio.timeout(60):
            scoring = asyncio.create_task(patient.score_group([seen()]))
            telling = asyncio.create_task(patient.tell(said.put_nowait))
            assert (await said.get()).startswith(line)
        for task in (scoring, telling):
            task.cancel()
        await asyncio.gather(scoring, telling, return_exceptions=True)
        assert all("judge" in said.get_nowait() for _ in range(said.qsize()))
