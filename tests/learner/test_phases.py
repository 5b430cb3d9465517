"""Kill -9 in every phase of a step and of a checkpoint: what goes on is bit for bit what was never interrupted.

One group is a step, in the order of admission, so that two runs cut a step into the same pieces: float sums depend on
them. The rate follows a schedule and an average of the weights is kept, so that all of the state matters.
"""

from __future__ import annotations

import asyncio
import signal

import pytest
import torch
from leader_kit import Run

from streamrl.learner.checkpoint import Checkpoints
from streamrl.learner.checkpoint_files import open_shards
from tests.redis_kit import RedisRun

STEPS = 8
SETTINGS = {
    "groups_per_step": 1, "order": "strict", "steps": STEPS, "checkpoint_every": 2, "lr": 1e-2, "warmup_steps": 3,
    "schedule": "cosine", "lr_floor": 0.1, "ema": 0.9,
}  # fmt: skip
EVERYTHING = {
    **SETTINGS, "passes": 2, "advantage": {"use": "gae"}, "critic": {"kind": "model", "lr": 1e-2},
    "reference": {"kind": "frozen"},
    "kl": {"where": "loss", "controller": "adaptive", "coefficient": 0.1, "horizon": 50},
}  # fmt: skip
"""Several updates per step, and all parts that keep state: critic and controller of the KL as well."""
FILES = "streamrl.learner.checkpoint_files"
PHASES = {
    "after backward": "streamrl.learner.policy:Actor.accumulate:after:3",
    "before the update": "streamrl.learner.rank_group:RankWorker.apply:before:4",
    "after the update": "streamrl.learner.policy:Actor.apply_update:after:4",
    "after the groups count as trained": "streamrl.learner.train_buffer:TrainBuffer.applied:after:5",
    "after finish_step": "streamrl.queues.ledger:Ledger.finish_step:after:9",
    "after publish": "streamrl.weight_sync.publisher:Publisher.publish:after:4",
    "state copied, nothing written": "streamrl.learner.checkpoint_files:RankState.save:after:2",
    "in the background write, before the file": f"{FILES}:write_shard:before:2",
    "in the background write, file not read back": f"{FILES}:describe:before:2",
    "shard written": f"{FILES}:write_shard:after:2",
    "all ranks have written": "streamrl.learner.checkpoint:Checkpoints.finish:before:2",
    "before its meta data": "streamrl.store:Folder.write:before:3",
    "with its meta data": "streamrl.store:fsync_directory:before:3",
    "its meta data is durable": "streamrl.learner.checkpoint:Checkpoints.finish:after:2",
    "before retire": "streamrl.queues.ledger:Ledger.retire:before:2",
    "after retire": "streamrl.queues.ledger:Ledger.retire:after:2",
    "before the old ones go": "streamrl.learner.checkpoint:Checkpoints.remove_older:before:3",
    "while the last checkpoint is written": f"{FILES}:write_shard:before:4",
    "before the end is written": "streamrl.learner.leader:write_finished:before:1",
}
CRITIC_PHASES = {
    "the actor has learnt, its critic not": "streamrl.learner.policy:Actor.apply_update:after:4",
    "both have learnt": "streamrl.learner.critic:Critic.apply_update:after:4",
    "values are computed": "streamrl.learner.critic:Critic.compute_values:after:3",
}
QUICK = (
    "after backward",
    "after finish_step",
    "in the background write, before the file",
    "with its meta data",
    "before retire",
)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory, model):
    """State, numbers and learning rates of a run that nobody kills, by its settings; each is made once."""
    made = {}

    def get(name, settings):
        if name not in made:
            redis = RedisRun(tmp_path_factory.mktemp(name) / "run")
            redis.start()
            try:
                made[name] = asyncio.run(play(redis, settings))
            finally:
                redis.kill()
        return made[name]

    async def play(redis, settings):
        run = Run(redis, model)
        run.configure(**settings)
        async with run.play():
            assert await run.learn() == 0, run.log()
        return state(run), run.newest().numbers, rates(run)

    return get


@pytest.fixture
def uninterrupted(undisturbed):
    return undisturbed("one", SETTINGS)


@pytest.fixture
def with_everything(undisturbed):
    return undisturbed("everything", EVERYTHING)


@pytest.fixture
def run(run):
    run.configure(**SETTINGS)
    return run


def state(run) -> dict[str, torch.Tensor]:
    """Everything in the newest checkpoint: weights, moments, average, counters."""
    meta = run.newest()
    with open_shards(Checkpoints(run.run_dir / "checkpoints").path(meta.position), meta.world) as shards:
        return shards.rows(0, 1)


def rates(run) -> dict[int, float]:
    """Learning rate by step, of whoever made the step last."""
    return {line["step"]: line["lr"] for line in run.steps()}


def same(ours, theirs) -> bool:
    return ours.keys() == theirs.keys() and all(
        torch.equal(tensor.reshape(-1).view(torch.uint8), theirs[name].reshape(-1).view(torch.uint8))
        for name, tensor in ours.items()
    )


def test_the_state_is_all_of_it(uninterrupted):
    found, _, lr = uninterrupted
    assert {name.split("/")[1] for name in found} >= {"weight", "exp_avg", "exp_avg_sq", "ema", "updates"}
    assert int(found["actor/updates"]) == STEPS
    assert len(set(lr.values())) == STEPS - 1  # up for three steps, down after them: step 3 and 4 are at the top


@pytest.mark.parametrize(
    "phase", [*QUICK, *(pytest.param(p, marks=pytest.mark.slow) for p in PHASES if p not in QUICK)]
)
async def test_killed_in_a_phase_it_goes_on_bit_for_bit(run, uninterrupted, phase):
    await goes_on(run, phase, uninterrupted)


@pytest.mark.slow
@pytest.mark.parametrize(
    "phase", ["before the update", "after finish_step", "shard written", "with its meta data", *CRITIC_PHASES]
)
async def test_so_do_a_critic_and_a_controller(run, with_everything, phase):
    run.configure(**EVERYTHING)
    await goes_on(run, phase, with_everything)
    assert run.newest().parts == ["actor", "critic", "kl"]
    assert run.newest().numbers["kl"]


async def goes_on(run, phase, undisturbed):
    async with run.play():
        assert await run.learn((PHASES | CRITIC_PHASES)[phase]) == -signal.SIGKILL, run.log()
        await run.audit()
        assert await run.learn() == 0, run.log()
        found = await run.audit()
    assert (found.trained, found.dead, found.dropped) == (STEPS, 0, 0)
    expected, numbers, lr = undisturbed
    assert same(state(run), expected)
    assert run.newest().numbers == numbers
    assert rates(run) == lr
