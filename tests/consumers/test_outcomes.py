"""What becomes of samples and groups whose rewards fail, against a real Redis; and what is recorded of it."""

import orjson
import pytest

from streamrl.config import LeaseConfig
from streamrl.consumers import worker as worker_module
from streamrl.consumers.worker import run_reward_worker
from streamrl.errors import ConfigError
from streamrl.monitor.snapshot import take
from streamrl.queues import Role, open_ledgers
from streamrl.queues.records import ReplayOutcome
from tests.consumers.worker_kit import put, scores, until_closed, until_dead, values, worker
from tests.queues.ledger_kit import faults, replay, until


async def test_dead_takes_the_whole_group_and_a_replay_brings_it_back(redis_run, make_config):
    config = make_config({"use": "rewards_for_tests:by_text", "on_failure": "dead"})
    async with open_ledgers(config, redis_run.run_dir) as ledgers:
        await put(ledgers.train, 0, ["4", "raise", "5", "4"])
        await put(ledgers.train, 1, ["4", "5"])
        async with worker(config, redis_run.run_dir, ledgers):
            letters = await until_dead(ledgers.train, 0)
            await until_closed(ledgers.train, [1])
        assert set(letters) == {(0, None), (0, 1)}, "the three others had scores, which went with the group"
        assert letters[0, None].stage == "reward"
        assert "the judge is not amused" in letters[0, None].why
        assert letters[0, None].prompt is not None
        assert "Traceback" in letters[0, 1].detail
        assert await ledgers.train.closed() == [1]
        outcome = await replay(ledgers.train, 0, budget=10, hard_cap=10)
        assert outcome is ReplayOutcome.REPLAYED
        assert not await ledgers.train.dead_letters()
        assert not await faults(ledgers.train)


async def test_drop_sample_leaves_the_others_and_none_is_a_dead_group(redis_run, make_config):
    config = make_config({"use": "rewards_for_tests:by_text"})
    async with open_ledgers(config, redis_run.run_dir) as ledgers:
        await put(ledgers.train, 0, ["4", "raise", "5"])
        await put(ledgers.train, 1, ["raise", "raise"])
        async with worker(config, redis_run.run_dir, ledgers):
            await until_closed(ledgers.train, [0])
            letters = await until_dead(ledgers.train, 1)
        found, causes = await scores(ledgers.train, 0)
        assert (set(found), set(causes)) == ({0, 2}, {1})
        assert letters[1, None].stage == "close"
        assert not await faults(ledgers.train)


async def test_retry_waits_for_a_service_that_comes_back_and_loses_nothing(redis_run, make_config, tmp_path):
    config = make_config({"use": "rewards_for_tests:away_until", "on_failure": "retry"}, attempts=1)
    async with open_ledgers(config, redis_run.run_dir) as ledgers:
        await put(ledgers.train, 0, ["a"] * 6, metadata={"folder": str(tmp_path)})
        async with worker(config, redis_run.run_dir, ledgers) as role:
            await until(lambda: "nobody scores" in str(role.status.get("rewards")))
            assert not await ledgers.train.closed()
            (tmp_path / "back").touch()
            await until_closed(ledgers.train, [0])
        assert await values(ledgers.train, 0) == dict.fromkeys(range(6), 1.0)
        assert not await ledgers.train.dead_letters()


async def test_a_service_that_stays_away_for_many_leases_kills_no_sample(
    redis_run, make_config, tmp_path, caplog, monkeypatch
):
    """By default, without `retry`: samples go back before they were held for too long, more often than any may die."""
    caplog.set_level("INFO", "streamrl.queues.leases")
    monkeypatch.setattr(worker_module, "HOLD_SHARE", 0.01)  # so that nothing is buried on a slow host
    config = make_config({"use": "rewards_for_tests:away_until", "deadline": 0.05}, attempts=1, concurrency=2)
    config = config.model_copy(update={"lease": LeaseConfig(seconds=0.5, max_hold=30, max_deliveries=3)})
    async with open_ledgers(config, redis_run.run_dir) as ledgers:
        await put(ledgers.train, 0, ["a"] * 3, metadata={"folder": str(tmp_path)})
        async with worker(config, redis_run.run_dir, ledgers):
            await until(lambda: sum(line.message == "given back" for line in caplog.records) > 12, seconds=120)
            assert not await ledgers.train.closed()
            (tmp_path / "back").touch()
            await until_closed(ledgers.train, [0])
        assert await values(ledgers.train, 0) == dict.fromkeys(range(3), 1.0)
        assert not await ledgers.train.dead_letters()
        assert not await faults(ledgers.train)


async def test_gate_composition_and_overlong_reach_redis_and_the_figures_the_screens(redis_run, make_config):
    rewards = (
        {"use": "rewards_for_tests:by_text", "gate": 1, "name": "right"},
        {"use": "rewards_for_tests:costs", "weight": 0.5, "name": "judge", "clip": [0, 1]},
    )
    config = make_config(*rewards, scoring={"gated": -1, "overlong": {"buffer": 254}})
    async with open_ledgers(config, redis_run.run_dir) as ledgers:
        await put(ledgers.train, 0, ["4", "5", "raise"])
        async with worker(config, redis_run.run_dir, ledgers) as role:
            await until_closed(ledgers.train, [0])
            await until(lambda: "judge" in str(role.status.get("rewards", "")))
            await role.beat()
            snapshot = await take(ledgers.connection, config.name)
        found, _ = await scores(ledgers.train, 0)
        penalty = -1 / 254  # of the third token
        assert found[0].value == pytest.approx(0.5 + penalty)
        assert found[0].parts == {
            "right": 1.0, "right/passed": 1.0, "judge": 1.0, "judge/raw": 3.0, "judge/style": 2.0, "overlong": penalty,
        }  # fmt: skip
        assert found[1].value == pytest.approx(-1 + penalty)
        assert set(found[1].parts) == {"right", "right/passed", "overlong"}
    views = {view.name: view for view in snapshot.rewards}
    assert (views["right"].ok, views["right"].dead, views["right"].retried) == (2, 1, 1)
    assert (views["judge"].ok, views["judge"].tokens, views["judge"].mean) == (1, 11, 3.0)
    assert "rewards" not in snapshot.roles["reward.0"]
    lines = map(orjson.loads, (redis_run.run_dir / "metrics" / "reward.0.jsonl").read_bytes().splitlines())
    (judge,) = [
        line["rewards"]["judge"]
        for line in lines
        if "judge" in line.get("rewards", {}) and line["rewards"]["judge"]["ok"]
    ]
    assert (judge["values"], judge["tokens"]) == ({"3": 1}, 11)


async def test_a_reward_that_cannot_be_opened_ends_the_worker_with_its_reason(redis_run, make_config):
    config = make_config({"use": "rewards_for_tests:NeedsModel"})
    async with open_ledgers(config, redis_run.run_dir) as ledgers:
        role = Role("reward.0", config, redis_run.run_dir, ledgers)
        with pytest.raises(ConfigError, match="no model critic"):
            await run_reward_worker(role)
        assert not role.is_ready
