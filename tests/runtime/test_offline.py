"""Measuring versions when the run is over: the rewards are asked as in the run."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from types import SimpleNamespace

import pytest

from streamrl import wire
from streamrl.config import LeaseConfig, RunConfig
from streamrl.consumers import scoring as scoring_module
from streamrl.consumers.scoring import PatientScorer
from streamrl.errors import DataError, DeadlineExceeded, RewardBusy, RewardUnavailable
from streamrl.producers.episodes.sampler import EpisodeFailed
from streamrl.producers.sampler import SingleTurn
from streamrl.runtime import offline
from streamrl.runtime.offline import _scores
from tests.consumers.calls_kit import loaded, scorer
from tests.consumers.samples import prompt, response


class Engine:
    """Has one completion for everything."""

    async def generate(self, request):
        sample = response("4")
        return SimpleNamespace(
            tokens=sample.token_ids,
            logprobs=[-1.0] * len(sample.token_ids),
            runs=sample.runs,
            finish=sample.finish,
            seconds=0.0,
        )


def told(done, total):
    """Nobody looks."""


async def measured(judge, samples=2, kind=SingleTurn, on_progress=told, **worker):
    config = RunConfig.model_validate({"name": "t", "evaluation": {"samples": samples}})
    patient = PatientScorer(scorer(loaded(judge), **worker), LeaseConfig())
    decoder = SimpleNamespace(decode=lambda tokens: "4", vision=None)
    return await _scores(config, kind(config, Engine(), decoder), patient, [prompt()], on_progress=on_progress)


@pytest.mark.parametrize("kind", [RewardUnavailable, RewardBusy])
async def test_a_wait_for_those_who_score_is_no_failed_attempt_and_is_said(kind, monkeypatch, caplog):
    monkeypatch.setattr(scoring_module, "TELL_SECONDS", 0.001)

    async def judge(sample):
        if "waiting for judge" not in caplog.text:
            raise kind("all asleep")
        return 1.0

    with caplog.at_level(logging.WARNING):
        assert await measured(judge, attempts=1) == [[1.0, 1.0]]


async def test_the_accuracy_of_each_source(tmp_path, monkeypatch):
    sources = ("math", "", "code", "math", "sql")
    values = [[1.0, 0.0], [1.0, 1.0], [0.0], [1.0, 1.0], []]
    data = SimpleNamespace(prompts=[wire.encode(prompt(source=source)) for source in sources])

    @contextlib.asynccontextmanager
    async def nothing(*_, **__):
        yield None

    async def scored(*_, **__):
        return values

    class Silent:
        def __init__(self, *_):
            self.start = self.close = lambda: asyncio.sleep(0)

    for name, played in {"load_prompts": lambda *_, **__: data, "HfEngine": Silent, "_scores": scored}.items():
        monkeypatch.setattr(offline, name, played)
    monkeypatch.setattr(offline, "sampler_of", nothing)
    monkeypatch.setattr(offline.Tokenizer, "load", lambda _: None)
    config = RunConfig.model_validate(
        {"data": {"held_out": "x.jsonl"}, "evaluation": {"samples": 2, "final_prompts": 9}}
    )
    found = await offline.measure_accuracy(config, tmp_path, "first version", 0, lambda *_: None)
    assert {name: value for name, value in found.items() if "_at_" not in name} == {
        "accuracy": 5 / 7,
        "accuracy/math": 0.75,
        "accuracy/code": 0.0,
    }


async def test_a_failure_counts_neither_way(caplog):
    ends = [1.0, ValueError("no")]

    async def judge(sample):
        end = ends.pop()
        if isinstance(end, ValueError):
            raise end
        return end

    assert await measured(judge, attempts=1) == [[1.0]]
    assert "held-out response not scored" in caplog.text


async def test_an_episode_that_fails_counts_neither_way(caplog):
    ends = [EpisodeFailed("broke"), DataError("no token"), DeadlineExceeded("too late")]
    done = []

    class Failing(SingleTurn):
        async def sample(self, order):
            if ends:
                raise ends.pop()
            return await super().sample(order)

    async def judge(sample):
        return 1.0

    assert await measured(judge, 4, Failing, lambda *counts: done.append(counts)) == [[1.0]]
    assert done[-1] == (4, 4)
    assert [record.why for record in caplog.records] == ["too late", "no token", "broke"]
