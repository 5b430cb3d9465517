"""Whole runs with a reward that compares: real feeder, replica, reward worker and learner; and a change of rewards."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.faults.pipeline import Pipeline, errors

COMPARED = [{"use": "compared_reward:Rank", "name": "rank"}]
PATHS = [str(Path(__file__).parent)]


@pytest.mark.slow
@pytest.mark.parametrize("ways", [("samples", "groups"), ("groups", "samples")])
async def test_the_rewards_of_a_run_change_in_the_middle(run, caplog, ways):
    """The reward worker comes back with other rewards while groups are in flight in every state."""
    rewards = {"samples": [{"use": "parity_reward:parity"}], "groups": COMPARED}
    before, after = (rewards[way] for way in ways)
    pipeline = Pipeline(run)
    run.set(None, rewards=before, plugin_paths=PATHS)
    async with pipeline.running(), run.open() as ledgers:
        await pipeline.until_step(ledgers.train, 3)
        run.set(None, rewards=after)
        await pipeline.restart("reward.0")
        await pipeline.until_step(ledgers.train, 6)
        for ledger in (ledgers.train, ledgers.evaluation):
            assert (await ledger.state()).group_scored == (ways[1] == "groups")
        found = await pipeline.end()
        letters = await ledgers.train.dead_letters()
    assert (found.trained, found.dead, found.dropped) == (pipeline.prompts, 0, 0), letters
    assert not errors(caplog)
