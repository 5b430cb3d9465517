"""A role's heartbeat, records and errors."""

from __future__ import annotations

import asyncio
import math
import threading

import orjson
import pytest

from streamrl.config import RunConfig
from streamrl.errors import Unreachable
from streamrl.queues import embedded, open_role
from tests.queues.ledger_kit import until_async
from tests.redis_kit import Probe, RedisRun


async def test_the_board_shows_what_a_role_says(redis_run: RedisRun):
    config = RunConfig(name="test", redis=redis_run.config)
    async with open_role("rollout.0", config, redis_run.run_dir) as role:
        board = role.ledgers.roles

        async def shows(state: str) -> bool:
            return (await board.read()).get("rollout.0", {}).get("state") == state

        await until_async(lambda: shows("starting"))
        role.status["version"] = 7
        role.ready()
        role.ready()
        await until_async(lambda: shows("ready"))
        role.stop.set()
        await until_async(lambda: shows("draining"))
        shown = (await board.read())["rollout.0"]
        assert shown["version"] == "7"
        assert int(shown["pid"]) > 0


async def test_a_role_whose_event_loop_stands_still_says_so_from_a_thread(redis_run: RedisRun):
    config = RunConfig(name="test", redis=redis_run.config)
    async with open_role("reward.0", config, redis_run.run_dir) as role:
        role.status["scored"] = 7
        thread = threading.Thread(target=role.say_blocked, args=("mine holds it",))
        thread.start()
        thread.join(60)  # nothing of the event loop runs meanwhile
        with Probe(f"unix://{embedded.socket_path(redis_run.run_dir)}") as probe:
            flat = probe.call("HGETALL", role.ledgers.train.keys.role("reward.0"))
    shown = dict(zip(flat[::2], flat[1::2], strict=True))
    assert (shown[b"state"], shown[b"trouble"], shown[b"scored"]) == (b"blocked", b"mine holds it", b"7")


async def test_records_are_whole_lines(redis_run: RedisRun):
    config = RunConfig(name="test", redis=redis_run.config)
    async with open_role("learner", config, redis_run.run_dir) as role:
        role.record({"loss": 0.5})
        role.record({"loss": math.nan})
        lines = (redis_run.run_dir / "metrics" / "learner.jsonl").read_bytes().splitlines()
        assert [orjson.loads(line)["loss"] for line in lines] == [0.5, None]
        assert {"at", "mono"} <= orjson.loads(lines[0]).keys()
        role.record({"at": "a line", "mono": 0})
        assert orjson.loads((redis_run.run_dir / "metrics" / "learner.jsonl").read_bytes().splitlines()[-1])["mono"] > 0
    async with open_role("learner", config, redis_run.run_dir) as role:
        role.record({"loss": 1.0})
    assert len((redis_run.run_dir / "metrics" / "learner.jsonl").read_bytes().splitlines()) == 4


async def test_records_that_cannot_be_written_cost_no_role(redis_run: RedisRun, caplog):
    (redis_run.run_dir / "metrics").write_text("a file in the way")
    config = RunConfig(name="test", redis=redis_run.config)
    async with open_role("learner", config, redis_run.run_dir) as role:
        role.record({"loss": 1.0})
        role.record({"loss": 2.0})
        assert caplog.text.count("metrics cannot be written") == 1
        (redis_run.run_dir / "metrics").unlink()
        role.record({"loss": 3.0})
    lines = (redis_run.run_dir / "metrics" / "learner.jsonl").read_bytes().splitlines()
    assert [orjson.loads(line)["loss"] for line in lines] == [3.0]


async def test_a_heartbeat_that_fails_ends_the_role(redis_run: RedisRun):
    config = RunConfig(name="test", redis=redis_run.config.model_copy(update={"patience": 0.2}))
    with pytest.raises(Unreachable):
        async with open_role("feeder", config, redis_run.run_dir):
            redis_run.kill()
            await asyncio.Event().wait()


async def test_an_error_of_the_role_comes_out_as_it_is(redis_run: RedisRun):
    config = RunConfig(name="test", redis=redis_run.config)
    with pytest.raises(ZeroDivisionError):
        async with open_role("feeder", config, redis_run.run_dir) as role:
            assert role.ledgers is not None
            raise ZeroDivisionError
