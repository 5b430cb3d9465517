"""Rewards that compare, through the reward worker: what becomes of a group in each case, and who may be killed."""

import asyncio

import pytest

from streamrl import wire
from streamrl.queues import open_ledgers
from tests.consumers.samples import prompt, response
from tests.consumers.worker_kit import Workers, put, put_whole, scores, until_closed, until_dead, values, worker
from tests.queues.ledger_kit import admit, faults, lease, until


async def test_single_and_comparing_rewards_make_one_score(redis_run, make_config):
    rank = {"use": "group_rewards_for_tests:Rank", "name": "rank", "weight": 10}
    config = make_config(rank, {"use": "group_rewards_for_tests:sync_rank", "name": "length"}, {"use": "exact_match"})
    async with open_ledgers(config, redis_run.run_dir) as ledgers:
        await put_whole(ledgers.train, 0, ["333", "22", "4", "55555"])
        await put_whole(ledgers.evaluation, 0, ["1"], least=1)
        async with worker(config, redis_run.run_dir, ledgers) as role:
            await until_closed(ledgers.train, [0])
            await until_closed(ledgers.evaluation, [0])
            await until(lambda: role.status.get("scored") == 5)
            state = await ledgers.train.state()
        found, causes = await scores(ledgers.train, 0)
        assert state.group_scored
        assert not causes
        assert {k: score.value for k, score in found.items()} == {0: 23.0, 1: 12.0, 2: 2.0, 3: 35.0}
        assert found[2].parts == {"rank": 0.0, "rank/of": 4.0, "length": 1.0, "exact_match": 1.0}
        alone, _ = await scores(ledgers.evaluation, 0)
        assert alone[0].parts["rank/of"] == 1.0
        for ledger in (ledgers.train, ledgers.evaluation):
            assert not await faults(ledger)


@pytest.mark.parametrize("wrong", ["raise", "hang", "nan", "short", "number"])
async def test_a_comparison_that_fails_kills_its_group_and_no_other(redis_run, make_config, wrong):
    config = make_config("group_rewards_for_tests:ByText", deadline=0.3)
    async with open_ledgers(config, redis_run.run_dir) as ledgers:
        await put_whole(ledgers.train, 0, ["a", wrong, "b"])
        await put_whole(ledgers.train, 1, ["a", "b"])
        async with worker(config, redis_run.run_dir, ledgers) as role:
            await until_closed(ledgers.train, [1])
            await until_dead(ledgers.train, 0)
            await until(lambda: (role.status.get("scored"), role.status.get("failed")) == (2, 3))
        letters = {letter.sample: letter for letter in await ledgers.train.dead_letters()}
        assert set(letters) == {0, 1, 2, None}
        assert {letter.stage for k, letter in letters.items() if k is not None} == {"reward"}
        assert {"raise": "cannot compare", "hang": "no score within", "nan": "nan", "short": "2 scores for 3",
                "number": "a float, not a sequence of 3"}[wrong] in letters[0].why  # fmt: skip
        assert "2 attempts" in letters[0].why
        assert not await faults(ledgers.train)


async def test_samples_that_are_none_are_not_compared(redis_run, make_config):
    config = make_config("group_rewards_for_tests:Rank")
    async with open_ledgers(config, redis_run.run_dir) as ledgers:
        await put_whole(ledgers.train, 0, ["333", b"\x00", "1", b""])
        async with worker(config, redis_run.run_dir, ledgers):
            await until_closed(ledgers.train, [0])
        found, causes = await scores(ledgers.train, 0)
        assert {k: score.value for k, score in found.items()} == {0: 1.0, 2: 0.0}
        assert set(causes) == {1, 3}
        assert all(cause.startswith("wire: ") for cause in causes.values())
        assert found[0].parts["group_rewards_for_tests:Rank/of"] == 2.0


async def test_a_group_that_cannot_close_any_more_is_not_compared(redis_run, make_config):
    config = make_config("group_rewards_for_tests:ThatNobodyMayAsk")
    async with open_ledgers(config, redis_run.run_dir) as ledgers:
        await put_whole(ledgers.train, 0, ["333", b"\x00", b""], least=2)
        await put_whole(ledgers.train, 1, [b"\xc1"], least=1)
        await ledgers.train.set_group_scored(True)
        await admit(ledgers.train, 2, samples=2, prompt=b"\xc1 garbage")
        (held,) = await lease(ledgers.train, "prompts")
        for number in range(2):
            await ledgers.train.emit(held, number, wire.encode(response("4")))
        async with worker(config, redis_run.run_dir, ledgers) as role:
            await until_dead(ledgers.train, 0, 1, 2)
            await until(lambda: role.status.get("failed") == 6)
        why = {(letter.group_id, letter.sample): letter.why for letter in await ledgers.train.dead_letters()}
        assert why[0, 0] == "1 of 3 samples left to compare"
        assert why[2, 0].startswith("wire: ")
        assert not await faults(ledgers.train)


async def test_a_sample_that_a_single_reward_fails_dies_alone_or_dooms_the_group(redis_run, make_config):
    single = {"use": "rewards_for_tests:by_text", "name": "single"}
    for cursor, on_failure in enumerate(["drop_sample", "dead"]):
        config = make_config("group_rewards_for_tests:Rank", single | {"on_failure": on_failure})
        async with open_ledgers(config, redis_run.run_dir) as ledgers:
            await put_whole(ledgers.train, cursor, ["4", "raise", "5"])
            async with worker(config, redis_run.run_dir, ledgers):
                if on_failure == "dead":
                    await until_dead(ledgers.train, cursor)
                else:
                    await until_closed(ledgers.train, [cursor])
            if on_failure == "dead":
                why = {letter.sample: letter.why for letter in await ledgers.train.dead_letters() if letter.group_id}
                assert set(why) == {1, None}
                assert "not amused" in why[None]
            else:
                found, causes = await scores(ledgers.train, cursor)
                assert (set(found), set(causes)) == ({0, 2}, {1})
            assert not await faults(ledgers.train)


async def test_a_comparison_behind_a_gate_sees_what_passed_it(redis_run, make_config):
    gate = {"use": "exact_match", "gate": 1}
    config = make_config(gate, {"use": "group_rewards_for_tests:Rank", "name": "rank"}, scoring={"gated": -1})
    async with open_ledgers(config, redis_run.run_dir) as ledgers:
        await put_whole(ledgers.train, 0, ["4", "no", " 4"])
        await put_whole(ledgers.train, 1, ["no", "nein"])
        async with worker(config, redis_run.run_dir, ledgers):
            await until_closed(ledgers.train, [0, 1])
        found, _ = await scores(ledgers.train, 0)
        assert {k: score.value for k, score in found.items()} == {0: 0.0, 1: -1.0, 2: 1.0}
        assert found[2].parts["rank/of"] == 2.0
        assert "rank" not in found[1].parts
        assert await values(ledgers.train, 1) == {0: -1.0, 1: -1.0}


async def test_groups_in_flight_when_the_rewards_begin_to_compare(redis_run, make_config):
    """Half of a group was scored sample by sample: all of it is scored again, together."""
    config = make_config("group_rewards_for_tests:Rank")
    async with open_ledgers(config, redis_run.run_dir) as ledgers:
        await put(ledgers.train, 0, ["333", "22", "1"])
        await admit(ledgers.train, 1, samples=2, prompt=wire.encode(prompt()))
        (half,) = await lease(ledgers.train, "prompts")
        await ledgers.train.emit(half, 0, wire.encode(response("1")))
        (sample,) = await lease(ledgers.train, "rollouts", "reward.0-before")
        await ledgers.train.score(sample, wire.encode(wire.SampleScore(value=99.0)))
        async with worker(config, redis_run.run_dir, ledgers):
            await until_closed(ledgers.train, [0])
            await ledgers.train.emit(half, 1, wire.encode(response("22")))
            await until_closed(ledgers.train, [1])
        for group_id, want in ((0, {0: 2.0, 1: 1.0, 2: 0.0}), (1, {0: 0.0, 1: 1.0})):
            assert await values(ledgers.train, group_id) == want
        assert not await ledgers.train.dead_letters()
        assert not await faults(ledgers.train)


async def test_groups_in_flight_when_no_reward_compares_any_more(redis_run, make_config):
    config = make_config("group_rewards_for_tests:sync_rank")
    async with open_ledgers(config, redis_run.run_dir) as ledgers:
        await put_whole(ledgers.train, 0, ["333", "22"])
        async with worker(config, redis_run.run_dir, ledgers):
            await until_closed(ledgers.train, [0])
            assert not (await ledgers.train.state()).group_scored
            await put(ledgers.train, 1, ["1"])
            await until_closed(ledgers.train, [1])
        assert await values(ledgers.train, 0) == {0: 3.0, 1: 2.0}
        assert not await faults(ledgers.train)


async def test_redis_that_is_killed_and_restarted_costs_no_group(redis_run, make_config):
    config = make_config("group_rewards_for_tests:Rank")
    async with open_ledgers(config, redis_run.run_dir) as ledgers:
        await put_whole(ledgers.train, 0, ["1", "22"])
        async with worker(config, redis_run.run_dir, ledgers):
            await until_closed(ledgers.train, [0])
            redis_run.restart()
            await put_whole(ledgers.train, 1, ["1", "22"])
            await until_closed(ledgers.train, [1])
        assert not await faults(ledgers.train)


async def test_a_drain_hands_a_group_back_whole(redis_run, make_config, tmp_path):
    config = make_config("group_rewards_for_tests:WaitsInTheMiddle")
    config = config.model_copy(update={"supervisor": config.supervisor.model_copy(update={"drain_deadline": 2.0})})
    async with open_ledgers(config, redis_run.run_dir) as ledgers:
        await put_whole(ledgers.train, 0, ["a", "b"], metadata={"folder": str(tmp_path)})
        async with worker(config, redis_run.run_dir, ledgers):
            await until(lambda: list(tmp_path.glob("in-*")))
        [row] = await ledgers.connection.read("XPENDING", ledgers.train.keys.rollouts, "g", "-", "+", 10)
        assert (row[1], row[3]) == (b"handed-back", 0)
        (tmp_path / "go").touch()
        async with worker(config, redis_run.run_dir, ledgers):
            await until_closed(ledgers.train, [0])
        assert not await faults(ledgers.train)


async def test_a_worker_killed_in_the_middle_of_a_group_loses_nothing(redis_run, make_config, tmp_path):
    config = make_config("group_rewards_for_tests:WaitsInTheMiddle", lease_seconds=1.0)
    async with open_ledgers(config, redis_run.run_dir) as ledgers:
        with Workers(config, redis_run.run_dir) as workers:
            for cursor in range(2):
                await put_whole(ledgers.train, cursor, ["a", "b", "c"], metadata={"folder": str(tmp_path)})
            workers.start()
            await until(lambda: list(tmp_path.glob("in-*")))
            workers.kill()
            (tmp_path / "go").touch()
            workers.start()
            await until_closed(ledgers.train, [0, 1])
            assert workers.end() == 0
        for cursor in range(2):
            assert await values(ledgers.train, cursor) == {0: 0.0, 1: 1.0, 2: 2.0}
        assert not await faults(ledgers.train)


@pytest.mark.slow
async def test_a_group_that_kills_the_worker_is_dead_in_the_end_and_no_innocent_with_it(redis_run, make_config):
    config = make_config("group_rewards_for_tests:KillsItsProcess", lease_seconds=0.9)
    async with open_ledgers(config, redis_run.run_dir) as ledgers:
        with Workers(config, redis_run.run_dir) as workers:
            for cursor in range(6):
                await put_whole(ledgers.train, cursor, ["fine", "fine", "poison" if cursor == 2 else "fine"])
            workers.start(0)
            workers.start(1)
            async with asyncio.timeout(100):
                while not await ledgers.train.live() == await ledgers.train.closed() == [0, 1, 3, 4, 5]:
                    workers.keep()
                    await ledgers.train.wait_closed(0.2)
        assert workers.deaths >= config.lease.max_deliveries
        letters = await ledgers.train.dead_letters()
        assert [(letter.group_id, letter.sample) for letter in letters] == [(2, 0), (2, 1), (2, 2), (2, None)]
        assert all("holders died of it" in letter.why for letter in letters[:3])
        assert not await faults(ledgers.train)
