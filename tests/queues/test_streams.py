"""What the readers of streams see: no consumer group for learners, no trust in ids, nothing that others wrote."""

from __future__ import annotations

import asyncio
import io
from typing import Any

import pytest
from rich.console import Console

from streamrl.errors import LedgerDamaged
from streamrl.monitor.snapshot import take
from streamrl.monitor.tables import lag_table
from streamrl.monitor.verdict import Verdict
from streamrl.queues import Ledgers
from streamrl.queues.access import ReplyError
from streamrl.queues.connection import open_to_look
from streamrl.queues.damage import blame_damage
from tests.queues.ledger_kit import admit, close_group, everything, lease, until_async
from tests.redis_kit import RedisRun


async def test_learners_share_no_consumer_group(ledgers: Ledgers):
    """Hole 10: an old learner that reads takes nothing away from the new one."""
    await close_group(ledgers.train, 0)
    assert await ledgers.connection.read("XINFO", "GROUPS", ledgers.train.keys.scored) == []
    before = await everything(ledgers.train)
    assert await ledgers.train.closed() == [0]
    assert await ledgers.train.closed() == [0]
    assert await everything(ledgers.train) == before


async def test_closed_groups_are_seen_after_the_clock_of_redis_went_back(ledgers: Ledgers):
    """Hole 11: a position in the stream misses what comes with an earlier id; reading all of it does not."""
    await close_group(ledgers.train, 0)
    await ledgers.train.closed()
    ((last, fields),) = await ledgers.connection.read("XRANGE", ledgers.train.keys.scored, "-", "+")
    await ledgers.connection.read("DEL", ledgers.train.keys.scored)
    await ledgers.connection.read("XADD", ledgers.train.keys.scored, "1-0", *fields)
    assert not await ledgers.connection.read("XREAD", "STREAMS", ledgers.train.keys.scored, last)
    assert await ledgers.train.closed() == [0]


async def test_only_the_learner_publishes_versions(ledgers: Ledgers, run: RedisRun):
    """An entry of others would make replicas wait for version 100,001, and what they sample would be dropped."""
    train, read = ledgers.train, ledgers.connection.read
    foreign_entry = ("XADD", train.keys.weights, "*", "v", 100_000, "m", "x")
    await read(*foreign_entry)
    assert await ledgers.weights.newest() is None
    await train.fence("n", 0)
    await train.finish_step("n", 0, 3, b"three")
    for _ in range(3):
        await read(*foreign_entry)
    assert await ledgers.weights.newest() == (3, b"three")
    await read("XADD", train.keys.weights, "*", "v", 3, "m", "of another run")
    assert await ledgers.weights.after(3, 0.01) is None
    assert await ledgers.weights.newest() == (3, b"three")
    waiting = asyncio.create_task(ledgers.weights.after(3, 30))
    await read(*foreign_entry)

    async def counted() -> bool:
        return await read("HGET", train.keys.state, "foreign") == b"6"

    await until_async(counted)
    await train.finish_step("n", 0, 4, b"four")
    assert await waiting == (4, b"four")
    assert await read("XLEN", train.keys.weights) == 2
    async with open_to_look(run.config, run.config.url) as connection:
        snapshot = await take(connection, "test")
    assert snapshot.version == 4
    screen = Console(width=200, file=io.StringIO(), record=True)
    screen.print(lag_table(snapshot, Verdict("none", "balanced"), 200))
    assert "6 foreign entries removed" in screen.export_text()


async def test_an_entry_with_the_last_id_there_is_stops_no_learner(ledgers: Ledgers):
    train, last = ledgers.train, f"{2**64 - 1}-{2**64 - 1}"
    await train.fence("n", 0)
    await ledgers.connection.read("XADD", train.keys.weights, last, "v", 1, "m", "x")
    await train.finish_step("n", 0, 3, b"three")
    assert await ledgers.weights.newest() == (3, b"three")
    await ledgers.connection.read("XADD", train.keys.weights, last, "v", 1, "m", "x")
    assert await ledgers.weights.newest() == (3, b"three")
    await train.finish_step("n", 0, 4, b"four")
    assert await ledgers.weights.newest() == (4, b"four")


async def test_the_version_of_a_run_whose_learner_named_no_entry(ledgers: Ledgers):
    """As the learner of an earlier streamrl left it."""
    keys, read = ledgers.train.keys, ledgers.connection.read
    for version in (6, 7, 100_000):
        await read("XADD", keys.weights, "*", "v", version, "m", f"m{version}")
    await read("HSET", keys.state, "version", 7)
    assert await ledgers.weights.newest() == (7, b"m7")
    assert await read("XLEN", keys.weights) == 2


def flooded(ledgers: Ledgers, monkeypatch, stream: str, each: int) -> list[int]:
    """Whenever the stream is read, somebody adds `each` entries more before that; a list that grows by one a look."""
    looks: list[int] = []
    original = ledgers.connection.read

    async def read(*command: Any) -> Any:
        if str(command[0]).startswith(("XRANGE", "XREVRANGE")):
            looks.append(each)
            assert len(looks) < 1000, "it never ends"
            for _ in range(each):
                await original("XADD", stream, "*", "hello", "world")
        return await original(*command)

    monkeypatch.setattr(ledgers.connection, "read", read)
    return looks


async def test_a_flood_of_foreign_entries_holds_nobody_up(ledgers: Ledgers, monkeypatch, caplog):
    """Somebody adds faster than we remove: what is ours is found, and every read ends."""
    train, weights = ledgers.train, ledgers.train.keys.weights
    await train.fence("n", 0)
    await train.finish_step("n", 0, 7, b"manifest")
    await close_group(train, 0)
    with monkeypatch.context() as patch:
        looks = flooded(ledgers, patch, train.keys.scored, 3)
        assert await train.closed() == [0]
    assert len(looks) <= 3
    assert len(await ledgers.connection.read("XRANGE", train.keys.scored, "-", "+")) <= 1 + 3 * len(looks)
    assert "foreign entry" in caplog.text
    for _ in range(250):
        await ledgers.connection.read("XADD", weights, "*", "hello", "world")
    for left in (151, 51, 1):
        assert await ledgers.weights.newest() == (7, b"manifest")
        assert await ledgers.connection.read("XLEN", weights) == left


async def test_many_entries_of_others_are_removed(ledgers: Ledgers):
    for _ in range(700):
        await ledgers.connection.read("XADD", ledgers.train.keys.dead, "*", "hello", "world")
    await admit(ledgers.train, 0, samples=1, max_dead=1000)
    (prompt,) = await lease(ledgers.train, "prompts")
    assert await ledgers.train.fail_prompt(prompt, "why")
    assert [letter.sample for letter in await ledgers.train.dead_letters()] == [0, None]
    assert await ledgers.connection.read("XLEN", ledgers.train.keys.dead) == 2


async def test_noise_in_the_queue_of_replays_is_left_out(ledgers: Ledgers):
    train = ledgers.train
    noise = {"abc": "1-0,", "1": "", "2": "x", "3": b"\xff-0", "4": "5-0,x,6-0", "9" * 30: "1-0"}
    await ledgers.connection.read("HSET", train.keys.replays, *(part for pair in noise.items() for part in pair))
    assert await train.queued_replays() == {4: ["5-0", "6-0"]}


async def test_a_letter_whose_counts_are_none_is_shown_without_them(ledgers: Ledgers):
    fields = {"g": 0, "k": -1, "why": "w", "stage": "close", "n": "x", "failed": "9" * 5000, "a": "many"}
    await ledgers.connection.read(
        "XADD", ledgers.train.keys.dead, "*", *(part for pair in fields.items() for part in pair)
    )
    (letter,) = await ledgers.train.dead_letters()
    assert (letter.group_id, letter.attempt, letter.scored) == (0, 0, 0)


async def test_a_counter_that_is_no_number_is_named_by_whoever_trips_over_it(ledgers: Ledgers, run: RedisRun):
    train = ledgers.train
    await train.connection.read("XADD", train.keys.weights, "*", "noise", "noise")
    await train.connection.read("HSET", train.keys.state, "foreign", "abc")
    with pytest.raises(ReplyError) as caught:
        await ledgers.weights.newest()
    with pytest.raises(LedgerDamaged, match=r":state, field foreign: abc is no number"):
        await blame_damage(train.connection, "test", caught.value)
    snapshot = await take(train.connection, "test")
    screen = Console(file=io.StringIO(), width=200)
    screen.print(lag_table(snapshot, Verdict("none", "balanced"), 200))
    assert "foreign" not in screen.file.getvalue(), "the table is drawn, and says nothing of what it cannot read"
