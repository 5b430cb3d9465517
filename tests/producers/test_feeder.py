"""The feeder neither skips nor repeats a prompt, whoever is killed, and never goes over the budget."""

import asyncio
import contextlib
import io
import random

import pytest
import replica_kit
from producer_kit import Hands, until, write_prompts
from rich.console import Console

from streamrl.commands.rundir import find_run
from streamrl.commands.status import look
from streamrl.commands.up import Look
from streamrl.commands.viewers import plain_line
from streamrl.errors import DataError, Refused
from streamrl.monitor.board import Board, Goal
from streamrl.monitor.screen import render
from streamrl.producers import admission, feeder
from streamrl.producers.admission import SameFailureGuard, VersionWatcher
from streamrl.producers.dataset import PromptLimits
from streamrl.producers.feeder import Training, run_feeder
from streamrl.producers.order import TrainingPrompts
from streamrl.producers.tokenizer import Tokenizer
from streamrl.queues.records import ReplayOutcome
from streamrl.runfile import LoadedConfig, save
from streamrl.wire import Prompt, SampleScore, decode, encode
from tests.forked import kill


def expected(run, count):
    """What each group must ask, from the pure function alone."""
    config = run.config
    data = TrainingPrompts(config, Tokenizer.load(config.model), PromptLimits(16, 64))
    return {group_id: [decode(data.prompt(group_id), Prompt).text] for group_id in range(count)}


async def test_all_epochs_in_order_within_the_budget_and_the_end_is_announced(run):
    async with run.open() as ledgers:
        hands = await Hands(ledgers.train).fence()
        async with run.running(run_feeder, "feeder.0", ledgers) as (role, _):
            await until(lambda: role.status.get("admission") == "full")
            state = await ledgers.train.state()
            assert (state.cursor, state.live) == (4, 4) == (run.config.budget, run.config.budget)
            for _ in range(20):
                await hands.step()
                state = await ledgers.train.state()
                assert state.live - state.unretired <= run.config.budget
                if state.done is not None:
                    break
            await until(lambda: role.status["admission"] == "end of data")
            await hands.step()
            assert (role.status["admitted"], role.status["epoch"]) == (10, 2)
    assert hands.prompts == expected(run, 10)
    assert sorted(text for [text] in list(hands.prompts.values())[:5]) == ["p0", "p1", "p2", "p3", "p4"]


async def test_prompts_that_are_too_long_are_never_admitted_and_counted(run):
    with run.train.open("ab") as file:
        file.write(b'{"prompt": "' + b"p0 " * 40 + b'"}\n')
    run.set("data", epochs=1, long_prompts="drop")
    async with run.open() as ledgers:
        hands = await Hands(ledgers.train).fence()
        async with run.running(run_feeder, "feeder.0", ledgers) as (role, _):
            for _ in range(20):
                await hands.step()
                if len(hands.prompts) == 5:
                    break
            await until(lambda: role.status["admission"] == "end of data")
            assert (role.status["admitted"], role.status["too_long"]) == (5, 1)
    assert sorted(text for [text] in hands.prompts.values()) == ["p0", "p1", "p2", "p3", "p4"]


async def test_a_greedy_baseline_is_one_more_sample_and_one_more_score(run):
    run.set("sampling", group_size=3, min_group=2, greedy_baseline=True).set("learner", advantage={"use": "remax"})
    async with run.open() as ledgers:
        async with run.running(run_feeder, "feeder.0", ledgers) as (role, _):
            await until(lambda: role.status.get("admission") == "full")
        sizes = await ledgers.connection.read("HMGET", ledgers.train.keys.group(0), "n", "m")
        assert [int(size) for size in sizes] == [4, 3]
        run.set("sampling", greedy_baseline=False).set("learner", advantage={"use": "grpo"})
        with pytest.raises(Refused):
            await run_feeder(run.role("feeder.0", ledgers))


async def test_a_clean_restart_goes_on_at_the_cursor(run):
    async with run.open() as ledgers:
        hands = await Hands(ledgers.train).fence()
        for want in (4, 8, 10):
            async with run.running(run_feeder, "feeder.0", ledgers) as (role, _):
                await until(lambda want=want, role=role: role.status.get("admitted") == want)
            await hands.step()
    assert hands.prompts == expected(run, 10)


@pytest.mark.slow
async def test_kill_9_of_the_feeder_at_any_moment(run):
    run.set("data", epochs=20).set("learner", groups_per_step=8)
    choice = random.Random(5)
    async with run.open() as ledgers:
        hands = await Hands(ledgers.train).fence()
        process, kills = None, 0
        try:
            while (await ledgers.train.state()).done is None:
                if process is None:
                    process = run.spawn(run_feeder, "feeder.0")
                before = (await ledgers.train.state()).cursor
                assert process.exitcode is None
                await until(lambda before=before: moved(ledgers.train, before))
                if kills < 3:  # somewhere in the middle of a burst of admissions
                    await hands.step()
                    await asyncio.sleep(choice.random() * 0.01)
                    await asyncio.to_thread(kill, process)
                    process, kills = None, kills + 1
                while await hands.answer() or await hands.score():
                    pass
                await hands.publish()
                await hands.retire()
        finally:
            if process is not None:
                kill(process)
        await hands.step()
        assert (await ledgers.train.state()).live == 0
    assert kills == 3
    assert hands.prompts == expected(run, 100)


async def moved(ledger, cursor):
    state = await ledger.state()
    return state.done is not None or state.cursor > cursor


async def test_other_data_another_seed_or_group_size_are_refused(run):
    async with run.open() as ledgers:
        async with run.running(run_feeder, "feeder.0", ledgers) as (role, _):
            await until(lambda: role.status.get("admitted") == 4)
        run.set("data", epochs=3)
        async with run.running(run_feeder, "feeder.0", ledgers) as (role, _):
            await until(lambda: role.status.get("admission") == "full")  # one more epoch is the same data
        for section, key, value in ((None, "seed", 1), ("sampling", "group_size", 3), ("data", "shuffle", False)):
            before = run.overrides if section is None else run.overrides[section]
            old = before.get(key)
            run.set(section, **{key: value})
            with pytest.raises(Refused) as caught:
                await run_feeder(run.role("feeder.0", ledgers))
            assert caught.value.exit_code == 78
            before.pop(key) if old is None else before.update({key: old})
        write_prompts(run.train, 6)
        with pytest.raises(Refused):
            await run_feeder(run.role("feeder.0", ledgers))
        run.train.write_text("{")
        with pytest.raises(DataError, match=r"train\.jsonl:1"):
            await run_feeder(run.role("feeder.0", ledgers))
        assert (await ledgers.train.state()).cursor == 4


async def test_too_many_dead_letters_end_the_feeder_and_nothing_in_flight_is_lost(run):
    run.set(None, max_dead=2)
    async with run.open() as ledgers:
        hands = await Hands(ledgers.train).fence()
        async with run.running(run_feeder, "feeder.0", ledgers, stop=False) as (role, task):
            await until(lambda: role.status.get("admission") == "full")
            leases = await hands.lease(ledgers.train.keys.prompts)
            await ledgers.train.fail_prompt(leases[0], "broken")
            await ledgers.train.fail_sample(leases[1], 0, "broken")
            with pytest.raises(Refused, match=r"dead letters, max_dead is 2: .* most of them: broken") as caught:
                await asyncio.wait_for(task, 30)
        assert caught.value.exit_code == 78
        assert "streamrl dead ls" in caught.value.hint
        assert (await ledgers.train.state()).live == len(leases) - 1
        await ledgers.train.drop_dead([letter.entry for letter in await ledgers.train.dead_letters()])
        cursor = (await ledgers.train.state()).cursor
        async with run.running(run_feeder, "feeder.0", ledgers) as (role, _):  # somebody has looked at them
            await until(lambda: moved(ledgers.train, cursor))


async def bury_all(ledgers, hands):
    """Every group that is there dies; returns how many did."""
    leases = await hands.lease(ledgers.train.keys.prompts)
    for one in leases:
        await ledgers.train.fail_prompt(one, "broken")
    return len(leases)


async def test_dead_groups_that_are_replayed_are_admitted_as_room_comes(run):
    """All of them, within the budget, also when the feeder is cut off in between; `max_dead` does not stop them."""
    async with run.open() as ledgers:
        train = ledgers.train
        hands = await Hands(train).fence()
        async with run.running(run_feeder, "feeder.0", ledgers) as (role, _):
            dead = 0
            while dead < 10:
                dead += await bury_all(ledgers, hands)
                await asyncio.sleep(0)
        assert set((await train.queue_replays(range(10))).values()) == {ReplayOutcome.QUEUED}
        run.set(None, max_dead=1)
        async with run.running(run_feeder, "feeder.0", ledgers, stop=False):
            await until(lambda: is_full(train, run.config.budget))
            assert (await train.state()).replays == 10 - run.config.budget
        async with run.running(run_feeder, "feeder.0", ledgers) as (role, _):
            await until(lambda: role.status.get("replays") == 10 - run.config.budget)
            while (await train.state()).replays:
                await hands.step()
                state = await train.state()
                assert state.live - state.unretired <= run.config.budget
            await until(lambda: role.status.get("admission") == "end of data")
            assert "replays" not in role.status
            await hands.step()
        state = await train.state()
        assert (state.cursor, state.live, state.retired, state.dead) == (10, 0, 10, 0)
    assert hands.prompts == expected(run, 10)


class Scoring:
    """A reward worker by hand; `cause(group_id, sample)` is why a sample dies, None scores it."""

    def __init__(self, hands, cause):
        self.hands, self.cause = hands, cause

    async def once(self):
        await self.hands.answer(0)
        for one in await self.hands.lease(self.hands.ledger.keys.rollouts):
            why = self.cause(one.group_id, one.sample)
            if why is None:
                await self.hands.ledger.score(one, encode(SampleScore(value=1.0)))
            else:
                await self.hands.ledger.fail_score(one, why)

    async def until(self, condition):
        async with asyncio.timeout(60):
            while not condition():
                await self.once()
                await asyncio.sleep(0)


def broken(group_id, sample):
    return f"ValueError: I cannot read 'response {group_id}' (3 attempts) [mine]"


async def test_a_run_in_which_all_fail_alike_ends_early_and_names_the_cause(run):
    run.set("data", epochs=100)
    async with run.open() as ledgers:
        scoring = Scoring(await Hands(ledgers.train).fence(), broken)
        async with run.running(run_feeder, "feeder.0", ledgers, stop=False) as (_, task):
            await scoring.until(task.done)
            with pytest.raises(
                Refused, match=r"failed with the same error, and none has a score: ValueError: I cannot read"
            ) as caught:
                await task
        assert caught.value.exit_code == 78
        assert "streamrl dead replay all" in caught.value.hint
        state = await ledgers.train.state()
        assert 32 <= state.dead < 120  # long before max_dead
        async with run.running(run_feeder, "feeder.0", ledgers) as (_, task):  # mended: what is old does not count
            scoring.cause = lambda group_id, sample: None
            cursor = state.cursor
            while (await ledgers.train.state()).cursor < cursor + 8:
                await scoring.once()
                await scoring.hands.publish()
                await scoring.hands.retire()
            scoring.cause = broken  # and later failures are no reason to end: the run has had scores
            while (await ledgers.train.state()).cursor < cursor + 40:
                await scoring.once()
            assert not task.done()


@pytest.mark.parametrize(
    "cause",
    [
        lambda group_id, sample: (
            broken(group_id, sample) if sample or group_id else None
        ),  # one has a score, in a group that dies
        lambda group_id, sample: broken(group_id, sample) if group_id != 7 else "TypeError: another one [mine]",
        lambda group_id, sample: broken(group_id, sample) if group_id % 5 == 0 else None,
    ],
)
async def test_a_run_in_which_not_all_fail_alike_goes_on(run, cause):
    run.set("data", epochs=100).set("sampling", min_group=2)
    async with run.open() as ledgers:
        scoring = Scoring(await Hands(ledgers.train).fence(), cause)
        async with run.running(run_feeder, "feeder.0", ledgers) as (_, task):
            while (await ledgers.train.state()).dead < 60:
                await scoring.once()
                await scoring.hands.publish()
                await scoring.hands.retire()
            assert not task.done()


class AnsweredGroups:
    """Groups of four samples, all answered, that no reward has judged yet, and the guard that looks at them."""

    @classmethod
    async def of(cls, run, train, count):
        found = cls()
        found.train, found.guard = train, SameFailureGuard(train)
        await found.guard.begin()
        await replica_kit.admit(run, train, count, samples=4)
        hands = Hands(train)
        await hands.answer()
        found.waiting = await hands.lease(train.keys.rollouts)
        return found

    async def fail(self, *, group_ids=range(100), samples=range(4)):
        for one in [one for one in self.waiting if one.group_id in group_ids and one.sample in samples]:
            self.waiting.remove(one)
            await self.train.fail_score(one, broken(one.group_id, one.sample))

    async def score_one(self):
        await self.train.score(self.waiting.pop(0), encode(SampleScore(value=1.0)))


@pytest.mark.parametrize("rest_fails", [True, False])
async def test_fast_failures_end_no_run_while_other_samples_of_their_groups_are_judged(run, rest_fails):
    async with run.open() as ledgers:
        groups = await AnsweredGroups.of(run, ledgers.train, 20)
        await groups.fail(samples=range(2))
        await groups.guard.check()
        if not rest_fails:
            await groups.score_one()
        await groups.fail(samples=range(2, 4))
        if rest_fails:
            with pytest.raises(Refused, match="80 responses to 20 prompts failed with the same error"):
                await groups.guard.check()
        else:
            await groups.guard.check()


@pytest.mark.parametrize("oldest_fails", [True, False])
async def test_groups_that_died_fast_end_no_run_while_an_older_one_is_judged(run, oldest_fails):
    async with run.open() as ledgers:
        groups = await AnsweredGroups.of(run, ledgers.train, 20)
        await groups.fail(group_ids=range(1, 20))
        await groups.guard.check()
        if not oldest_fails:
            await groups.score_one()
        await groups.fail(group_ids=[0])
        if oldest_fails:
            with pytest.raises(Refused, match="80 responses to 20 prompts failed with the same error"):
                await groups.guard.check()
        else:
            await groups.guard.check()


async def test_a_group_that_dies_while_the_guard_looks_is_seen_at_the_next_look(run, monkeypatch):
    async with run.open() as ledgers:
        groups = await AnsweredGroups.of(run, ledgers.train, 20)
        await groups.fail(group_ids=range(1, 20))
        read = ledgers.train.oldest_live

        async def dies_after_the_read(count):
            found = await read(count)
            await groups.fail()
            return found

        monkeypatch.setattr(ledgers.train, "oldest_live", dies_after_the_read)
        await groups.guard.check()
        with pytest.raises(Refused, match="80 responses to 20 prompts failed with the same error"):
            await groups.guard.check()


async def test_a_replay_that_admits_nothing_uses_up_no_trial_of_a_run_that_drops_too_much(run):
    async with run.open() as ledgers:
        training = make_training(run, ledgers)
        await training.check()
        await replica_kit.admit(run, ledgers.train, 2)
        for one in await Hands(ledgers.train).lease(ledgers.train.keys.prompts):
            await ledgers.train.fail_prompt(one, "broken")
        await ledgers.train.queue_replays([0, 1])
        [thrown_away] = [
            one.entry for one in await ledgers.train.dead_letters() if (one.group_id, one.sample) == (0, None)
        ]
        await ledgers.train.drop_dead([thrown_away])
        training._drops.allowed = 2
        await training._replay()
        assert (await ledgers.train.state()).live == 1
        assert training._drops.allowed == 1


def make_training(run, ledgers):
    tokenizer = Tokenizer.load(run.config.model)
    data = TrainingPrompts(run.config, tokenizer, PromptLimits(16, run.config.model.context))
    return Training(run.role("feeder.0", ledgers), data, VersionWatcher(ledgers.weights))


async def is_full(ledger, budget):
    return (await ledger.state()).live == budget


async def test_fewer_epochs_than_were_begun_end_the_data_where_it_stands(run):
    async with run.open() as ledgers:
        hands = await Hands(ledgers.train).fence()
        async with run.running(run_feeder, "feeder.0", ledgers) as (role, _):
            await until(lambda: role.status.get("admitted") == 4)
            await hands.step()
            await until(lambda: role.status.get("admitted") == 8)
        run.set("data", epochs=1)
        asked = []
        finish = ledgers.train.finish

        async def counted(*arguments):
            asked.append(arguments)
            return await finish(*arguments)

        ledgers.train.finish = counted
        async with run.running(run_feeder, "feeder.0", ledgers) as (role, _):
            await until(lambda: role.status.get("admission") == "end of data")
            await asyncio.sleep(0.3)
        state = await ledgers.train.state()
        assert (state.done, state.cursor, state.epochs) == (8, 8, 1)
        assert len(asked) <= 3
        run.set("data", epochs=2)
        async with run.running(run_feeder, "feeder.0", ledgers) as (role, _):  # and on again with more
            while (await ledgers.train.state()).done != 10:
                await hands.step()
        await hands.step()
    assert hands.prompts == expected(run, 10)


async def test_a_cursor_that_moves_while_the_end_is_announced_is_asked_for_with_pauses(run):
    async with run.open() as ledgers:
        hands = await Hands(ledgers.train).fence()
        asked = []

        async def refuses(*arguments):
            asked.append(arguments)
            return False

        ledgers.train.finish = refuses
        async with run.running(run_feeder, "feeder.0", ledgers) as (role, _):
            while role.status.get("admitted") != 10:
                await hands.step()
            await until(lambda: asked)
            asked.clear()
            await asyncio.sleep(0.5)
            assert len(asked) <= 12


async def test_redis_goes_back_in_time_and_the_same_prompts_come_again(run):
    async with run.open() as ledgers:
        hands = await Hands(ledgers.train).fence()
        read = ledgers.connection.read
        keys = ledgers.train.keys
        async with run.running(run_feeder, "feeder.0", ledgers) as (role, _):
            while (await ledgers.train.state()).done is None:
                await hands.step()
            await until(lambda: role.status.get("admission") == "end of data")
            await hands.step()
            await read("HSET", keys.state, "cursor", "7")  # as after a failover: the last three were never admitted
            await read("HDEL", keys.state, "done")
            again = Hands(ledgers.train)
            await until(lambda: finished(ledgers.train))
            while await again.answer():
                pass
    assert again.prompts == {group_id: prompt for group_id, prompt in expected(run, 10).items() if group_id >= 7}


async def finished(ledger):
    return (await ledger.state()).done == 10


async def test_redis_is_killed_under_the_feeder(run):
    async with run.open() as ledgers:
        hands = await Hands(ledgers.train).fence()
        async with run.running(run_feeder, "feeder.0", ledgers) as (role, _):
            await until(lambda: role.status.get("admission") == "full")
            run.redis_run.kill()
            await asyncio.to_thread(run.redis_run.restart)
            while (await ledgers.train.state()).done is None:
                await hands.step()
            await hands.step()
    texts = {group_id: set(prompts) for group_id, prompts in hands.prompts.items()}
    assert texts == {group_id: set(prompts) for group_id, prompts in expected(run, 10).items()}


async def test_room_is_filled_at_once_and_waiting_is_cheap(run):
    """Counted, not timed: a step's room is filled in two calls of one burst each; a full ledger is asked rarely."""
    run.set("data", epochs=50).set("learner", groups_per_step=8)
    async with run.open() as ledgers:
        hands = await Hands(ledgers.train).fence()
        async with run.running(run_feeder, "feeder.0", ledgers) as (role, _):
            await until(lambda: role.status.get("admission") == "full")
            asked = []
            admit = ledgers.train.admit

            async def counted(**arguments):
                asked.append(arguments["cursor"])
                return await admit(**arguments)

            ledgers.train.admit = counted
            await asyncio.sleep(0.5)
            assert 5 <= len(asked) <= 25  # 5, 10, 20, 40, 50, 50 ... ms
            asked.clear()
            before = role.status["admitted"]
            await hands.step()
            await until(lambda: role.status["admitted"] == before + 16)
            assert len(asked) <= 3 * 32
            assert set(range(before, before + 16)) <= set(asked)


async def test_a_run_that_drops_what_it_samples_stops_admitting_and_says_why(run, monkeypatch):
    monkeypatch.setattr(admission, "TRIAL_PAUSE", 1.0)
    monkeypatch.setattr(feeder, "_COUNT_SECONDS", 0.0)
    run.set("data", epochs=None)
    save(LoadedConfig(config=run.config, origins={}), run.run_dir / "run.json")
    async with run.open() as ledgers:
        train = ledgers.train
        hands = await Hands(train).fence()
        await hands.publish()

        async def drop_all() -> None:
            await hands.answer()
            await hands.score()
            for group_id in await train.closed():
                await train.drop(hands.nonce, group_id, "stale")

        async with run.running(run_feeder, "feeder.0", ledgers) as (role, _):
            async with asyncio.timeout(30):
                while "trouble" not in role.status:
                    await drop_all()
                while (await train.state()).live:
                    await drop_all()
            stopped_at = (await train.state()).cursor
            assert stopped_at > run.config.budget
            await until(lambda: role.status["admission"] == "stopped")
            why = role.status["trouble"]
            assert "groups in a row were dropped (stale) and none was trained" in why
            assert "the 2 groups of one step are tried in" in why
            await role.beat()
            seen = await asyncio.to_thread(looked_at, run)
            assert seen["verdict"] == "degraded"
            assert [of["trouble"] for of in seen["roles"] if of["name"] == "feeder.0"] == [why]
            assert f"feeder.0: {why}" in seen["last line"]
            assert why in seen["screen"]
            # There is room for a whole budget, and the trial is one step.
            await until(lambda: train_cursor(train, stopped_at + 2))
            await until(lambda: role.status["admission"] == "stopped")
            await hands.step()
            await until(lambda: role.status["admission"] == "full")
            assert "trouble" not in role.status
            state = await train.state()
            assert (state.cursor, state.live) == (stopped_at + 2 + run.config.budget, run.config.budget)


async def train_cursor(ledger, cursor):
    found = (await ledger.state()).cursor
    assert found <= cursor, "more than one step was admitted"
    return found == cursor


def looked_at(run):
    """What `status`, the last line of `up` and the live screen show."""
    directory = find_run(run.run_dir)
    with contextlib.closing(Look(directory)) as look_once:
        board = Board("t", run.run_dir, Goal(), look_once)
        board.refresh()
    screen = Console(width=400, file=io.StringIO(), record=True)
    screen.print(render(board, 400))
    return {**asyncio.run(look(directory)), "last line": plain_line(board), "screen": screen.export_text()}
