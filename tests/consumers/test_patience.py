"""Scoring outside of a run: who cannot be had now is waited for, as in a run, as long as anything is scored."""

from __future__ import annotations

import asyncio
import contextlib

import pytest

from streamrl.config import LeaseConfig
from streamrl.consumers import scoring as scoring_module
from streamrl.consumers.calls import ScoringFailed
from streamrl.consumers.scoring import PatientScorer
from streamrl.errors import RewardBusy, RewardUnavailable, Unreachable
from tests.consumers.calls_kit import loaded, scorer
from tests.consumers.samples import seen

LONG = LeaseConfig(max_hold=900)


@pytest.mark.parametrize("kind", [RewardUnavailable, RewardBusy])
async def test_that_nobody_can_score_now_is_no_failed_attempt(kind):
    said = [kind("all asleep")] * 3

    async def judge(sample):
        if said:
            raise said.pop()
        return 1.0

    (score,) = await PatientScorer(scorer(loaded(judge), attempts=1), LONG).score_group([seen()])
    assert score.value == 1.0


async def test_a_failure_is_one_as_in_a_run():
    async def judge(sample):
        raise ValueError("no")

    (failure,) = await PatientScorer(scorer(loaded(judge), attempts=1), LONG).score_group([seen()])
    assert isinstance(failure, ScoringFailed)


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


async def test_one_that_finds_no_place_while_others_are_scored_is_taken_again():
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
