"""Held-out accuracy: hand-computed, each group once, never in the way of training, whoever dies."""

import asyncio

import orjson
import pytest
from producer_kit import Hands, payload, until, write_prompts

from streamrl.archive.reader import read_archive
from streamrl.config import RunConfig
from streamrl.errors import Fenced, Refused
from streamrl.monitor.progress import Progress
from streamrl.producers.admission import VersionWatcher
from streamrl.producers.dataset import PromptLimits, load_prompts
from streamrl.producers.evaluation import EvaluatedGroup, Evaluation, EvaluationLog, EvaluationRound, evaluation_budget
from streamrl.producers.feeder import run_feeder
from streamrl.producers.tokenizer import Tokenizer
from streamrl.queues.records import ReplayOutcome
from tests.forked import kill
from tests.queues.ledger_kit import replay


def lines(run):
    path = run.run_dir / "evaluation.jsonl"
    return [orjson.loads(line) for line in path.read_bytes().splitlines()] if path.exists() else []


async def publish(ledgers, version):
    """One step of a learner: a new version is there."""
    learner = Hands(ledgers.train)
    await learner.fence()
    await ledgers.train.finish_step(learner.nonce, 0, version, b"{}")


async def answer_round(hands, run, count, value):
    while len(lines(run)) + hands.dead < count:
        await hands.answer(version=3)
        await hands.score(value)
        await asyncio.sleep(0.002)


def hands_of(ledgers):
    hands = Hands(ledgers.evaluation)
    hands.dead = 0
    return hands


async def test_rounds_lines_and_accuracy(run):
    run.evaluate(every=2, prompts=4, samples=2, threshold=0.5)
    async with run.open() as ledgers:
        hands = hands_of(ledgers)

        async def on_board():
            return "accuracy" in (await ledgers.roles.read("feeder")).get("feeder.0", {})

        async with run.running(run_feeder, "feeder.0", ledgers) as (role, _):
            await until(lambda: role.is_ready)
            assert (await ledgers.evaluation.state()).cursor == 0  # nothing before the first version
            await publish(ledgers, 1)
            # group 1: 0.5 is not above the threshold; group 2: one response has no score
            values = {(0, 0): 1, (0, 1): 1, (1, 0): 1, (1, 1): 0.5, (2, 0): None, (2, 1): 1, (3, 0): 0, (3, 1): 0}
            await answer_round(hands, run, 4, lambda group_id, sample: values[group_id, sample])
            await until(lambda: "accuracy" in role.status)
            assert role.status["accuracy"] == pytest.approx(4 / 7)  # 4 right of 7 scored
            assert role.status["avg_at_2"] == pytest.approx((1 + 0.5 + 1 + 0) / 4)
            assert role.status["pass_at_2"] == pytest.approx(2 / 3)  # group 2 has one response, so it says nothing
            await until(on_board)  # the moment that it is complete: nothing here beats for the role
            assert (role.status["accuracy_version"], role.status["evaluated"]) == (1, 4)
            await publish(ledgers, 2)  # one version later is not due yet
            await publish(ledgers, 3)
            await answer_round(hands, run, 8, lambda group_id, sample: 1.0)
            await until(lambda: role.status["accuracy_version"] == 3)
            assert (role.status["accuracy"], role.status["evaluated"]) == (1.0, 8)
            assert role.status["archived"] == 8
        state = await ledgers.evaluation.state()
        assert (state.cursor, state.live, state.retired) == (8, 0, 8)
        assert (await ledgers.train.state()).cursor == run.config.budget  # training was fed beside it
    found = {line["gid"]: line for line in lines(run)}
    assert len(lines(run)) == len(found) == 8
    assert found[2] == {
        "gid": 2, "line": 2, "round": 1, "version_min": 3, "version_max": 4, "scores": [1.0], "right": 1, "dead": 1,
        "source": "",
    }  # fmt: skip
    assert [found[group_id]["round"] for group_id in range(8)] == [1] * 4 + [3] * 4
    assert [found[group_id]["line"] for group_id in range(8)] == [0, 1, 2, 3, 4, 5, 0, 1]  # round and round the file
    assert [prompts for _, prompts in sorted(hands.prompts.items())] == [[f"h{n}"] for n in (0, 1, 2, 3, 4, 5, 0, 1)]
    records = [orjson.loads(row) for row in (run.run_dir / "metrics" / "feeder.0.jsonl").read_bytes().splitlines()]
    rounds = [(row["version"], row["responses"]) for row in records if row.get("kind") == "evaluation"]
    assert rounds == [(1, 7), (3, 8)]
    assert [row["pass_at_2"] for row in records if row.get("kind") == "evaluation"] == pytest.approx([2 / 3, 1.0])
    progress = Progress(run.run_dir)
    progress.refresh()
    assert [progress.accuracy.several(version) for version in (1, 3)] == [
        "avg@2 0.625  pass@2 0.667",
        "avg@2 1.000  pass@2 1.000",
    ]
    assert [group.group_id for group in read_archive(run.run_dir, evaluation=True)] == list(range(8))


async def test_held_out_prompts_that_are_too_long_are_counted(run):
    with run.held_out.open("ab") as file:
        file.write(b'{"prompt": "' + b"h0 " * 40 + b'"}\n')
    run.evaluate().set("data", long_prompts="drop")
    async with run.open() as ledgers, run.running(run_feeder, "feeder.0", ledgers) as (role, _):
        await until(lambda: role.is_ready)
        assert role.status["held_out_too_long"] == 1


async def test_a_round_says_how_each_source_did(run, tmp_path):
    names = [{"source": run.held_out, "name": "sums"}, {"source": write_prompts(tmp_path / "code.jsonl", 6, "c")}]
    run.evaluate(prompts=4).set("data", held_out=names)
    async with run.open() as ledgers, run.running(run_feeder, "feeder.0", ledgers) as (role, _):
        await until(lambda: role.is_ready)
        await publish(ledgers, 1)
        hands = hands_of(ledgers)
        await answer_round(hands, run, 4, lambda group_id, sample: float(hands.prompts[group_id] != ["h0"]))
        await until(lambda: "accuracy" in role.status)
        sources = {"sums": {"accuracy": 0.5, "responses": 2}, "code": {"accuracy": 1.0, "responses": 2}}
        assert orjson.loads(role.status["sources"]) == sources
        assert role.last_record["sources"] == sources
    assert [line["source"] for line in lines(run)].count("sums") == 2


async def test_dead_groups_do_not_block_a_round(run):
    run.evaluate(prompts=3)
    async with run.open() as ledgers:
        hands = hands_of(ledgers)
        await publish(ledgers, 1)
        async with run.running(run_feeder, "feeder.0", ledgers) as (role, _):
            leases = await until(lambda: hands.lease(ledgers.evaluation.keys.prompts))
            await ledgers.evaluation.fail_prompt(leases[0], "broken")
            hands.dead = 1
            for lease in leases[1:]:
                await ledgers.evaluation.emit(lease, 0, payload(3))
            await answer_round(hands, run, 3, lambda group_id, sample: 1.0)
            await until(lambda: role.status.get("accuracy_version") == 1)
            assert role.status["accuracy"] == 1.0


@pytest.mark.parametrize("dead", [None, 0, 3])
async def test_a_roll_back_of_a_finished_round_takes_nothing_from_the_next(run, dead):
    """Redis forgets groups 2 to 5, which are in the file. Whoever of them comes again counts in no second round."""
    run.evaluate(prompts=6)
    async with run.open() as ledgers:
        hands = hands_of(ledgers)
        await publish(ledgers, 1)
        async with run.running(run_feeder, "feeder.0", ledgers) as (role, _):
            hands.dead = 0 if dead is None else 1
            await answer_round(hands, run, 6, lambda group_id, sample: None if group_id == dead else 0.0)
            await until(lambda: role.status.get("accuracy_version") == 1)
            await until(lambda: retired(ledgers))
            await ledgers.connection.read("HSET", ledgers.evaluation.keys.state, "cursor", "2")
            await publish(ledgers, 2)
            await answer_round(hands, run, 12, lambda group_id, sample: 1.0)
            await until(lambda: role.status.get("accuracy_version") == 2)
            assert role.status["accuracy"] == 1.0
    found = [line for line in lines(run) if line["round"] == 2]
    assert len(found) == 6
    assert all(line["scores"] == [1.0] for line in found)
    assert len({line["gid"] for line in lines(run)}) == len(lines(run))


async def retired(ledgers):
    return (await ledgers.evaluation.state()).live == 0


async def test_a_replayed_group_counts_to_the_round_it_was_asked_in(run):
    run.evaluate(prompts=3, every=2)
    async with run.open() as ledgers:
        hands = hands_of(ledgers)
        await publish(ledgers, 1)
        async with run.running(run_feeder, "feeder.0", ledgers) as (role, _):
            hands.dead = 1
            await answer_round(hands, run, 3, lambda group_id, sample: 1.0 if group_id != 1 else None)
            await publish(ledgers, 2)
            assert await replay(ledgers.evaluation, 1, budget=10, hard_cap=10) is ReplayOutcome.REPLAYED
            hands.dead = 0
            await answer_round(hands, run, 3, lambda group_id, sample: 0.0)
            await until(lambda: role.status.get("accuracy") == pytest.approx(2 / 3))
    assert {line["gid"]: line["round"] for line in lines(run)} == {0: 1, 1: 1, 2: 1}


async def test_too_many_dead_held_out_letters_end_the_feeder(run):
    run.evaluate(prompts=3).set(None, max_dead=2)
    async with run.open() as ledgers:
        hands = hands_of(ledgers)
        await publish(ledgers, 1)
        async with run.running(run_feeder, "feeder.0", ledgers, stop=False) as (_, task):
            version = 1
            while not task.done():
                for lease in await hands.lease(ledgers.evaluation.keys.prompts):
                    await ledgers.evaluation.fail_prompt(lease, "broken")
                version += 1
                await publish(ledgers, version)
                await asyncio.sleep(0.01)
            with pytest.raises(Refused, match="dead held-out letters, max_dead is 2") as caught:
                await asyncio.wait_for(task, 30)
        assert "streamrl dead ls --eval" in caught.value.hint


async def test_held_out_groups_fill_the_slots_once(run):
    run.evaluate(prompts=6, samples=2).set("engine", slots=4)
    assert evaluation_budget(run.config) == 2
    assert evaluation_budget(RunConfig.model_validate({**run.overrides, "engine": {"slots": 1}})) == 1
    async with run.open() as ledgers:
        hands = hands_of(ledgers)
        await publish(ledgers, 1)
        async with run.running(run_feeder, "feeder.0", ledgers) as (role, _):
            most = 0
            while len(lines(run)) < 6:
                most = max(most, (await ledgers.evaluation.state()).live)
                await hands.answer()
                most = max(most, (await ledgers.evaluation.state()).live)
                await hands.score()
            await until(lambda: role.status.get("accuracy_version") == 1)
    assert most == 2


async def test_a_restart_in_mid_round_finishes_that_round(run):
    run.evaluate(prompts=6).set("engine", slots=3)
    async with run.open() as ledgers:
        hands = hands_of(ledgers)
        await publish(ledgers, 1)
        async with run.running(run_feeder, "feeder.0", ledgers) as (role, _):
            await answer_round(hands, run, 3, lambda group_id, sample: 0.0)
            assert "accuracy" not in role.status
        await publish(ledgers, 2)
        await hands.answer()
        await hands.score(lambda group_id, sample: 1.0)
        async with run.running(run_feeder, "feeder.0", ledgers) as (role, _):
            await answer_round(hands, run, 6, lambda group_id, sample: 1.0)
            await until(lambda: role.status.get("accuracy_version") == 1)
            assert role.status["accuracy"] * 6 == pytest.approx(sum(line["right"] for line in lines(run)[:6]))
        async with run.running(run_feeder, "feeder.0", ledgers) as (role, _):
            await until(lambda: role.is_ready)
            assert role.status["accuracy_version"] == 1  # known again without another round
    found = [line for line in lines(run) if line["round"] == 1]
    assert sorted(line["gid"] for line in found) == list(range(6))


async def make_evaluation(run, ledgers):
    config = run.config
    data = load_prompts(config.data.held_out, Tokenizer.load(config.model), PromptLimits(16, 64), evaluation=True)
    evaluation = Evaluation(run.role("feeder.0", ledgers), data, VersionWatcher(ledgers.weights))
    await evaluation.start()
    return evaluation


async def test_a_death_between_writing_and_retiring_writes_no_line_twice(run):
    run.evaluate(prompts=3)
    async with run.open() as ledgers:
        hands = hands_of(ledgers)
        evaluation = await make_evaluation(run, ledgers)
        evaluation._versions.version = 1
        assert await evaluation._begin(1)
        assert await evaluation._admit()
        await hands.answer()
        await hands.score()

        async def dies(*arguments):
            raise ConnectionAbortedError

        ledgers.evaluation.retire, retire = dies, ledgers.evaluation.retire
        with pytest.raises(ConnectionAbortedError):
            await evaluation._collect()
        assert len(lines(run)) == 3
        ledgers.evaluation.retire = retire
        successor = await make_evaluation(run, ledgers)
        assert await successor._collect()
        assert len(lines(run)) == 3
        assert (await ledgers.evaluation.state()).live == 0
        assert await successor._is_complete()


async def test_a_second_feeder_ends_the_first(run):
    run.evaluate(prompts=2)
    async with run.open() as ledgers:
        hands = hands_of(ledgers)
        await publish(ledgers, 1)
        async with run.running(run_feeder, "feeder.0", ledgers, stop=False) as (role, task):
            await until(lambda: role.is_ready)
            await ledgers.evaluation.fence("another", 0)
            await until(hands.answer)
            await hands.score()
            with pytest.raises(Fenced):
                await asyncio.wait_for(task, 30)


async def test_other_held_out_prompts_are_refused_and_a_torn_line_is_cut(run):
    run.evaluate(prompts=2)
    async with run.open() as ledgers:
        hands = hands_of(ledgers)
        await publish(ledgers, 1)
        async with run.running(run_feeder, "feeder.0", ledgers):
            await answer_round(hands, run, 2, lambda group_id, sample: 1.0)
        path = run.run_dir / "evaluation.jsonl"
        whole = path.read_bytes()
        path.write_bytes(whole + b'{"gid": 9, "li')
        await make_evaluation(run, ledgers)
        assert path.read_bytes() == whole
        write_prompts(run.held_out, 5, "h")
        with pytest.raises(Refused):
            await make_evaluation(run, ledgers)


def test_the_log_counts_each_group_once_and_knows_what_is_whole(tmp_path):
    log = EvaluationLog(tmp_path)
    assert (log.watermark, log.read_round()) == (0, None)
    groups = [EvaluatedGroup(group_id, group_id, 7, 7, 8, [1.0, 0.0], 1) for group_id in (0, 1, 3)]
    log.append(groups[:2])
    log.append(groups)
    log.write_round(EvaluationRound(7, 0, 4))
    for known in (log, EvaluationLog(tmp_path)):
        assert (known.group_ids, known.watermark) == ({0, 1, 3}, 2)
        assert (known.rounds[7].right, known.rounds[7].scored) == (3, 6)
        assert known.read_round() == EvaluationRound(7, 0, 4)
    (tmp_path / "evaluation-round.json").write_text("{")
    assert log.read_round() is None
    with (tmp_path / "evaluation.jsonl").open("a") as file:
        file.write("no line of ours\n")
    assert EvaluationLog(tmp_path).group_ids == {0, 1, 3}


def test_a_round_has_an_accuracy_for_each_source_and_few_of_them(tmp_path):
    log = EvaluationLog(tmp_path)

    def group(group_id, source, *scores, version=7):
        right = sum(score > 0.5 for score in scores)
        return EvaluatedGroup(group_id, group_id, version, version, version, list(scores), right, 0, source)

    rows = [
        group(0, "math", 1.0, 0.0),
        group(1, "code", 1.0),
        group(2, "math", 1.0, 1.0),
        group(3, "sql"),
        group(4, ""),
    ]
    log.append([*rows, *(group(n, f"s{n}", 0.0, version=8) for n in range(5, 30))])
    for known in (log, EvaluationLog(tmp_path)):
        assert known.rounds[7].by_source == {
            "math": {"accuracy": 0.75, "responses": 4},
            "code": {"accuracy": 1.0, "responses": 1},
        }
        found = known.rounds[8].by_source
        assert list(found) == [*(f"s{n}" for n in range(5, 19)), "other"], "14 beside math and code"
        assert found["other"] == {"accuracy": 0.0, "responses": 11}


def test_a_log_that_cannot_be_written_is_said_once_until_it_can(tmp_path, caplog):
    """The run directory was moved: it is tried again many times a second."""
    folder, away = tmp_path / "run", tmp_path / "away"
    folder.mkdir()
    log = EvaluationLog(folder)
    group = EvaluatedGroup(0, 0, 7, 7, 8, [1.0], 1)
    for times in (1, 2):
        folder.rename(away)
        assert not any(log.write_round(EvaluationRound(7, 0, 4)) for _ in range(5))
        assert caplog.text.count("evaluation cannot be written") == 2 * times - 1
        assert not any(log.append([group]) for _ in range(5))
        assert caplog.text.count("evaluation cannot be written") == 2 * times
        away.rename(folder)
        assert log.write_round(EvaluationRound(7, 0, 4))
    assert log.append([group])


@pytest.mark.slow
async def test_kill_9_of_the_feeder_in_mid_round(run):
    run.evaluate(prompts=6).set("engine", slots=8)
    async with run.open() as ledgers:
        hands = hands_of(ledgers)
        await publish(ledgers, 1)
        for count in (2, 4, 6):
            process = run.spawn(run_feeder, "feeder.0")
            try:
                async with asyncio.timeout(40):
                    await answer_round(hands, run, count, lambda group_id, sample: 1.0)
                if count == 6:
                    await until(lambda: shown(ledgers))
            finally:
                kill(process)
    assert sorted(line["gid"] for line in lines(run) if line["round"] == 1) == list(range(6))
    assert len({line["gid"] for line in lines(run)}) == len(lines(run))


async def shown(ledgers):
    return (await ledgers.roles.read()).get("feeder.0", {}).get("accuracy") == "1.0"
