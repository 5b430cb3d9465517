"""Rewards that say what cannot be written down: it costs their samples, and no worker."""

from dataclasses import replace

import orjson
import pytest

from streamrl import wire
from streamrl.consumers import Reward, Score
from streamrl.consumers.calls import ScoringFailed
from streamrl.consumers.worker import line_of
from streamrl.errors import RewardUnavailable
from streamrl.queues import open_ledgers
from streamrl.queues.records import Cause
from tests.consumers.calls_kit import calls_of, leased, loaded
from tests.consumers.samples import seen
from tests.consumers.worker_kit import put, put_whole, scores, until_closed, worker
from tests.queues.ledger_kit import admit, faults, lease, until

HALF = "\ud83d"  # the first half of a character of two, as `json.loads` makes it of what a model wrote
SPOILT = {"use": "rewards_for_tests:Spoilt", "name": "spoilt"}


@pytest.mark.parametrize("whole", [False, True])
async def test_its_samples_die_and_the_worker_lives(redis_run, make_config, monkeypatch, whole):
    monkeypatch.setattr(wire, "MAX_MESSAGE_BYTES", 4096)
    config = make_config(SPOILT, *(["group_rewards_for_tests:Rank"] if whole else []))
    texts = ["fine", "raise", "part", "large", "fine"]
    async with open_ledgers(config, redis_run.run_dir) as ledgers:
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
        assert not await faults(ledgers.train)


async def test_reasons_reach_redis_whatever_is_in_them(redis_run, make_config):
    async with open_ledgers(make_config(SPOILT), redis_run.run_dir) as ledgers:
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


async def test_the_end_of_a_sample_says_why_in_what_can_be_written():
    async def broken(sample):
        raise ValueError(f"no {HALF}")

    with pytest.raises(ScoringFailed) as caught:
        await calls_of(loaded(broken)).score(seen(), leased())
    assert "no ?" in caught.value.message
    assert caught.value.detail.encode()


async def test_a_circuit_says_why_in_what_can_be_written():
    async def away(sample):
        raise RewardUnavailable(f"no {HALF}")

    calls = calls_of(loaded(away, deadline=0.2))
    with pytest.raises(RewardUnavailable):
        await calls.score(seen(), leased(0.5))
    assert b"nobody scores: RewardUnavailable: no ?" in orjson.dumps(line_of(calls))


def test_a_reward_that_knows_that_nobody_is_there_says_so_before_it_is_asked():
    class Asks(Reward):
        def away(self):
            return f"no {HALF} answers"

        async def score(self, sample):
            return 1.0

    reward = Asks()
    line = line_of(calls_of(replace(loaded(reward.score), life=reward)))
    assert (line["away"], line["trouble"]) == (1, "nobody scores: no ? answers")


@pytest.mark.parametrize("answer", [None, "", ZeroDivisionError("no")])
def test_a_reward_that_cannot_say_who_is_away_ends_nothing(answer, caplog):
    def away():
        if isinstance(answer, Exception):
            raise answer
        return answer

    async def fine(sample):
        return 1.0

    calls = calls_of(loaded(fine))
    calls._away = away
    assert [line_of(calls)["trouble"] for _ in range(2)] == ["", ""]
    assert len(caplog.records) == isinstance(answer, Exception)


async def test_counts_that_fail_are_said_once_and_may_recover(caplog):
    async def fine(sample):
        return 1.0

    calls, answers = calls_of(loaded(fine)), [ZeroDivisionError("no"), ZeroDivisionError("no"), {"seen": 3}]

    def counts():
        answer = answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer

    calls._counts = counts
    assert [line_of(calls)["trouble"] for _ in range(2)] == ["cannot count: ZeroDivisionError: no"] * 2
    assert [record.message for record in caplog.records] == ["a reward cannot count"]
    assert (line_of(calls)["own"], calls.figures.miscounts) == ({"seen": 3}, "")


def test_a_part_has_a_name_that_can_be_written():
    with pytest.raises(ValueError, match="half a character"):
        Score(1.0, {HALF: 1.0})
    assert Score(1.0, {"gut 👍": 1.0}).parts == {"gut 👍": 1.0}
