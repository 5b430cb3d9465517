"""What a supervisor says over Redis, and what it is asked, in a real Redis."""

from __future__ import annotations

import pytest

from streamrl.queues import member_index
from streamrl.queues.keys import Keys
from streamrl.queues.supervision import KEPT_LINES, LONGEST_LINE, Asked, Published, Supervision
from tests.queues.ledger_kit import until
from tests.redis_kit import Probe


async def test_what_is_asked_is_asked_of_one_supervisor(ledgers, config):
    supervision = Supervision(ledgers.connection, config.name)
    assert await supervision.asked("a") == Asked()
    await supervision.ask_end("a", 1)
    await supervision.ask_end("a", 2)
    await supervision.ask_count("a", "reward_model.judge", 3)
    assert await supervision.asked("a") == Asked(2, {"reward_model.judge": 3})
    assert await supervision.asked("b") == Asked(), "its successor was asked nothing"
    assert await ledgers.connection.read("TTL", Keys(config.name).asked("a")) > 0


async def test_a_supervisor_is_there_until_it_leaves(ledgers, config):
    supervision = Supervision(ledgers.connection, config.name)
    assert await supervision.supervisor() is None
    await supervision.beat({"id": "a", "states": "{}"})
    assert await supervision.supervisor() == {"id": "a", "states": "{}"}
    await supervision.leave("a")
    assert await supervision.supervisor() is not None, "it has no claim, so it leaves nothing"
    assert await supervision.claim("a")
    await supervision.leave("a")
    assert await supervision.supervisor() is None


async def test_one_supervisor_has_the_claim_until_it_leaves_or_is_silent(ledgers, config):
    supervision, key = Supervision(ledgers.connection, config.name), Keys(config.name).supervising
    assert [await supervision.claim(one) for one in "aab"] == [True, True, False]
    assert 0 < await ledgers.connection.read("PTTL", key) <= 10_000
    await supervision.leave("b")
    assert not await supervision.claim("b")
    await supervision.leave("a")
    assert [await supervision.claim(one) for one in "ba"] == [True, False]
    await ledgers.connection.read("DEL", key)  # as after BEAT_TTL of silence
    assert [await supervision.claim(one) for one in "ab"] == [True, False]


@pytest.mark.parametrize("what", ["supervisor", "member"])
async def test_a_lock_that_ends_while_it_is_renewed_has_one_holder(ledgers, config, run, monkeypatch, what):
    """Between two commands it could end, another could take it, and the first would renew that one's."""
    keys, connection = Keys(config.name), ledgers.connection
    key = keys.supervising if what == "supervisor" else keys.member("reward", 0)

    async def take() -> bool:
        if what == "supervisor":
            return await Supervision(connection, config.name).claim("a")
        return await member_index._take(connection, key, "a")

    assert await take()
    others: list[bool] = []
    with Probe(run.config.url) as probe:
        probe.call("PEXPIRE", key, 300)
        send = connection._send

        async def slowly(command):
            reply = await send(command)
            if not others:
                await until(lambda: not 0 <= probe.call("PTTL", key) <= 300)
                others.append(probe.call("SET", key, "b", "NX") is not None)
            return reply

        monkeypatch.setattr(connection, "_send", slowly)
        holds = await take()
    assert [holds, *others].count(True) == 1


async def test_the_last_lines_of_each_role_are_kept_in_order(ledgers, config):
    supervision = Supervision(ledgers.connection, config.name)
    await supervision.add_lines({"rollout.0": [b"%d" % number for number in range(5)], "learner.0": [b"x" * 5000]})
    assert await supervision.logged() == ["learner.0", "rollout.0"]
    first = await supervision.lines("rollout.0")
    assert [line.line for line in first] == [b"0", b"1", b"2", b"3", b"4"]
    await supervision.add_lines({"rollout.0": [b"5"]})
    assert [line.line for line in await supervision.lines("rollout.0", first[-1].id)] == [b"5"]
    assert [len(line.line) for line in await supervision.lines("learner.0")] == [LONGEST_LINE]
    for _ in range(3):
        await supervision.add_lines({"rollout.0": [b"y"] * KEPT_LINES})
    assert len(await supervision.lines("rollout.0")) <= KEPT_LINES + 200, "MAXLEN ~ cuts whole nodes"


async def test_a_run_is_published_with_and_without_a_token(ledgers, config):
    supervision = Supervision(ledgers.connection, config.name)
    assert await supervision.run_file() is None
    assert await supervision.published() is None
    for run in (Published(b"{}"), Published(b"[]", "secret", "digest")):
        await supervision.publish(run)
        assert await supervision.run_file() == run.run_file
        assert await supervision.published() == run
