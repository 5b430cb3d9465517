"""Checkpoints that are written while training goes on: what goes on, what waits, and where it ends."""

from __future__ import annotations

import os
import signal

import pytest

from streamrl.queues.ledgers import open_ledgers
from streamrl.runfile import LoadedConfig, save

HELD = "streamrl.learner.checkpoint_files:write_shard:wait:"


def configure(run, **checkpoint):
    config = run.config
    section = config.checkpoint.model_copy(update=checkpoint)
    run.config = config.model_copy(update={"checkpoint": section})
    save(LoadedConfig(config=run.config, origins={}), run.run_dir / "run.json")


async def state(run):
    async with open_ledgers(run.config, run.run_dir) as ledgers:
        return await ledgers.train.state()


async def test_training_goes_on_for_one_interval_and_no_group_too_many_is_held(run, tmp_path):
    async with run.play():
        learner = run.start(HELD + str(tmp_path / "go"))
        await run.until(lambda: len(run.steps()) == 4)
        # Two intervals are trained, the first of them is still being written: nothing is durable, nothing retired.
        assert run.newest() is None
        found = await state(run)
        assert (found.retired, found.checkpoint) == (0, None)
        assert run.config.hard_cap - run.config.budget == 16
        assert found.live <= run.config.hard_cap
        await run.until(lambda: run.players[0].cursor == run.config.hard_cap)  # and nobody admits more than that
        (tmp_path / "go").touch()
        assert await run.wait(learner) == 0, run.log()
    assert run.newest().step == 6
    assert (await run.audit()).trained == 24


async def test_a_learner_that_is_killed_while_it_writes_and_trains_loses_nothing(run, tmp_path):
    async with run.play():
        learner = run.start(HELD + str(tmp_path / "never"))
        await run.until(lambda: len(run.steps()) == 4)
        os.kill(learner, signal.SIGKILL)
        assert await run.wait(learner) == -signal.SIGKILL
        folder = run.run_dir / "checkpoints"
        assert [path.name for path in folder.glob("ckpt-*")] == ["ckpt-1-2"]
        assert (await run.audit()).trained == 0  # nothing of it survives
        assert await run.learn() == 0, run.log()
    assert (await run.audit()).trained == 24
    assert len(list(folder.glob("ckpt-*"))) == len(list(folder.glob("ckpt-*/meta.json"))), "what was half written goes"


async def test_in_the_foreground_the_next_step_waits(run, tmp_path):
    configure(run, background=False)
    async with run.play():
        learner = run.start(HELD + str(tmp_path / "go"))
        await run.until(lambda: list((run.run_dir / "checkpoints").glob("ckpt-1-2")))
        await run.until(lambda: run.players[0].cursor == run.config.hard_cap)
        assert run.config.hard_cap - run.config.budget == 8
        assert len(run.steps()) == 2
        (tmp_path / "go").touch()
        assert await run.wait(learner) == 0, run.log()
    assert (await run.audit()).trained == 24


async def test_a_disk_that_hangs_ends_the_learner(run, tmp_path):
    configure(run, deadline=1.0)
    async with run.play():
        assert await run.learn(HELD + str(tmp_path / "never")) == 75, run.log()
        assert "was not written within checkpoint.deadline (1 s)" in run.log()
        configure(run, deadline=60.0)
        assert await run.learn() == 0, run.log()
    assert (await run.audit()).trained == 24


@pytest.mark.slow
async def test_each_start_with_another_number_of_ranks(run, tmp_path):
    """Also with more ranks than some parameters have rows."""
    async with run.play():
        for steps, ranks in ((2, 1), (4, 3), (6, 2), (8, 4)):
            run.configure(steps=steps, ranks=ranks)
            meeting = {"WORLD_SIZE": str(ranks), "STREAMRL_RENDEZVOUS": f"file://{tmp_path}/meet-{steps}"}
            names = [f"learner.{rank}" for rank in range(ranks)]
            pids = [run.start(name=name, environ={**meeting, "RANK": name[-1]}) for name in names]
            assert [await run.wait(pid) for pid in pids] == [0] * ranks, "".join(map(run.log, names))
            assert (run.newest().world, run.newest().step) == (ranks, steps)
            await run.audit()
    assert (await run.audit()).trained == 32
