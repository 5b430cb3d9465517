"""The commands that look at groups, on groups that are scored whole."""

from __future__ import annotations

from pathlib import Path

import pytest

from streamrl import wire
from streamrl.queues import embedded, open_ledgers
from streamrl.queues.records import Cause
from tests.queues.ledger_kit import lease

from .run_kit import admit, answered, command, make_run, sample


@pytest.fixture
async def live_run(tmp_path: Path):
    """Group 0 closed, 1 dead, 2 leased by a reward worker, 3 half generated; all of them whole."""
    run_dir = tmp_path / "run"
    config = make_run(run_dir)
    async with embedded.running(config.redis, run_dir), open_ledgers(config, run_dir) as ledgers:
        train = ledgers.train
        await train.set_group_scored(True)
        for group_id in range(4):
            await admit(train, group_id)
        prompts = await lease(train, "prompts", count=4)
        for prompt in prompts[:3]:
            for number in range(2):
                await train.emit(prompt, number, sample())
        await train.emit(prompts[3], 0, sample())
        closed, dead, _ = await lease(train, "rollouts", count=3)
        score = wire.encode(wire.SampleScore(value=0.5, parts={"rank": 0.5}))
        await train.score_group(closed, {0: score}, {1: Cause("wire: no sample", "Traceback: one")})
        await train.score_group(
            dead, {0: score}, {1: Cause("the judge", "Traceback: two")}, fail_group="the judge is away"
        )
        await ledgers.roles.beat("reward.0", {"per_second": 12.5, "pid": 78, "state": "ready"}, 60)
        yield run_dir


async def test_lag_and_trace_say_that_groups_are_scored_whole(live_run: Path):
    data = await answered("streamrl.lag/1", live_run, "lag")
    streams = {stream["name"]: stream for stream in data["train"]["streams"]}
    assert (streams["rollouts"]["depth"], streams["rollouts"]["lag"], streams["rollouts"]["unit"]) == (1, 0, "groups")
    counted = streams["rollouts"]["added"] is not None  # Redis 7 counts entries; workers count samples
    assert streams["rollouts"]["out_per_second"] == (0 if counted else None)
    assert streams["prompts"]["unit"] == "groups"
    assert "rollouts (groups)" in (await command("lag", "--run", str(live_run))).stdout
    closed, dead, leased, half = [
        await answered("streamrl.trace/1", live_run, "trace", str(group_id)) for group_id in range(4)
    ]
    assert (closed["state"], closed["whole"], closed["doom"]) == ("closed", True, None)
    assert [response.get("score") for response in closed["responses"]] == [0.5, None]
    assert closed["responses"][1]["cause"] == "wire: no sample"
    assert dead["state"] == "dead"
    assert (leased["without_payload"], leased["without_score"]) == (0, 2)
    assert (half["without_payload"], half["without_score"]) == (1, 2)
    assert "scored whole" in (await command("trace", "2", "--run", str(live_run))).stdout


async def test_a_dead_group_is_audited_listed_replayed_and_whole_again(live_run: Path):
    data = await answered("streamrl.audit/2", live_run, "audit")
    assert (data["admitted"], data["dead"], data["live"], data["lost"], data["faults"]) == (4, 1, 3, 0, [])
    data = await answered("streamrl.dead/1", live_run, "dead", "ls")
    letters = {(letter["group"], letter["sample"]): letter for letter in data["letters"]}
    assert set(letters) == {(0, 1), (1, 1), (1, None)}
    assert letters[1, None]["why"] == "the judge is away"
    assert letters[1, 1]["detail"] == "Traceback: two"
    await answered("streamrl.dead.replay/1", live_run, "dead", "replay", letters[1, None]["id"])
    trace = await answered("streamrl.trace/1", live_run, "trace", "1")
    assert (trace["state"], trace["attempt"], trace["whole"]) == ("open", 2, True)
