"""The learner as real processes: steps, kills at every point of a step and of a checkpoint, fencing, full disks, ranks.

`Player` closes groups as feeder, rollout replicas and reward workers would; the learners are forks.
"""

from __future__ import annotations

import asyncio
import os
import resource
import shutil
import signal

import orjson
import pytest
from leader_kit import DEADLINE, stopped

from streamrl.learner.checkpoint import Checkpoints, shard_name
from streamrl.learner.checkpoint_files import open_shards
from streamrl.learner.lineage import ids_of
from streamrl.queues.ledgers import open_ledgers
from streamrl.weight_sync.manifest import decode
from tests.forked import FENCED


async def test_a_run_of_six_steps_and_what_it_leaves_behind(run):
    async with run.play():
        assert await run.learn() == 0, run.log()
        steps = run.steps()
        assert [line["step"] for line in steps] == [1, 2, 3, 4, 5, 6]
        assert [line["version"] for line in steps] == [2, 3, 4, 5, 6, 7]  # version 1 is the model as it was loaded
        assert all(line["groups"] == 4 and line["grad_norm"] > 0 and not line["skipped"] for line in steps)
        assert all(line["zero_advantage_groups"] >= 1 for line in steps)
        assert all(sum(line["staleness"].values()) == line["tokens"] for line in steps)
        assert all(line["busy"] and 0 <= line["idle_seconds"] <= line["step_seconds"] for line in steps)
        assert max(line["staleness_max"] for line in steps) <= run.config.token_staleness_limit
        found = await run.audit()
        assert (found.trained, found.checkpoint) == (24, "1-6")
        assert run.finished() == {"reason": "steps", "step": 6, "version": 7, "epoch": 1, "accuracy": None, "epochs": 1}
        assert await run.learn() == 0  # again: it is over
        assert len(run.steps()) == 6
    checkpoints = Checkpoints(run.run_dir / "checkpoints")
    assert checkpoints.positions() == [(1, 4), (1, 6)]
    meta = run.newest()
    assert meta.count == 24
    assert sorted(group_id for line in steps for group_id, _ in line["trained"]) == ids_of(meta.trained)
    assert all(max(age for _, age in line["trained"]) == line["staleness_max"] for line in steps)
    limit = 6 - run.config.token_staleness_limit
    assert meta.versions == {step + 1: step for step in range(7) if step >= limit}
    from safetensors.torch import load_file
    from transformers import AutoModelForCausalLM

    exported = AutoModelForCausalLM.from_pretrained(run.run_dir / "model")
    with open_shards(checkpoints.path(meta.position), 1) as shards:
        weights = shards.rows(0, 1)
    async with open_ledgers(run.config, run.run_dir) as ledgers:
        version, manifest = await ledgers.weights.newest()
        state = await ledgers.train.state()
    published = decode(manifest)
    assert (version, published.epoch, published.step, state.version) == (7, 1, 6, 7)
    folder = next(run.run_dir.rglob(published.folder))
    tensors = load_file(folder / published.shards[0].file)
    for name, tensor in tensors.items():
        assert (weights[f"actor/weight/{name}"] == tensor).all()
        assert (exported.state_dict()[name] == tensor).all()


async def test_end_of_data_trains_a_short_batch(run):
    run.configure(steps=None)
    async with run.play(end=10):
        assert await run.learn() == 0, run.log()
    assert [line["groups"] for line in run.steps()] == [4, 4, 2]
    assert run.finished()["reason"] == "data"
    found = await run.audit()
    assert (found.admitted, found.trained, found.live) == (10, 10, 0)


def end_at_accuracy(run) -> None:
    """Have the run end when held-out accuracy reaches 0.9."""
    run.configure(steps=None)
    config = run.config
    evaluation = config.evaluation.model_copy(update={"every": 1})
    learner = config.learner.model_copy(update={"stop_at_accuracy": 0.9})
    run.config = config.model_copy(update={"evaluation": evaluation, "learner": learner})
    saved = orjson.loads((run.run_dir / "run.json").read_bytes())
    saved["config"]["learner"]["stop_at_accuracy"] = 0.9
    saved["config"]["evaluation"]["every"] = 1
    saved["config"]["data"]["held_out"] = "held_out.jsonl"
    (run.run_dir / "run.json").write_bytes(orjson.dumps(saved))


async def test_a_run_that_ends_before_its_first_step_exports_no_model(run):
    end_at_accuracy(run)
    async with run.play():
        async with open_ledgers(run.config, run.run_dir) as ledgers:
            await ledgers.roles.beat("feeder.0", {"accuracy": 0.91, "accuracy_version": 1}, 60)
        assert await run.learn() == 0, run.log()
        await run.audit()
    assert (run.finished()["reason"], run.finished()["step"]) == ("accuracy", 0)
    assert "no model exported" in run.log()
    assert not (run.run_dir / "model").exists()


async def test_accuracy_ends_a_run_also_when_its_model_directory_is_gone_by_then(run, tmp_path):
    """The last checkpoint is whole: `streamrl export` writes the model later."""
    end_at_accuracy(run)
    saved = orjson.loads((run.run_dir / "run.json").read_bytes())
    model = tmp_path / "on_scratch_space"
    shutil.copytree(saved["config"]["model"]["path"], model)
    saved["config"]["model"]["path"] = str(model)
    (run.run_dir / "run.json").write_bytes(orjson.dumps(saved))
    async with run.play():
        pid = run.start()
        await run.until(lambda: len(run.steps()) >= 2)
        shutil.rmtree(model)
        async with open_ledgers(run.config, run.run_dir) as ledgers:
            await ledgers.roles.beat("feeder.0", {"accuracy": 0.91, "accuracy_version": 2}, 60)
        assert await run.wait(pid) == 0, run.log()
    assert (run.finished()["reason"], run.finished()["accuracy"]) == ("accuracy", 0.91)
    assert "no model exported" in run.log()
    await run.audit()


async def test_sigterm_leaves_everything_durable(run):
    run.configure(steps=None, checkpoint_every=1000)
    async with run.play():
        pid = run.start()
        await run.until(lambda: len(run.steps()) >= 3)
        os.kill(pid, signal.SIGTERM)
        assert await run.wait(pid) == 0, run.log()
        done = run.steps()[-1]["step"]
        assert run.newest().step == done
        assert run.newest().count == 4 * done
        assert not (run.run_dir / "finished.json").exists()
        found = await run.audit()
        assert found.trained == 4 * done
        async with open_ledgers(run.config, run.run_dir) as ledgers:
            assert (await ledgers.train.state()).unretired == 0
            closed = [await ledgers.train.read_group(group_id) for group_id in await ledgers.train.closed()]
            assert all(group.crashes == 0 for group in closed)


KILLS = {
    "before a micro-batch": "streamrl.learner.rank_group:RankWorker.train:before:4",
    "first publish": "streamrl.weight_sync.publisher:Publisher.publish:after:1",
    "version noted, not published": "streamrl.learner.publishing:use_version:after:3",
}
"""Where test_phases.py does not kill: it proves more of its own phases."""


@pytest.mark.parametrize("point", KILLS)
async def test_killed_learner_loses_nothing(run, point):
    async with run.play():
        assert await run.learn(KILLS[point]) == -signal.SIGKILL, run.log()
        before = await run.audit()
        assert await run.learn() == 0, run.log()
    after = await run.audit()
    assert run.newest().step == 6 == run.finished()["step"]
    assert after.trained == 24
    assert after.trained >= before.trained
    versions = [line["version"] for line in run.steps()]
    assert versions == sorted(set(versions))  # only grow, none twice
    assert after.dead == 0


@pytest.mark.slow
async def test_killed_five_times_in_a_row(run):
    async with run.play():
        for step in range(5):
            point = ("policy:Actor.apply_update:after:2", "checkpoint:Checkpoints.remove_older:before:1")[step % 2]
            assert await run.learn(f"streamrl.learner.{point}") == -signal.SIGKILL, run.log()
            await run.audit()
        assert await run.learn() == 0, run.log()
    assert (await run.audit()).trained == 24


async def test_redis_goes_back_while_the_learner_is_away(run):
    """The whole append-only file of an earlier moment comes back: retired groups are live again."""
    run.configure(steps=None)
    async with run.play(end=24):
        assert await run.learn("streamrl.queues.ledger:Ledger.retire:before:2") == -signal.SIGKILL, run.log()
    run.redis_run.kill()
    redis = run.run_dir / "redis"
    shutil.copytree(redis, run.run_dir / "earlier")
    run.redis_run.start()
    async with run.play(end=24):
        assert await run.learn("streamrl.learner.leader:write_finished:before:1") == -signal.SIGKILL, run.log()
    run.redis_run.kill()
    shutil.rmtree(redis)
    (run.run_dir / "earlier").rename(redis)
    run.redis_run.start()
    async with run.play(end=24):
        assert await run.learn() == 0, run.log()
    found = await run.audit()
    assert (found.admitted, found.trained) == (24, 24)


async def test_redis_forgets_a_living_learner(run):
    """Redis comes back from before the take-over: the learner says so and is started again, nobody else is there."""
    run.configure(steps=None)
    async with run.play():
        await run.until(lambda: run.players[0].cursor >= 8)
    run.redis_run.kill()
    redis = run.run_dir / "redis"
    shutil.copytree(redis, run.run_dir / "earlier")
    run.redis_run.start()
    async with run.play():
        pid = run.start()
        await run.until(lambda: len(run.steps()) >= 5)
        run.redis_run.kill()
        shutil.rmtree(redis)
        (run.run_dir / "earlier").rename(redis)
        run.redis_run.start()
        assert await run.wait(pid) == 75, run.log()
        steps = run.newest().step + 3
        run.configure(steps=steps)
        assert await run.learn() == 0, run.log()
    assert (await run.audit()).trained == 4 * steps


async def test_a_waiting_learner_brings_back_a_version_that_redis_or_the_disk_lost(run):
    """Without it engines that start now would wait for weights, and the learner for their groups, for ever."""
    run.configure(steps=None)
    async with run.play():
        run.start()
        await run.until(lambda: len(run.steps()) >= 2)
    weights = run.run_dir / "weights"
    async with open_ledgers(run.config, run.run_dir) as ledgers:

        async def shown(condition) -> int:
            async with asyncio.timeout(DEADLINE):
                while True:
                    found = await ledgers.weights.newest()
                    if found is not None and condition(found[0]) and (weights / decode(found[1]).folder).exists():
                        return found[0]
                    await asyncio.sleep(0.05)

        async with asyncio.timeout(DEADLINE):  # until nothing is left to train
            while True:
                state = await ledgers.train.state()
                if len(await ledgers.train.closed()) - state.unretired < 4 and state.version == len(run.steps()) + 1:
                    break
                await asyncio.sleep(0.05)
        before = await shown(lambda version: version >= 3)
        # What a roll-back of some seconds takes from these two keys.
        keys = ledgers.train.keys
        await ledgers.connection.read("XTRIM", keys.weights, "MAXLEN", 0)
        await ledgers.connection.read("HSET", keys.state, "version", 1)
        assert await shown(lambda version: version >= before) == before
        shutil.rmtree(weights)
        assert await shown(lambda version: version > before) == before + 1


@pytest.mark.parametrize("place", ["begin", "finish"])
async def test_a_paused_learner_that_wakes_up_is_fenced(run, place):
    """It wakes up in the middle of a save, finishes it when it can, and writes nothing else; its file is void."""
    run.configure(steps=None)
    async with run.play():
        old = run.start(f"streamrl.learner.checkpoint:Checkpoints.{place}:pause:2")
        await run.until(lambda: stopped(old))
        run.configure(steps=None, checkpoint_every=1000)
        new = run.start()
        await run.until(lambda: any(line["epoch"] == 2 and line["step"] == 3 for line in run.steps()))
        os.kill(old, signal.SIGCONT)
        assert await run.wait(old) == FENCED, run.log()
        checkpoints = Checkpoints(run.run_dir / "checkpoints")
        # Its draft was removed by the new one. One that it began after waking up may be finished, unless the version
        # in flight told it first that it is fenced: then it carries the greatest number.
        assert checkpoints.positions() in ([(1, 2)], [(1, 2), (1, 4)])
        assert checkpoints.greatest("1-2", 2).position == (1, 2)
        os.kill(new, signal.SIGKILL)
        assert await run.wait(new) == -signal.SIGKILL
        await run.audit()
        run.configure(steps=20)
        assert await run.learn() == 0, run.log()
    assert (await run.audit()).trained == 80
    assert run.newest().bases == [(1, 2)]


async def test_redis_is_killed_and_restarted_under_a_learner(run):
    run.configure(steps=None, checkpoint_every=3)
    async with run.play():
        pid = run.start()
        for _ in range(3):
            seen = len(run.steps())
            await run.until(lambda seen=seen: len(run.steps()) > seen + 2)
            await asyncio.to_thread(run.redis_run.restart)
        seen = len(run.steps())
        await run.until(lambda: len(run.steps()) > seen + 2)
        os.kill(pid, signal.SIGTERM)
        assert await run.wait(pid) in {0, 75}, run.log()  # 75: Redis forgot the fence of a second ago
    await run.audit()
    run.configure(steps=run.newest().step + 3)
    async with run.play():
        assert await run.learn() == 0, run.log()
    await run.audit()


async def test_two_learners_at_once_the_later_one_stays(run):
    run.configure(steps=None)
    async with run.play():
        first = run.start()
        await run.until(lambda: len(run.steps()) >= 1)
        second = run.start()
        assert await run.wait(first) == FENCED, run.log()
        seen = len(run.steps())
        await run.until(lambda: len(run.steps()) > seen + 2)
        os.kill(second, signal.SIGTERM)
        assert await run.wait(second) == 0, run.log()
    await run.audit()


async def test_an_older_or_a_damaged_checkpoint_is_refused(run):
    async with run.play():
        assert await run.learn() == 0, run.log()
    run.configure(steps=8)
    newest = Checkpoints(run.run_dir / "checkpoints").path(run.newest().position)
    newest.rename(run.run_dir / "elsewhere")
    assert await run.learn() == 78
    assert "ckpt-1-6" in run.log()
    (run.run_dir / "elsewhere").rename(newest)
    shard = newest / shard_name(0, 1)
    whole = shard.read_bytes()
    shard.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    assert await run.learn() == 78
    shard.write_bytes(whole)
    async with run.play():
        assert await run.learn() == 0, run.log()
    assert (await run.audit()).trained == 32


async def test_a_full_disk_stops_checkpoints_not_training(run):
    """There is room for weights, logs and figures, and none for a shard with the optimizer, until there is more."""
    run.configure(steps=None, checkpoint_every=2)
    room = 24 << 10
    async with run.play():
        pid = run.start(file_limit=room)
        hard_cap = run.config.hard_cap
        await run.until(lambda: "checkpoint failed" in run.log() and len(run.steps()) >= 3)
        async with open_ledgers(run.config, run.run_dir) as ledgers:
            await run.until(lambda: len(run.steps()) >= 4)
            state = await ledgers.train.state()
            assert state.live <= hard_cap
            assert state.retired == 0
            assert state.checkpoint is None
        assert run.newest() is None
        resource.prlimit(pid, resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
        await run.until(lambda: run.newest() is not None and len(run.steps()) >= 8)
        os.kill(pid, signal.SIGTERM)
        assert await run.wait(pid) == 0, run.log()
    found = await run.audit()
    assert found.trained == 4 * run.steps()[-1]["step"]
    assert run.newest().shards[0].bytes > room


async def test_a_training_that_diverges_ends_with_its_reason(run):
    """Steps whose gradient is not finite are dropped and accounted for; not for ever."""
    run.configure(steps=None, lr=1e30)
    async with run.play():
        assert await run.learn() == 78
    assert "8 steps in a row were not finite" in run.log()
    assert "learner.lr" in run.log()
    found = await run.audit()
    assert found.dropped == 8 * 4


async def test_two_ranks_train_and_resume(run, tmp_path):
    run.configure(ranks=2, steps=4)
    async with run.play():
        for attempt, kill in enumerate(["streamrl.learner.rank_group:RankWorker.apply:before:3", None]):
            environ = {"WORLD_SIZE": "2", "STREAMRL_RENDEZVOUS": f"file://{tmp_path}/meet-{attempt}"}
            pids = [
                run.start(kill, name=f"learner.{rank}", environ={**environ, "RANK": str(rank)}) for rank in range(2)
            ]
            codes = [await run.wait(pid) for pid in pids]
            expected = [-signal.SIGKILL] * 2 if kill else [0, 0]
            assert codes == expected, run.log() + run.log("learner.1")
    found = await run.audit()
    assert found.trained == 16
    meta = run.newest()
    assert meta.world == 2
    assert len(meta.shards) == 2
    run.configure(steps=6)
    async with run.play():
        assert await run.learn() == 0, run.log()  # one rank goes on with what two have written
    assert (run.newest().world, (await run.audit()).trained) == (1, 24)
