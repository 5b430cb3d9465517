"""Rollouts without a learner and a learner without rollouts, as real processes that are killed on the way."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import signal

import pytest
from leader_kit import Run
from playing import response, reward

from streamrl import wire
from streamrl.archive.reader import FOLDER, read_groups
from streamrl.config import RecordingConfig
from streamrl.queues.ledgers import open_ledgers
from streamrl.runfile import LoadedConfig, save
from tests.redis_kit import RedisRun

GROUPS = 40
"""More than the hard cap, so that a recording of them needs two checkpoints at least."""


@contextlib.contextmanager
def opened(redis, model, *, epochs=1, recording, **learner):
    run = Run(redis, model)
    run.configure(epochs=epochs, **learner)
    run.config = run.config.model_copy(update={"recording": RecordingConfig(**recording)})
    save(LoadedConfig(config=run.config, origins={}), run.run_dir / "run.json")
    yield run
    run.kill()


@pytest.fixture
def recording_run(redis_run, model):
    with opened(redis_run, model, steps=None, recording={"mode": "write", "file_bytes": 1500}) as run:
        yield run


@pytest.fixture(scope="module")
def recorded(tmp_path_factory, model):
    """A recording of ten groups by a recorder that nobody killed, and one that is no message at its end."""
    redis = RedisRun(tmp_path_factory.mktemp("recorded") / "run")
    redis.start()

    async def play(run):
        async with run.play(end=11, spoil={(10, 1): b"rubbish"}):
            assert await run.learn(name="recorder.0") == 0, run.log("recorder.0")
        return await run.audit()

    with opened(redis, model, steps=None, recording={"mode": "write"}) as run:
        found = asyncio.run(play(run))
        assert (found.trained, found.dead) == (10, 1)
        yield run.run_dir / FOLDER
    redis.kill()


KILLS = {
    "before the block": "streamrl.archive.writer:RecordingWriter.sync:before:2",
    "after the block": "streamrl.archive.writer:RecordingWriter.sync:after:2",
    "before the rename": "streamrl.learner.checkpoint:Checkpoints.finish:before:2",
    "after the rename": "streamrl.learner.checkpoint:Checkpoints.finish:after:2",
    "before retire": "streamrl.queues.ledger:Ledger.retire:before:1",
    "after retire": "streamrl.queues.ledger:Ledger.retire:after:2",
    "before the end is written": "streamrl.learner.recorder:write_finished:before:1",
}
QUICK = ("after the block", "before retire")


@pytest.mark.parametrize("point", [*QUICK, *(pytest.param(p, marks=pytest.mark.slow) for p in KILLS if p not in QUICK)])
async def test_a_killed_recorder_records_every_group_once(recording_run, point):
    run = recording_run
    async with run.play(end=GROUPS):
        assert await run.learn(KILLS[point], name="recorder.0") == -signal.SIGKILL, run.log("recorder.0")
        await run.audit()
        assert await run.learn(name="recorder.0") == 0, run.log("recorder.0")
        found = await run.audit()
    assert (found.trained, found.dead, found.dropped) == (GROUPS, 0, 0)
    assert run.finished()["reason"] == "data"
    groups = {group.group_id: group for group in read_groups(run.run_dir)}
    assert sorted(groups) == list(range(GROUPS))
    for group_id, group in groups.items():
        samples = [wire.decode(payload, wire.Sample) for payload, _ in group.samples]
        assert [sample.tokens for sample in samples] == [response(group_id, k, 0).tokens for k in range(3)]
        assert [wire.decode(score, wire.SampleScore).value for _, score in group.samples] == [
            reward(group_id, k) for k in range(3)
        ]
    assert await run.learn(name="recorder.0") == 0  # again: it is over
    assert await run.learn(name="learner.0") in {0, 78}, run.log()


async def test_a_recording_ends_after_the_groups_of_its_steps(redis_run, model):
    with opened(redis_run, model, steps=3, recording={"mode": "write"}) as run:
        async with run.play():
            assert await run.learn(name="recorder.0") == 0, run.log("recorder.0")
        assert run.finished()["reason"] == "steps"
        assert len(list(read_groups(run.run_dir))) == 12
        # What was recorded here is no training, and a learner does not go on from it.
        (run.run_dir / "finished.json").unlink()
        assert await run.learn() == 78
        assert "of a recording" in run.log()


@pytest.mark.parametrize("fault", [None, "learner", pytest.param("player", marks=pytest.mark.slow)])
async def test_a_recording_is_trained(redis_run, model, recorded, fault):
    read = {"mode": "read", "path": recorded}
    with opened(redis_run, model, epochs=2, steps=None, recording=read) as run:
        kills = {
            "player": "streamrl.queues.ledger:Ledger.admit_closed:after:9",
            "learner": "streamrl.learner.rank_group:RankWorker.apply:after:4",
        }
        player = run.start(kills["player"] if fault == "player" else None, name="player.0")
        learner = run.start(kills["learner"] if fault == "learner" else None)
        if fault == "player":
            assert await run.wait(player) == -signal.SIGKILL
            player = run.start(name="player.0")
        if fault == "learner":
            assert await run.wait(learner) == -signal.SIGKILL
            learner = run.start()
        assert await run.wait(learner) == 0, run.log()
        os.kill(player, signal.SIGTERM)
        assert await run.wait(player) == 0, run.log("player.0")
        found = await run.audit()
        assert (found.admitted, found.trained, found.live) == (20, 20, 0)
        assert run.newest().step == 5
        for line in run.steps():
            assert set(line["staleness"]) == {str(line["step"] - 1)}  # sampled before the first step
        async with open_ledgers(run.config, run.run_dir) as ledgers:
            assert (await ledgers.train.state()).epochs == 2


async def test_another_temperature_is_refused(redis_run, model, recorded):
    with opened(redis_run, model, recording={"mode": "read", "path": recorded}) as run:
        sampling = run.config.sampling.model_copy(update={"temperature": 0.7})
        config = run.config.model_copy(update={"sampling": sampling})
        save(LoadedConfig(config=config, origins={}), run.run_dir / "run.json")
        assert await run.learn(name="player.0") == 78
        assert "sampled at temperature 1" in run.log("player.0")


async def test_a_recorder_goes_on_at_its_temperature_alone(redis_run, model, recorded):
    with opened(redis_run, model, steps=None, recording={"mode": "write"}) as run:
        shutil.copytree(recorded, run.run_dir / FOLDER)
        sampling = run.config.sampling.model_copy(update={"temperature": 0.7})
        config = run.config.model_copy(update={"sampling": sampling})
        save(LoadedConfig(config=config, origins={}), run.run_dir / "run.json")
        assert await run.learn(name="recorder.0") == 78
        assert "sampled at temperature 1" in run.log("recorder.0")


async def test_a_run_of_other_data_is_refused(redis_run, model, recorded):
    with opened(redis_run, model, recording={"mode": "read", "path": recorded}) as run:
        async with run.play(end=1):
            await run.until(lambda: run.players[0].cursor == 1)
        assert await run.learn(name="player.0") == 78
        assert "other data" in run.log("player.0")
