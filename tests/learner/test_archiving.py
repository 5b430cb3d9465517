"""The archive of a learner that is killed: every group that left Redis is in it, with the scores of its training."""

from __future__ import annotations

import contextlib
import os
import signal

import pytest
from leader_kit import Run
from playing import reward

from streamrl.archive.reader import ARCHIVE, read_archive
from streamrl.config import ArchiveConfig, RecordingConfig
from streamrl.learner.lineage import ids_of
from streamrl.queues.ledgers import open_ledgers
from streamrl.runfile import LoadedConfig, save
from tests.archive_kit import archived, closed
from tests.redis_kit import RedisRun

pytestmark = [pytest.mark.slow, pytest.mark.timeout(240)]


@contextlib.contextmanager
def archiving(redis, model, **learner):
    run = Run(redis, model)
    run.configure(**learner)
    keep(run)
    yield run
    run.kill()


def keep(run, **changes) -> None:
    archive = ArchiveConfig(file_bytes=2000)
    run.config = run.config.model_copy(update={"archive": archive, **changes})
    save(LoadedConfig(config=run.config, origins={}), run.run_dir / "run.json")


async def gone(run) -> set[int]:
    """Ids of all groups that were trained or dropped."""
    async with open_ledgers(run.config, run.run_dir) as ledgers:
        dropped = await ledgers.train.dropped()
    newest = run.newest()
    return {*dropped, *(ids_of(newest.trained) if newest is not None else ())}


async def check(run) -> set[int]:
    """Everything that has left Redis is in the archive, whole and once; returns what is there."""
    reading = read_archive(run.run_dir)
    groups = list(reading)
    ids = [group.group_id for group in groups]
    assert reading.problems == []
    assert len(ids) == len(set(ids))
    assert set(ids) >= await gone(run)
    for group in groups:
        assert [sample.score.value for sample in group.samples] == [reward(group.group_id, k) for k in range(3)]
    return set(ids)


KILLS = {
    "groups read, nothing trained": "streamrl.learner.rank_group:RankWorker.train:before:2",
    "archived, no checkpoint": "streamrl.archive.writer:Archive.sync:after:3",
    "not archived, checkpoint begun": "streamrl.learner.checkpoint_files:RankState.save:after:1",
    "before retire": "streamrl.queues.ledger:Ledger.retire:before:2",
    "after retire": "streamrl.queues.ledger:Ledger.retire:after:2",
}


@pytest.mark.parametrize("point", KILLS)
async def test_a_killed_learner_archives_all_it_retires(redis_run, model, point):
    with archiving(redis_run, model) as run:
        async with run.play():
            assert await run.learn(KILLS[point]) == -signal.SIGKILL, run.log()
            if (run.run_dir / ARCHIVE).exists():
                await check(run)
            assert await run.learn() == 0, run.log()
            found = await run.audit()
        assert found.trained == 24
        assert len(await check(run)) >= 24
        assert run.steps()[-1]["archive_lost"] == 0


@pytest.mark.parametrize("when", ["before", "after"])
async def test_dropped_groups_are_archived_before_they_go(redis_run, model, when):
    with archiving(redis_run, model, advantage={"zero_variance": "drop"}, checkpoint_every=1000) as run:
        async with run.play():
            kill = f"streamrl.queues.ledger:Ledger.drop:{when}:2"
            assert await run.learn(kill) == -signal.SIGKILL, run.log()
            assert await check(run) >= await gone(run) != set()
            assert await run.learn() == 0, run.log()
        await check(run)


async def test_a_learner_without_room_for_the_archive_trains(redis_run, model):
    with archiving(redis_run, model) as run:
        (run.run_dir / ARCHIVE).write_text("in the way")
        async with run.play():
            assert await run.learn() == 0, run.log()
        assert (await run.audit()).trained == 24
        assert run.log().count("the archive cannot be written") == 1
        last = run.steps()[-1]
        assert last["archived"] == 0
        assert last["archive_lost"] > 0


async def test_an_archive_is_trained_like_a_recording(redis_run, model, tmp_path):
    """`up --train-only RUN_DIR/archive`; what is trained again is archived again."""
    first = RedisRun(tmp_path / "first")
    first.start()
    with archiving(first, model, steps=None) as run:
        async with run.play(end=8):
            assert await run.learn() == 0, run.log()
        kept = run.run_dir / ARCHIVE
    first.kill()
    with archiving(redis_run, model, steps=None) as run:
        keep(run, recording=RecordingConfig(mode="read", path=kept))
        player = run.start(name="player.0")
        assert await run.learn() == 0, run.log()
        os.kill(player, signal.SIGTERM)
        assert await run.wait(player) == 0, run.log("player.0")
        assert (await run.audit()).trained == 8
        assert await check(run) == set(range(8))


async def test_an_archive_without_log_probabilities_is_not_trained(redis_run, model, tmp_path):
    with archiving(redis_run, model) as run:
        without = run.config.model_copy(update={"archive": ArchiveConfig(logprobs=False)})
        await archived(tmp_path, without, closed(0))
        keep(run, recording=RecordingConfig(mode="read", path=tmp_path / ARCHIVE))
        assert await run.learn(name="player.0") == 78
        assert "without log-probabilities" in run.log("player.0")
