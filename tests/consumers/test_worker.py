"""The reward worker against a real Redis, in this process and as processes that are killed."""

import asyncio
import time

import orjson
import pytest

from streamrl import wire
from streamrl.queues import open_ledgers
from tests.consumers.samples import prompt, response
from tests.consumers.worker_kit import Workers, put, scores, until_closed, values, worker
from tests.queues.ledger_kit import admit, faults, lease, until

BY_TEXT = "rewards_for_tests:by_text"


async def test_samples_of_both_ledgers_are_scored(redis_run, make_config):
    config = make_config()
    async with open_ledgers(config, redis_run.run_dir) as ledgers:
        await put(ledgers.train, 0, ["4", "5"])
        await put(ledgers.evaluation, 0, [" 4 ", "no"])
        async with worker(config, redis_run.run_dir, ledgers) as role:
            for ledger in (ledgers.train, ledgers.evaluation):
                await until_closed(ledger, [0])
                found, causes = await scores(ledger, 0)
                assert {number: score.value for number, score in found.items()} == {0: 1.0, 1: 0.0}
                assert found[0].parts == {"exact_match": 1.0}
                assert found[0].seconds >= 0
                assert not causes
            assert role.is_ready
            await until(lambda: role.status.get("scored") == 4)
        assert not await faults(ledgers.train)
    (line,) = [
        line for line in map(orjson.loads, (redis_run.run_dir / "metrics" / "reward.0.jsonl").read_bytes().splitlines())
        if line["scored"] == 4 and "mean" in line
    ]  # fmt: skip
    assert (line["failed"], line["mean"]) == (0, 0.5)


async def test_a_reward_that_raises_hangs_or_returns_nonsense_kills_the_sample_and_nothing_else(redis_run, make_config):
    config = make_config(BY_TEXT, deadline=0.2)
    async with open_ledgers(config, redis_run.run_dir) as ledgers:
        await put(ledgers.train, 0, ["4", "raise", "hang", "nan", "string", "5"])
        async with worker(config, redis_run.run_dir, ledgers) as role:
            await until_closed(ledgers.train, [0])
            found, causes = await scores(ledgers.train, 0)
            await until(lambda: role.status.get("failed") == 4)
        assert {number: score.value for number, score in found.items()} == {0: 1.0, 5: 0.0}
        assert set(causes) == {1, 2, 3, 4}
        assert "ValueError: the judge is not amused" in causes[1]
        assert "no score within 0.2 s" in causes[2]
        assert "nan" in causes[3]
        assert "'1.0' (str), not a number" in causes[4]
        letters = {letter.sample: letter for letter in await ledgers.train.dead_letters()}
        assert {letter.stage for letter in letters.values()} == {"reward"}
        assert "Traceback" in letters[1].detail
        assert not await faults(ledgers.train)


async def test_bytes_that_are_no_message_are_a_dead_letter_at_once(redis_run, make_config):
    good = wire.encode(response("4"))
    newer = good.replace(b"\xa1v\x01", b"\xa1v\x63") if b"\xa1v\x01" in good else None
    foreign = [b"", b"\x00", good[:-7], b"\x93\x01\x02\x03", wire.encode(prompt()), *([newer] if newer else [])]
    config = make_config(attempts=3, backoff=60)
    async with open_ledgers(config, redis_run.run_dir) as ledgers:
        await put(ledgers.train, 0, ["4", *foreign])
        async with worker(config, redis_run.run_dir, ledgers):
            await until_closed(ledgers.train, [0])
        found, causes = await scores(ledgers.train, 0)
        assert set(found) == {0}
        assert len(causes) == len(foreign)
        assert all(cause.startswith("wire: ") for cause in causes.values())


async def test_a_prompt_that_cannot_be_decoded_kills_its_group_and_not_the_worker(redis_run, make_config):
    config = make_config()
    async with open_ledgers(config, redis_run.run_dir) as ledgers:
        await admit(ledgers.train, 0, samples=1, prompt=b"\xc1 garbage")
        (held,) = await lease(ledgers.train, "prompts")
        await ledgers.train.emit(held, 0, wire.encode(response("4")))
        await put(ledgers.train, 1, ["4"])
        async with worker(config, redis_run.run_dir, ledgers) as role:
            await until_closed(ledgers.train, [1])
            await until(lambda: role.status.get("failed") == 1)
        assert (await ledgers.train.state()).live == 1
        assert {letter.group_id for letter in await ledgers.train.dead_letters()} == {0}


async def test_a_drain_finishes_what_is_in_hand(redis_run, make_config, tmp_path):
    config = make_config("rewards_for_tests:waits_in_the_middle")
    async with open_ledgers(config, redis_run.run_dir) as ledgers:
        await put(ledgers.train, 0, ["a", "b"], metadata={"folder": str(tmp_path)})
        async with worker(config, redis_run.run_dir, ledgers) as role:
            await until(lambda: list(tmp_path.glob("in-*")))
            role.stop.set()
            (tmp_path / "go").touch()
        assert await ledgers.train.closed() == [0]
        found, _ = await scores(ledgers.train, 0)
        assert found[0].parts == {"rewards_for_tests:waits_in_the_middle": 1.0,
                                  "rewards_for_tests:waits_in_the_middle/late": 1.0}  # fmt: skip


async def test_a_drain_ends_within_its_share_and_hands_back_what_is_in_hand(redis_run, make_config, tmp_path):
    config = make_config("rewards_for_tests:waits_in_the_middle")
    config = config.model_copy(update={"supervisor": config.supervisor.model_copy(update={"drain_deadline": 2.0})})
    async with open_ledgers(config, redis_run.run_dir) as ledgers:
        await put(ledgers.train, 0, ["a"], metadata={"folder": str(tmp_path)})
        async with worker(config, redis_run.run_dir, ledgers):
            await until(lambda: list(tmp_path.glob("in-*")))
        [row] = await ledgers.connection.read("XPENDING", ledgers.train.keys.rollouts, "g", "-", "+", 10)
        assert (row[1], row[3]) == (b"handed-back", 0)


async def test_redis_that_is_killed_and_restarted_costs_no_sample(redis_run, make_config):
    config = make_config()
    async with open_ledgers(config, redis_run.run_dir) as ledgers:
        await put(ledgers.train, 0, ["4"] * 4)
        async with worker(config, redis_run.run_dir, ledgers):
            await until_closed(ledgers.train, [0])
            redis_run.restart()
            await put(ledgers.train, 1, ["4"] * 4)
            await until_closed(ledgers.train, [1])
        assert not await faults(ledgers.train)


async def test_a_worker_killed_in_the_middle_of_a_sample_loses_nothing(redis_run, make_config, tmp_path):
    config = make_config("rewards_for_tests:waits_in_the_middle", lease_seconds=1.0)
    async with open_ledgers(config, redis_run.run_dir) as ledgers:
        with Workers(config, redis_run.run_dir) as workers:
            await put(ledgers.train, 0, ["a", "b", "c"], metadata={"folder": str(tmp_path)})
            workers.start()
            await until(lambda: list(tmp_path.glob("in-*")))
            workers.kill()
            (tmp_path / "go").touch()
            workers.start()
            await until_closed(ledgers.train, [0])
            assert workers.end() == 0
        assert len(await values(ledgers.train, 0)) == 3
        assert not await faults(ledgers.train)


@pytest.mark.slow
async def test_a_sample_that_kills_the_worker_is_dead_in_the_end_and_no_innocent_with_it(redis_run, make_config):
    config = make_config("rewards_for_tests:kills_its_process", lease_seconds=0.9)
    async with open_ledgers(config, redis_run.run_dir) as ledgers:
        with Workers(config, redis_run.run_dir) as workers:
            for cursor in range(6):
                await put(ledgers.train, cursor, ["fine"] * 7 + ["poison" if cursor == 2 else "fine"])
            workers.start(0)
            workers.start(1)
            async with asyncio.timeout(100):
                while set(await ledgers.train.closed()) != set(range(6)):
                    workers.keep()
                    await ledgers.train.wait_closed(0.2)
        assert workers.deaths >= config.lease.max_deliveries
        for cursor in range(6):
            _, causes = await scores(ledgers.train, cursor)
            assert set(causes) == ({7} if cursor == 2 else set())
        (letter,) = await ledgers.train.dead_letters()
        assert "holders died of it" in letter.why
        assert not await faults(ledgers.train)


@pytest.mark.slow
async def test_a_trivial_rule_scores_thousands_of_samples_a_second(redis_run, make_config, capsys):
    """Not decided by a clock that other processes share: the bound is a tenth of what an idle core does."""
    config = make_config(concurrency=256)
    groups, size = 200, 32
    async with open_ledgers(config, redis_run.run_dir) as ledgers:
        for cursor in range(groups):
            await put_many(ledgers.train, cursor, size, groups)
        begun, cpu = time.perf_counter(), time.process_time()
        async with worker(config, redis_run.run_dir, ledgers):
            await until_closed(ledgers.train, range(groups))
            seconds, used = time.perf_counter() - begun, time.process_time() - cpu
    with capsys.disabled():
        print(f"\nreward worker: {groups * size / seconds:.0f} samples/s, {groups * size / used:.0f} per CPU second")
    assert groups * size / used > 500


async def put_many(ledger, cursor, size, budget):
    await admit(
        ledger, cursor, samples=size, prompt=wire.encode(prompt()), budget=budget, hard_cap=budget
    )  # fmt: skip
    (held,) = await lease(ledger, "prompts")
    payload = wire.encode(response("4", tokens=64))
    await asyncio.gather(*(ledger.emit(held, number, payload) for number in range(size)))
