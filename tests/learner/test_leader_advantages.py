"""A learner as a process with estimators that need more than rewards: a greedy response, the whole step, values."""

from __future__ import annotations

import pytest
from playing import reward

from streamrl.learner.lineage import read_record


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
    for frame in read_record(run.run_dir, run.newest().record):
        assert frame["rewards"] == [reward(frame["gid"], sample) for sample in range(3)]


@pytest.mark.parametrize(
    "learner",
    [
        {"advantage": {"use": "grpo_batch_std"}},
        {"advantage": {"use": "reinforce_plus_plus"}},
        {"advantage": {"use": "gpg"}},
        {"advantage": {"use": "egpo", "args": {"mode": "bonus", "part": "joint"}}},
        {"advantage": {"use": "gae"}, "critic": {"kind": "model"}, "mini_batches": 2},
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
