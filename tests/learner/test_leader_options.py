"""A learner as a process: versions every k steps, equal rewards, passes over a step; the audit stays exact."""

from __future__ import annotations

import asyncio
import os
import resource
import signal

import pytest
from leader_kit import DEADLINE
from playing import reward

from streamrl.queues.ledger import ZERO_VARIANCE
from streamrl.queues.ledgers import open_ledgers
from streamrl.runfile import LoadedConfig, save

pytestmark = pytest.mark.timeout(240)


def equal(group_id: int) -> bool:
    """Whether the played rewards of a group are all the same."""
    return len({reward(group_id, sample) for sample in range(3)}) == 1


async def dropped(run) -> tuple[list[int], dict[bytes, bytes]]:
    async with open_ledgers(run.config, run.run_dir) as ledgers:
        state = await ledgers.connection.read("HGETALL", ledgers.train.keys.state)
        return await ledgers.train.dropped(), state


async def test_versions_every_third_step_and_the_last(run):
    """Staleness goes on counting steps: with versions that come rarely tokens are older."""
    run.configure(publish_every=3, steps=8)
    async with run.play():
        assert await run.learn() == 0, run.log()
    steps = run.steps()
    versions = {line["step"]: line["version"] for line in steps}
    made = [step for step in range(2, 9) if versions[step] > versions[step - 1]]
    # A wait of seconds publishes earlier; nothing else does.
    assert all(later - earlier <= 3 for earlier, later in zip([0, *made], made, strict=False))
    assert len(made) < 7
    assert run.finished()["version"] > versions[8], "the weights of the end are published"
    assert max(line["staleness_max"] for line in steps) >= 2
    assert (await run.audit()).trained == 32


async def test_a_killed_learner_between_two_versions_goes_on(run):
    run.configure(publish_every=3, steps=6, checkpoint_every=1)
    async with run.play():
        kill = "streamrl.learner.policy:Actor.apply_update:after:3"
        assert await run.learn(kill) == -signal.SIGKILL, run.log()
        assert await run.learn() == 0, run.log()
    assert (await run.audit()).trained == 24


async def test_equal_rewards_are_dropped_and_take_their_place_in_the_step(run):
    run.configure(advantage={"zero_variance": "drop"}, steps=5)
    async with run.play():
        assert await run.learn() == 0, run.log()
        found = await run.audit()
    gone, state = await dropped(run)
    assert gone
    assert all(equal(group_id) for group_id in gone)
    assert int(state[f"dropped:{ZERO_VARIANCE}".encode()]) == len(gone) == found.dropped
    steps = run.steps()
    assert min(line["groups"] for line in steps) < 4
    assert all(line["groups"] >= 1 and line["zero_variance_groups"] == 0 for line in steps)
    assert steps[-1]["dropped_zero_variance"] <= len(gone)


async def test_strictly_on_policy_what_fills_a_dropped_place_has_the_new_weights(run):
    """Dropped while the step is open, its place would be filled with weights that are one step old when trained."""
    run.configure(advantage={"zero_variance": "drop"}, steps=8)
    run.config = run.config.model_copy(update={"max_staleness": 0})
    save(LoadedConfig(config=run.config, origins={}), run.run_dir / "run.json")
    async with run.play():
        assert await run.learn() == 0, run.log()
        found = await run.audit()
    assert [line["staleness_max"] for line in run.steps()] == [0] * 8
    assert found.dropped > 0


async def test_a_step_that_lacks_groups_gives_way_to_a_checkpoint_that_makes_room(run, monkeypatch):
    """The hard cap is full of trained groups and the disk is not any more: only a checkpoint lets the step go on."""
    monkeypatch.setattr("playing.reward", lambda group_id, sample: float(group_id == 0 or sample == 0))
    run.configure(advantage={"zero_variance": "drop"}, steps=None, tokens_per_microbatch=1)
    async with run.play(), open_ledgers(run.config, run.run_dir) as ledgers:
        pid = run.start(file_limit=24 << 10)
        async with asyncio.timeout(DEADLINE):  # until the last group is in a step that nobody can fill
            while len(run.steps()) < 6 or not await begun(ledgers.train):  # noqa: ASYNC110
                await asyncio.sleep(0.05)
        assert [line["groups"] for line in run.steps()] == [3, 4, 4, 4, 4, 4]
        assert (await ledgers.train.state()).live == run.config.hard_cap == 24
        resource.prlimit(pid, resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
        await run.until(lambda: run.newest() is not None and len(run.steps()) >= 8)
        os.kill(pid, signal.SIGTERM)
        assert await run.wait(pid) == 0, run.log()
    assert (await run.audit()).trained == sum(line["groups"] for line in run.steps())


async def begun(ledger) -> bool:
    """Whether some group is in a step."""
    groups = [await ledger.read_group(group_id) for group_id in await ledger.closed()]
    return any(group is not None and group.crashes for group in groups)


async def test_resample_fills_every_step_with_contrast(run):
    run.configure(advantage={"zero_variance": "resample"}, steps=5)
    async with run.play():
        assert await run.learn() == 0, run.log()
        found = await run.audit()
    gone, _ = await dropped(run)
    assert found.dropped == len(gone) > 0
    assert all(equal(group_id) for group_id in gone)
    assert [line["groups"] for line in run.steps()] == [4] * 5
    assert all(line["zero_variance_groups"] == 0 for line in run.steps())


async def test_data_without_any_contrast_ends(run, monkeypatch):
    """Every group is dropped: no step, and the run ends with its data."""
    monkeypatch.setattr("playing.reward", lambda group_id, sample: 1.0)
    run.configure(advantage={"zero_variance": "drop"}, steps=None)
    async with run.play(end=10):
        assert await run.learn() == 0, run.log()
    assert run.steps() == []
    assert run.finished()["reason"] == "data"
    found = await run.audit()
    assert (found.admitted, found.trained, found.dropped) == (10, 0, 10)


async def test_passes_and_mini_batches(run):
    run.configure(passes=2, mini_batches=2, steps=4)
    async with run.play():
        kill = "streamrl.learner.policy:Actor.apply_update:after:6"
        assert await run.learn(kill) == -signal.SIGKILL, run.log()
        assert await run.learn() == 0, run.log()
    steps = run.steps()
    assert all(line["updates"] == 4 and line["skipped_updates"] == 0 for line in steps)
    assert all(line["entropy"] > 0 for line in steps)
    assert steps[0]["length_read"] > 0
    assert (await run.audit()).trained == 16


async def test_two_ranks_know_the_ages_of_tokens(run, tmp_path):
    """Without the history of versions the second rank would take every token for fresh."""
    run.configure(ranks=2, steps=4, correction={"lr_scale": "staleness"})
    async with run.play():
        environ = {"WORLD_SIZE": "2", "STREAMRL_RENDEZVOUS": f"file://{tmp_path}/meet"}
        pids = [run.start(name=f"learner.{rank}", environ={**environ, "RANK": str(rank)}) for rank in range(2)]
        assert [await run.wait(pid) for pid in pids] == [0, 0], run.log() + run.log("learner.1")
    for line in run.steps():
        # Groups with equal rewards, which nobody computes, count as well.
        assert line["lr"] == pytest.approx(1e-3 / (1 + line["staleness_mean"]) ** 0.5, rel=1e-6), line["staleness"]
    assert (await run.audit()).trained == 16


async def test_remax_trains_all_responses_but_the_greedy_one(run):
    run.configure(advantage={"use": "remax"}, steps=3)
    async with run.play():
        assert await run.learn() == 0, run.log()
        steps = run.steps()
        assert [line["step"] for line in steps] == [1, 2, 3]
        assert all(sum(line["lengths_trained"].values()) == 12 for line in steps)
        assert all(line["grad_norm"] > 0 and not line["skipped"] for line in steps)
        found = await run.audit()
        assert found.trained == 12
    for line in steps:
        rewards = [reward(group_id, sample) for group_id, _ in line["trained"] for sample in range(3)]
        assert line["reward_mean"] == pytest.approx(sum(rewards) / len(rewards))


@pytest.mark.parametrize(
    "learner",
    [
        {"advantage": {"use": "grpo_batch_std"}},
        {"advantage": {"use": "egpo", "args": {"mode": "bonus", "part": "joint"}}},
    ],
    ids=lambda learner: learner["advantage"]["use"],
)
async def test_estimators_that_need_the_whole_step(run, learner):
    run.configure(**learner, steps=2)
    async with run.play():
        assert await run.learn() == 0, run.log()
        steps = run.steps()
        assert [line["step"] for line in steps] == [1, 2]
        assert all(line["grad_norm"] > 0 and not line["skipped"] for line in steps)
        assert (await run.audit()).trained == 8
