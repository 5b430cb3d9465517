"""Going on after an end that was none: a Redis from the past with an old learner, data that was used up, full disks."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal

import pytest
from leader_kit import stopped

from streamrl.queues.records import ReplayOutcome
from tests.forked import FENCED
from tests.queues.ledger_kit import replay


@pytest.mark.parametrize("place", ["rank_group:RankWorker.apply:pause:4", "checkpoint:Checkpoints.finish:pause:2"])
async def test_redis_forgets_the_take_over_from_a_learner_that_wakes_up(run, place):
    """Its nonce is right again. What it retired would be in no checkpoint of the line that its successor saved."""
    run.configure(steps=None)
    async with run.play():
        old = run.start(f"streamrl.learner.{place}")
        await run.until(lambda: stopped(old))
        first = set() if run.newest() is None else {1}  # it may have stopped before its checkpoint was there
        run.redis_run.kill()
        redis = run.run_dir / "redis"
        shutil.copytree(redis, run.run_dir / "earlier")
        run.redis_run.start()
        new = run.start()
        await run.until(lambda: (newest := run.newest()) is not None and newest.epoch == 2)
        os.kill(new, signal.SIGKILL)
        await run.wait(new)
        run.redis_run.kill()
        shutil.rmtree(redis)
        (run.run_dir / "earlier").rename(redis)
        await asyncio.to_thread(run.redis_run.start)
        os.kill(old, signal.SIGCONT)
        assert await run.wait(old) == FENCED, run.log()
        steps = run.newest().step + 4
        run.configure(steps=steps)
        assert await run.learn() == 0, run.log()
    assert (await run.audit()).trained == 4 * steps
    assert {epoch for epoch, _ in [*run.newest().bases, run.newest().position]} == {*first, 2, 3}


async def test_after_the_end_of_the_data_another_epoch_is_trained(run):
    run.configure(steps=None, epochs=1)
    async with run.play(end=10):
        assert await run.learn() == 0, run.log()
        assert run.finished()["reason"] == "data"
        assert await run.learn() == 0, run.log()  # nothing has changed: it is over
        assert "over already" in run.log()
    run.configure(steps=None, epochs=2)
    more = run.start()  # the learner may well be there before the feeder has gone on
    async with run.play(end=20):
        assert await run.wait(more) == 0, run.log()
    found = await run.audit()
    assert (found.admitted, found.trained, run.finished()["epochs"]) == (20, 20, 2)


async def test_after_the_end_of_the_data_a_replayed_group_is_trained(run):
    run.configure(steps=None)
    async with run.play(end=10, spoil={(3, 1): b"rubbish"}) as player:
        assert await run.learn() == 0, run.log()
        assert ((await run.audit()).trained, (await run.audit()).dead) == (9, 1)
        player.spoil = {}
        bounds = {"budget": run.config.budget, "hard_cap": run.config.hard_cap}
        assert await replay(player.ledger, 3, **bounds) is ReplayOutcome.REPLAYED
        assert await run.learn() == 0, run.log()
    found = await run.audit()
    assert (found.admitted, found.trained, found.dead) == (10, 10, 0)
