"""The reward worker against a real Redis, in this process and as processes that are killed.

Samples are scored one by one, or whole groups when a reward of the run compares.
"""

import asyncio
import contextlib
import time

import orjson
import pytest

from streamrl import wire
from streamrl.config import LeaseConfig
from streamrl.consumers import worker as worker_module
from streamrl.consumers.worker import run_reward_worker
from streamrl.errors import ConfigError
from streamrl.monitor.snapshot import take
from streamrl.queues import Role, open_ledgers
from streamrl.queues.records import Cause, ReplayOutcome
from streamrl.sandbox import Sandbox
from tests.consumers.samples import prompt, response
from tests.consumers.worker_kit import Workers, put, put_whole, scores, until_closed, until_dead, values, worker
from tests.queues.ledger_kit import admit, faults, lease, replay, until

HALF = "\ud83d"  # the first half of a character of two, as `json.loads` makes it of what a model wrote
SPOILT = {"use": "rewards_for_tests:Spoilt", "name": "spoilt"}
WAITS = [("rewards_for_tests:waits_in_the_middle", put), ("group_rewards_for_tests:WaitsInTheMiddle", put_whole)]
SCORES = [("exact_match", put), ("group_rewards_for_tests:Rank", put_whole)]


@pytest.fixture
def ledgers_of(redis_run):
    """The ledgers of a run for the length of a block; they must be sound at its end."""

    @contextlib.asynccontextmanager
    async def opened(config):
        async with open_ledgers(config, redis_run.run_dir) as ledgers:
            yield ledgers
            for ledger in (ledgers.train, ledgers.evaluation):
                assert not await faults(ledger)

    return opened


def recorded(redis_run):
    """The lines that the worker has recorded."""
    return map(orjson.loads, (redis_run.run_dir / "metrics" / "reward.0.jsonl").read_bytes().splitlines())


async def put_garbage(ledger, cursor, samples=1):
    """A group whose prompt cannot be decoded."""
    await admit(ledger, cursor, samples=samples, prompt=b"\xc1 garbage")
    (held,) = await lease(ledger, "prompts")
    for number in range(samples):
        await ledger.emit(held, number, wire.encode(response("4")))


# --- samples ----------------------------------------------------------------------------------------------------------


async def test_samples_of_both_ledgers_are_scored(redis_run, make_config, ledgers_of):
    config = make_config()
    async with ledgers_of(config) as ledgers:
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
    (line,) = [line for line in recorded(redis_run) if line["scored"] == 4 and "mean" in line]
    assert (line["failed"], line["mean"]) == (0, 0.5)


async def test_a_weak_sandbox_is_in_the_status(redis_run, make_config, ledgers_of, monkeypatch):
    config = make_config()
    monkeypatch.setattr(Sandbox, "weakness", "no filter")
    async with ledgers_of(config) as ledgers, worker(config, redis_run.run_dir, ledgers) as role:
        await until(lambda: role.status.get("sandbox") == "no filter")


async def test_a_reward_that_raises_hangs_or_returns_nonsense_kills_the_sample_and_nothing_else(
    redis_run, make_config, ledgers_of
):
    config = make_config("rewards_for_tests:by_text", deadline=0.2)
    async with ledgers_of(config) as ledgers:
        await put(ledgers.train, 0, ["4", "raise", "hang", "nan", "string", "5"])
        await put(ledgers.train, 1, ["raise", "raise"])
        async with worker(config, redis_run.run_dir, ledgers) as role:
            await until_closed(ledgers.train, [0])
            found, causes = await scores(ledgers.train, 0)
            letters = await until_dead(ledgers.train, 1)
            await until(lambda: role.status.get("failed") == 6)
        assert {number: score.value for number, score in found.items()} == {0: 1.0, 5: 0.0}
        assert set(causes) == {1, 2, 3, 4}
        assert "ValueError: the judge is not amused" in causes[1]
        assert "no score within 0.2 s" in causes[2]
        assert "nan" in causes[3]
        assert "'1.0' (str), not a number" in causes[4]
        assert letters[0, 1].stage == "reward"
        assert "Traceback" in letters[0, 1].detail
        assert letters[1, None].stage == "close", "no sample of this group is left"


async def test_failures_are_one_line_a_second_with_their_number(redis_run, make_config, ledgers_of, caplog):
    config = make_config("rewards_for_tests:by_text")
    began = time.monotonic()
    async with ledgers_of(config) as ledgers:
        for cursor in range(10):
            await put(ledgers.train, cursor, ["raise"] * 20)
        async with worker(config, redis_run.run_dir, ledgers) as role:
            await until(lambda: role.status.get("failed") == 200)
    lines = [record for record in caplog.records if record.msg == "samples failed: %d"]
    assert sum(record.args[0] for record in lines) == 200
    assert len(lines) <= time.monotonic() - began
    assert "not amused" in lines[-1].why


async def test_bytes_that_are_no_message_are_a_dead_letter_at_once(redis_run, make_config, ledgers_of):
    good = wire.encode(response("4"))
    newer = good.replace(b"\xa1v\x01", b"\xa1v\x63") if b"\xa1v\x01" in good else None
    foreign = [b"", b"\x00", good[:-7], b"\x93\x01\x02\x03", wire.encode(prompt()), *([newer] if newer else [])]
    config = make_config(attempts=3, backoff=60)
    async with ledgers_of(config) as ledgers:
        await put(ledgers.train, 0, ["4", *foreign])
        await put_garbage(ledgers.train, 1)
        async with worker(config, redis_run.run_dir, ledgers) as role:
            await until_closed(ledgers.train, [0])
            await until(lambda: role.status.get("failed") == len(foreign) + 1)
        found, causes = await scores(ledgers.train, 0)
        assert set(found) == {0}
        assert len(causes) == len(foreign)
        assert all(cause.startswith("wire: ") for cause in causes.values())
        assert {letter.group_id for letter in await ledgers.train.dead_letters()} == {0, 1}


async def test_dead_takes_the_whole_group_and_a_replay_brings_it_back(redis_run, make_config, ledgers_of):
    config = make_config({"use": "rewards_for_tests:by_text", "on_failure": "dead"})
    async with ledgers_of(config) as ledgers:
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


async def test_retry_waits_for_a_service_that_comes_back_and_loses_nothing(
    redis_run, make_config, ledgers_of, tmp_path
):
    config = make_config({"use": "rewards_for_tests:away_until", "on_failure": "retry"}, attempts=1)
    async with ledgers_of(config) as ledgers:
        await put(ledgers.train, 0, ["a"] * 6, metadata={"folder": str(tmp_path)})
        async with worker(config, redis_run.run_dir, ledgers) as role:
            await until(lambda: "nobody scores" in str(role.status.get("rewards")))
            assert not await ledgers.train.closed()
            (tmp_path / "back").touch()
            await until_closed(ledgers.train, [0])
        assert await values(ledgers.train, 0) == dict.fromkeys(range(6), 1.0)
        assert not await ledgers.train.dead_letters()


async def test_a_service_that_stays_away_for_many_leases_kills_no_sample(
    redis_run, make_config, ledgers_of, tmp_path, caplog, monkeypatch
):
    """By default, without `retry`: samples go back before they were held for too long, more often than any may die."""
    caplog.set_level("INFO", "streamrl.queues.leases")
    monkeypatch.setattr(worker_module, "HOLD_SHARE", 0.01)  # so that nothing is buried on a slow host
    config = make_config({"use": "rewards_for_tests:away_until", "deadline": 0.05}, attempts=1, concurrency=2)
    config = config.model_copy(update={"lease": LeaseConfig(seconds=0.5, max_hold=30, max_deliveries=3)})
    async with ledgers_of(config) as ledgers:
        await put(ledgers.train, 0, ["a"] * 3, metadata={"folder": str(tmp_path)})
        async with worker(config, redis_run.run_dir, ledgers):
            await until(lambda: sum(line.message == "given back" for line in caplog.records) > 12, seconds=120)
            assert not await ledgers.train.closed()
            (tmp_path / "back").touch()
            await until_closed(ledgers.train, [0])
        assert await values(ledgers.train, 0) == dict.fromkeys(range(3), 1.0)
        assert not await ledgers.train.dead_letters()


async def test_gate_composition_and_overlong_reach_redis_and_the_figures_the_screens(
    redis_run, make_config, ledgers_of
):
    rewards = (
        {"use": "rewards_for_tests:by_text", "gate": 1, "name": "right"},
        {"use": "rewards_for_tests:costs", "weight": 0.5, "name": "judge", "clip": [0, 1]},
    )
    config = make_config(*rewards, scoring={"gated": -1, "overlong": {"buffer": 254}})
    async with ledgers_of(config) as ledgers:
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
    lines = [line["rewards"]["judge"] for line in recorded(redis_run) if "judge" in line.get("rewards", {})]
    (judge,) = [line for line in lines if line["ok"]]
    assert (judge["values"], judge["tokens"]) == ({"3": 1}, 11)


async def test_a_reward_that_cannot_be_opened_ends_the_worker_with_its_reason(redis_run, make_config, ledgers_of):
    config = make_config({"use": "rewards_for_tests:NeedsModel"})
    async with ledgers_of(config) as ledgers:
        role = Role("reward.0", config, redis_run.run_dir, ledgers)
        with pytest.raises(ConfigError, match="no model critic"):
            await run_reward_worker(role)
        assert not role.is_ready


@pytest.mark.parametrize("whole", [False, True])
async def test_what_cannot_be_written_down_costs_its_samples_and_no_worker(
    redis_run, make_config, ledgers_of, monkeypatch, whole
):
    monkeypatch.setattr(wire, "MAX_MESSAGE_BYTES", 4096)
    config = make_config(SPOILT, *(["group_rewards_for_tests:Rank"] if whole else []))
    texts = ["fine", "raise", "part", "large", "fine"]
    async with ledgers_of(config) as ledgers:
        await (put_whole if whole else put)(ledgers.train, 0, texts)
        async with worker(config, redis_run.run_dir, ledgers) as role:
            await until_closed(ledgers.train, [0])
            await until(lambda: (role.status.get("scored"), role.status.get("failed")) == (2, 3))
            shown = orjson.loads(role.status["rewards"])["spoilt"]
        found, causes = await scores(ledgers.train, 0)
        assert set(found) == {0, 4}
        assert "ValueError: unknown ?" in causes[1]
        assert "half a character" in causes[2]
        assert "over the limit of the wire" in causes[3]
        assert "cannot count: TypeError" in shown["trouble"]
        assert "own" not in shown


async def test_reasons_reach_redis_whatever_is_in_them(redis_run, make_config):
    async with open_ledgers(make_config(), redis_run.run_dir) as ledgers:
        train = ledgers.train
        await admit(train, 0, samples=2, min_group=1)
        (held,) = await lease(train, "prompts")
        for number in range(2):
            await train.emit(held, number, b"payload")
        first, second = await lease(train, "rollouts", count=2)
        assert await train.fail_score(first, f"why {HALF}", f"detail {HALF}")
        await train.score(second, b"score")
        assert (await train.read_group(0)).causes == {0: "why ?"}
        await train.set_group_scored(True)
        await admit(train, 1, samples=1, min_group=1)
        (held,) = await lease(train, "prompts")
        await train.emit(held, 0, b"payload")
        (whole,) = await lease(train, "rollouts")
        await train.score_group(whole, {}, {0: Cause(HALF, HALF)}, fail_group=HALF)
        assert {letter.why for letter in await train.dead_letters() if letter.group_id == 1} == {"?"}


# --- whole groups -----------------------------------------------------------------------------------------------------


async def test_single_and_comparing_rewards_make_one_score(redis_run, make_config, ledgers_of):
    rank = {"use": "group_rewards_for_tests:Rank", "name": "rank", "weight": 10}
    config = make_config(rank, {"use": "group_rewards_for_tests:sync_rank", "name": "length"}, {"use": "exact_match"})
    async with ledgers_of(config) as ledgers:
        await put_whole(ledgers.train, 0, ["333", "22", "4", "55555"])
        await put_whole(ledgers.train, 1, ["333", b"\x00", "1", b""])
        await put_whole(ledgers.evaluation, 0, ["1"], least=1)
        async with worker(config, redis_run.run_dir, ledgers) as role:
            await until_closed(ledgers.train, [0, 1])
            await until_closed(ledgers.evaluation, [0])
            await until(lambda: role.status.get("scored") == 7)
            state = await ledgers.train.state()
        found, causes = await scores(ledgers.train, 0)
        assert state.group_scored
        assert not causes
        assert {k: score.value for k, score in found.items()} == {0: 23.0, 1: 12.0, 2: 2.0, 3: 35.0}
        assert found[2].parts == {"rank": 0.0, "rank/of": 4.0, "length": 1.0, "exact_match": 1.0}
        found, causes = await scores(ledgers.train, 1)
        assert {k: score.parts["rank"] for k, score in found.items()} == {0: 1.0, 2: 0.0}
        assert set(causes) == {1, 3}, "what cannot be decoded is not compared"
        assert all(cause.startswith("wire: ") for cause in causes.values())
        assert found[0].parts["rank/of"] == 2.0
        alone, _ = await scores(ledgers.evaluation, 0)
        assert alone[0].parts["rank/of"] == 1.0


async def test_a_comparison_that_fails_kills_its_group_and_no_other(redis_run, make_config, ledgers_of):
    config = make_config("group_rewards_for_tests:ByText", deadline=0.3)
    wrong = {
        "raise": "cannot compare", "hang": "no score within", "nan": "nan", "short": "2 scores for 3",
        "number": "a float, not a sequence of 3",
    }  # fmt: skip
    async with ledgers_of(config) as ledgers:
        for cursor, text in enumerate(wrong):
            await put_whole(ledgers.train, cursor, ["a", text, "b"])
        await put_whole(ledgers.train, 5, ["a", "b"])
        async with worker(config, redis_run.run_dir, ledgers) as role:
            await until_closed(ledgers.train, [5])
            letters = await until_dead(ledgers.train, *range(5))
            await until(lambda: (role.status.get("scored"), role.status.get("failed")) == (2, 15))
        assert set(letters) == {(group_id, sample) for group_id in range(5) for sample in (0, 1, 2, None)}
        assert {letter.stage for (_, sample), letter in letters.items() if sample is not None} == {"reward"}
        for group_id, why in enumerate(wrong.values()):
            assert why in letters[group_id, 0].why
            assert "2 attempts" in letters[group_id, 0].why


async def test_a_group_that_cannot_close_any_more_is_not_compared(redis_run, make_config, ledgers_of):
    config = make_config("group_rewards_for_tests:ThatNobodyMayAsk")
    async with ledgers_of(config) as ledgers:
        await put_whole(ledgers.train, 0, ["333", b"\x00", b""], least=2)
        await put_whole(ledgers.train, 1, [b"\xc1"], least=1)
        await put_garbage(ledgers.train, 2, samples=2)
        async with worker(config, redis_run.run_dir, ledgers) as role:
            letters = await until_dead(ledgers.train, 0, 1, 2)
            await until(lambda: role.status.get("failed") == 6)
        assert letters[0, 0].why == "1 of 3 samples left to compare"
        assert letters[2, 0].why.startswith("wire: ")


@pytest.mark.parametrize("on_failure", ["drop_sample", "dead"])
async def test_a_sample_that_a_single_reward_fails_dies_alone_or_fails_the_group(
    redis_run, make_config, ledgers_of, on_failure
):
    single = {"use": "rewards_for_tests:by_text", "name": "single", "on_failure": on_failure}
    config = make_config("group_rewards_for_tests:Rank", single)
    async with ledgers_of(config) as ledgers:
        await put_whole(ledgers.train, 0, ["4", "raise", "5"])
        async with worker(config, redis_run.run_dir, ledgers):
            if on_failure == "dead":
                letters = await until_dead(ledgers.train, 0)
                assert set(letters) == {(0, 1), (0, None)}
                assert "not amused" in letters[0, None].why
            else:
                await until_closed(ledgers.train, [0])
                found, causes = await scores(ledgers.train, 0)
                assert (set(found), set(causes)) == ({0, 2}, {1})


async def test_a_comparison_behind_a_gate_sees_what_passed_it(redis_run, make_config, ledgers_of):
    gate = {"use": "exact_match", "gate": 1}
    config = make_config(gate, {"use": "group_rewards_for_tests:Rank", "name": "rank"}, scoring={"gated": -1})
    async with ledgers_of(config) as ledgers:
        await put_whole(ledgers.train, 0, ["4", "no", " 4"])
        await put_whole(ledgers.train, 1, ["no", "nein"])
        async with worker(config, redis_run.run_dir, ledgers):
            await until_closed(ledgers.train, [0, 1])
        found, _ = await scores(ledgers.train, 0)
        assert {k: score.value for k, score in found.items()} == {0: 0.0, 1: -1.0, 2: 1.0}
        assert found[2].parts["rank/of"] == 2.0
        assert "rank" not in found[1].parts
        assert await values(ledgers.train, 1) == {0: -1.0, 1: -1.0}


async def test_groups_in_flight_when_the_rewards_begin_to_compare(redis_run, make_config, ledgers_of):
    """Half of a group was scored sample by sample: all of it is scored again, together."""
    config = make_config("group_rewards_for_tests:Rank")
    async with ledgers_of(config) as ledgers:
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


async def test_groups_in_flight_when_no_reward_compares_any_more(redis_run, make_config, ledgers_of):
    config = make_config("group_rewards_for_tests:sync_rank")
    async with ledgers_of(config) as ledgers:
        await put_whole(ledgers.train, 0, ["333", "22"])
        async with worker(config, redis_run.run_dir, ledgers):
            await until_closed(ledgers.train, [0])
            assert not (await ledgers.train.state()).group_scored
            await put(ledgers.train, 1, ["1"])
            await until_closed(ledgers.train, [1])
        assert await values(ledgers.train, 0) == {0: 3.0, 1: 2.0}


# --- the end of workers and of Redis ----------------------------------------------------------------------------------


async def test_a_drain_finishes_what_is_in_hand(redis_run, make_config, ledgers_of, tmp_path):
    config = make_config("rewards_for_tests:waits_in_the_middle")
    async with ledgers_of(config) as ledgers:
        await put(ledgers.train, 0, ["a", "b"], metadata={"folder": str(tmp_path)})
        async with worker(config, redis_run.run_dir, ledgers) as role:
            await until(lambda: list(tmp_path.glob("in-*")))
            role.stop.set()
            (tmp_path / "go").touch()
        assert await ledgers.train.closed() == [0]
        found, _ = await scores(ledgers.train, 0)
        assert found[0].parts == {"rewards_for_tests:waits_in_the_middle": 1.0,
                                  "rewards_for_tests:waits_in_the_middle/late": 1.0}  # fmt: skip


@pytest.mark.parametrize(("use", "puts"), WAITS)
async def test_a_drain_ends_within_its_share_and_hands_back_what_is_in_hand(
    redis_run, make_config, ledgers_of, tmp_path, use, puts
):
    config = make_config(use)
    config = config.model_copy(update={"supervisor": config.supervisor.model_copy(update={"drain_deadline": 2.0})})
    async with ledgers_of(config) as ledgers:
        samples = 1 if puts is put else 2
        await puts(ledgers.train, 0, ["a"] * samples, samples, metadata={"folder": str(tmp_path)})
        async with worker(config, redis_run.run_dir, ledgers):
            await until(lambda: list(tmp_path.glob("in-*")))
        [row] = await ledgers.connection.read("XPENDING", ledgers.train.keys.rollouts, "g", "-", "+", 10)
        assert (row[1], row[3]) == (b"handed-back", 0)
        (tmp_path / "go").touch()
        async with worker(config, redis_run.run_dir, ledgers):
            await until_closed(ledgers.train, [0])


@pytest.mark.parametrize(("use", "puts"), SCORES)
async def test_redis_that_is_killed_and_restarted_costs_nothing(redis_run, make_config, ledgers_of, use, puts):
    config = make_config(use)
    async with ledgers_of(config) as ledgers:
        await puts(ledgers.train, 0, ["4"] * 4)
        async with worker(config, redis_run.run_dir, ledgers):
            await until_closed(ledgers.train, [0])
            redis_run.restart()
            await puts(ledgers.train, 1, ["4"] * 4)
            await until_closed(ledgers.train, [1])


@pytest.mark.parametrize(("use", "puts"), WAITS)
async def test_a_worker_that_is_killed_in_the_middle_loses_nothing(
    redis_run, make_config, ledgers_of, tmp_path, use, puts
):
    config = make_config(use, lease_seconds=1.0)
    async with ledgers_of(config) as ledgers:
        with Workers(config, redis_run.run_dir) as workers:
            for cursor in range(2):
                await puts(ledgers.train, cursor, ["a", "b", "c"], metadata={"folder": str(tmp_path)})
            workers.start()
            await until(lambda: list(tmp_path.glob("in-*")))
            workers.kill()
            (tmp_path / "go").touch()
            workers.start()
            await until_closed(ledgers.train, [0, 1])
            assert workers.end() == 0
        wanted = [1.0] * 3 if puts is put else [0.0, 1.0, 2.0]
        for cursor in range(2):
            assert await values(ledgers.train, cursor) == dict(enumerate(wanted))


@pytest.mark.slow
async def test_a_sample_that_kills_the_worker_is_dead_in_the_end_and_no_innocent_with_it(
    redis_run, make_config, ledgers_of
):
    config = make_config("rewards_for_tests:kills_its_process", lease_seconds=0.9)
    async with ledgers_of(config) as ledgers:
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


@pytest.mark.slow
async def test_a_trivial_rule_scores_thousands_of_samples_a_second(redis_run, make_config, ledgers_of, capsys):
    """Not decided by a clock that other processes share: the bound is a tenth of what an idle core does."""
    config = make_config(concurrency=256)
    groups, size = 200, 32
    payload = wire.encode(response("4", tokens=64))
    async with ledgers_of(config) as ledgers:
        for cursor in range(groups):
            bounds = {"samples": size, "budget": groups, "hard_cap": groups}
            await admit(ledgers.train, cursor, prompt=wire.encode(prompt()), **bounds)
            (held,) = await lease(ledgers.train, "prompts")
            await asyncio.gather(*(ledgers.train.emit(held, number, payload) for number in range(size)))
        begun, cpu = time.perf_counter(), time.process_time()
        async with worker(config, redis_run.run_dir, ledgers):
            await until_closed(ledgers.train, range(groups))
            seconds, used = time.perf_counter() - begun, time.process_time() - cpu
    with capsys.disabled():
        print(f"\nreward worker: {groups * size / seconds:.0f} samples/s, {groups * size / used:.0f} per CPU second")
    assert groups * size / used > 500
