"""Leases: renewing, handing back, and how a handler ends."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from streamrl.config import RunConfig
from streamrl.errors import RetryLater
from streamrl.queues import Lease, Leases, Ledgers, embedded, open_ledgers
from streamrl.queues.leases import UNOWNED
from tests.queues.lease_kit import (
    PATIENT,
    QUICK,
    consumers,
    forever,
    generating,
    is_empty,
    pending,
    working,
)
from tests.queues.ledger_kit import admit, faults, lease, take, until, until_async
from tests.queues.proxy import open_proxy
from tests.redis_kit import RedisRun


async def test_both_ledgers_are_served_to_the_end(ledgers: Ledgers):
    for cursor in range(10):
        await admit(ledgers.train, cursor)
        await admit(ledgers.evaluation, cursor)
    done: list[Lease] = []
    async with working(ledgers, generating(done)) as leases:
        await until(lambda: len(done) == 20)
    assert leases.leased == 0
    assert {(found.ledger.evaluation, found.group_id) for found in done} == {
        (e, g) for e in (True, False) for g in range(10)
    }
    assert await consumers(ledgers.train) == [], "the process took its name with it"
    assert await faults(ledgers.train) == []


async def test_one_ledger_may_come_first(ledgers: Ledgers):
    for cursor in range(10):
        await admit(ledgers.train, cursor)
        await admit(ledgers.evaluation, cursor)
    done: list[Lease] = []
    async with working(ledgers, generating(done), width=2, first=ledgers.evaluation):
        await until(lambda: len(done) == 20)
    assert [found.ledger.evaluation for found in done] == [True] * 10 + [False] * 10


async def test_no_more_handlers_than_the_width(ledgers: Ledgers):
    for cursor in range(20):
        await admit(ledgers.train, cursor)
    done: list[Lease] = []
    most = 0
    finish = generating(done)

    async def handle(found: Lease) -> None:
        nonlocal most
        most = max(most, leases.leased)
        await asyncio.sleep(0)
        await finish(found)

    async with working(ledgers, handle, width=4) as leases:
        await until(lambda: len(done) == 20)
    assert 2 <= most <= 4


async def test_what_is_renewed_is_not_taken(ledgers: Ledgers):
    """A handler that works for many leases keeps its lease; the other process has only its own."""
    await admit(ledgers.train, 0)
    let_go = asyncio.Event()

    async def slow(found: Lease) -> None:
        await let_go.wait()
        await generating(done)(found)

    done: list[Lease] = []
    others: list[Lease] = []
    async with working(ledgers, slow, width=1) as leases:
        await until(lambda: leases.leased == 1)
        async with working(ledgers, generating(others)):
            before = asyncio.get_running_loop().time()
            await until(lambda: asyncio.get_running_loop().time() > before + 4 * QUICK.seconds)
            await admit(ledgers.train, 1)
            await until(lambda: others)
        let_go.set()
        await until(lambda: done)
    assert [found.group_id for found in others] == [1]
    assert [found.deliveries for found in done] == [1]


async def test_a_clean_hand_back_is_no_death(ledgers: Ledgers):
    """Hole 24: stop hands back what the drain leaves, and the next taker is the first again."""
    await admit(ledgers.train, 0)
    await admit(ledgers.train, 1)
    async with working(ledgers, forever, PATIENT, drain=0.05) as leases:
        await until(lambda: leases.leased == 2)
    assert await pending(ledgers.train) == [(UNOWNED.encode(), 0)] * 2
    assert await consumers(ledgers.train) == [UNOWNED.encode()]
    done: list[Lease] = []
    async with working(ledgers, generating(done), PATIENT):  # no wait of a lease for what was handed back
        await until(lambda: len(done) == 2)
    assert [found.deliveries for found in done] == [1, 1]


async def test_work_that_cannot_be_done_now_goes_back_without_a_death(ledgers: Ledgers):
    """However often: it is no fault of the work."""
    await admit(ledgers.train, 0, samples=1)
    seen: list[int] = []
    done: list[Lease] = []

    async def handle(found: Lease) -> None:
        seen.append(found.deliveries)
        if len(seen) <= 2 * QUICK.max_deliveries:
            raise RetryLater("nobody is there")
        await generating(done)(found)

    async with working(ledgers, handle):
        await until(lambda: done)
    assert set(seen) == {1}
    assert not await ledgers.train.dead_letters()
    assert await faults(ledgers.train) == []


async def test_the_drain_lets_work_end(ledgers: Ledgers):
    await admit(ledgers.train, 0)
    let_go = asyncio.Event()
    done: list[Lease] = []

    async def handle(found: Lease) -> None:
        await let_go.wait()
        await generating(done)(found)

    async with working(ledgers, handle, drain=30) as leases:
        await until(lambda: leases.leased == 1)
        asyncio.get_running_loop().call_later(0.05, let_go.set)
    assert len(done) == 1
    assert await pending(ledgers.train) == []


async def test_an_exception_of_a_handler_surfaces(ledgers: Ledgers, caplog):
    """Its work stays pending and counts as a death; the neighbours are handed back without one."""
    await admit(ledgers.train, 0)
    await admit(ledgers.train, 1)

    async def handle(found: Lease) -> None:
        await until(lambda: leases.leased == 2)
        if found.group_id == 1:
            raise ZeroDivisionError("a bug")
        await forever(found)

    leases = Leases([ledgers.train], "prompts", "rollout.0", PATIENT, 4, handle)
    with pytest.raises(ZeroDivisionError):
        await leases.run(asyncio.Event())
    assert "handler failed" in caplog.text
    assert await pending(ledgers.train) == [(UNOWNED.encode(), 0), (leases.consumer.encode(), 1)]


async def test_cancelling_hands_back(ledgers: Ledgers):
    await admit(ledgers.train, 0)
    leases = Leases([ledgers.train], "prompts", "rollout.0", PATIENT, 4, forever)
    task = asyncio.create_task(leases.run(asyncio.Event()))
    await until(lambda: leases.leased == 1)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert await pending(ledgers.train) == [(UNOWNED.encode(), 0)]


async def test_held_for_too_long_is_buried(ledgers: Ledgers):
    """Hole 13: a hung handler renews for ever; max_hold ends it."""
    await admit(ledgers.train, 0)
    config = QUICK.model_copy(update={"max_hold": 0.2})
    cancelled = asyncio.Event()

    async def hang(found: Lease) -> None:
        try:
            await forever(found)
        finally:
            cancelled.set()

    async with working(ledgers, hang, config) as leases:
        await cancelled.wait()
        await until(lambda: leases.leased == 0)
    assert "max_hold" in (await ledgers.train.dead_letters())[0].why
    assert await faults(ledgers.train) == []


async def test_progress_begins_the_time_of_a_lease_anew(ledgers: Ledgers):
    """An episode may take longer than `max_hold`, as long as it finishes turns."""
    await admit(ledgers.train, 0)
    held: list[Lease] = []

    async def hang(found: Lease) -> None:
        held.append(found)
        await forever(found)

    async with working(ledgers, hang, PATIENT, drain=0) as leases:
        await until(lambda: held)
        (work,) = leases._leased.values()
        for progresses in (True, False):
            work.since -= 2 * PATIENT.max_hold
            if progresses:
                leases.progressed(held[0])
            await leases._expire(ledgers.train.keys.prompts)
            assert leases.leased == progresses
    assert "max_hold" in (await ledgers.train.dead_letters())[0].why


async def test_who_lost_a_lease_and_took_it_again_writes_no_journal_for_the_first_time(ledgers: Ledgers):
    """The name in Redis is the same, the episode is another one."""
    train = ledgers.train
    await admit(train, 0)
    held: list[Lease] = []

    async def hang(found: Lease) -> None:
        held.append(found)
        await forever(found)

    async with working(ledgers, hang, PATIENT, drain=0) as leases:
        await until(lambda: held)
        await take(train, "prompts", held[0], "other")
        await leases._renew(train.keys.prompts)
        await ledgers.connection.call("release", [train.keys.prompts], ["other", UNOWNED, 60_000, held[0].entry, 1])
        leases._scan_at = 0.0
        await until(lambda: len(held) == 2)
        assert not await train.journal(held[0], 0, 0, b"of the first time")
        assert await train.journal(held[1], 0, 0, b"turn")
        assert not await train.forget_journal(held[0], 0)
        assert await train.read_journal(held[1], 0) == ([b"turn"], None)


async def test_a_lost_lease_cancels_its_handler(ledgers: Ledgers):
    """Somebody else holds it (this process was paused for too long, say): the work here is for nothing."""
    await admit(ledgers.train, 0)
    cancelled = asyncio.Event()

    async def handle(found: Lease) -> None:
        try:
            await forever(found)
        finally:
            cancelled.set()

    async with working(ledgers, handle) as leases:
        await until(lambda: leases.leased == 1)
        ((entry, *_),) = await ledgers.connection.read("XPENDING", ledgers.train.keys.prompts, "g", "-", "+", 1)
        await ledgers.connection.read("XCLAIM", ledgers.train.keys.prompts, "g", "thief", 0, entry)
        await cancelled.wait()
        await until(lambda: leases.leased == 0)
        assert await pending(ledgers.train) == [(b"thief", 2)]


async def test_work_settled_elsewhere_is_given_up(ledgers: Ledgers):
    """The group is gone (a zombie finished it): the handler is told after a grace of one renewal."""
    await admit(ledgers.train, 0)
    async with working(ledgers, forever) as leases:
        await until(lambda: leases.leased == 1)
        ((entry, *_),) = await ledgers.connection.read("XPENDING", ledgers.train.keys.prompts, "g", "-", "+", 1)
        zombie = Lease(ledgers.train, entry.decode(), 0, 1, None, 1)
        assert await ledgers.train.fail_prompt(zombie, "elsewhere")
        await until(lambda: leases.leased == 0)


async def test_the_entries_of_a_lost_read_are_found(run: RedisRun, tmp_path: Path, config: RunConfig):
    """Hole 27: Redis gave entries away and the reply was lost. They are adopted, and nobody died."""
    path = tmp_path / "p.sock"
    via = config.model_copy(update={"redis": run.config.model_copy(update={"url": f"unix://{path}"})})
    done: list[Lease] = []
    async with (
        open_proxy(embedded.socket_path(run.run_dir), path) as proxy,
        open_ledgers(via, run.run_dir) as ledgers,
        working(ledgers, generating(done)),
    ):
        for cursor in range(3):
            proxy.lose(b"XREADGROUP")
            await admit(ledgers.train, cursor)
            await until(lambda: proxy.lost == cursor + 1)  # noqa: B023
        await until(lambda: len(done) == 3)
    assert {found.deliveries for found in done} == {1}
    assert {found.group_id for found in done} == {0, 1, 2}


async def test_a_handler_that_settles_nothing_is_counted(ledgers: Ledgers):
    """Work that always comes back unsettled ends as a dead letter instead of going round for ever."""
    await admit(ledgers.train, 0, samples=1)
    seen: list[int] = []

    async def lazy(found: Lease) -> None:
        seen.append(found.deliveries)

    async with working(ledgers, lazy):
        await until_async(ledgers.train.dead_letters)
    assert seen == [1, 2, 3, 4]


async def test_a_handler_that_ends_unsettled_during_a_renewal_is_counted_as_well(ledgers: Ledgers, monkeypatch):
    await admit(ledgers.train, 0, samples=1)
    seen: list[int] = []
    turns: list[asyncio.Event] = []
    call = ledgers.connection.call

    async def handlers_end_meanwhile(script: str, keys: list[str], arguments: list[Any]) -> Any:
        ending = turns if script == "renew" else []
        reply = await call(script, keys, arguments)
        while ending:
            ending.pop().set()
            await until(lambda: leases.leased == 0)
        return reply

    async def lazy(found: Lease) -> None:
        seen.append(found.deliveries)
        turns.append(asyncio.Event())
        await turns[-1].wait()

    monkeypatch.setattr(ledgers.connection, "call", handlers_end_meanwhile)
    async with working(ledgers, lazy, QUICK.model_copy(update={"seconds": 0.6})) as leases:
        await until_async(ledgers.train.dead_letters)
    assert seen == [1, 2, 3, 4]


async def test_a_stream_that_was_deleted_is_made_again(ledgers: Ledgers, caplog):
    """FLUSHALL under a blocked reader: empty reply, UNBLOCKED or NOGROUP by version; all go on."""
    done: list[Lease] = []
    async with working(ledgers, generating(done)):
        await admit(ledgers.train, 0)
        await until(lambda: len(done) == 1)
        await ledgers.connection.read("FLUSHALL")
        await admit(ledgers.train, 0)
        await until(lambda: len(done) == 2)
    assert "is made again" in caplog.text


async def test_redis_restarts_under_the_leases(ledgers: Ledgers, run: RedisRun):
    """Kill -9 and restart: the work in flight goes on and is settled once."""
    for cursor in range(30):
        await admit(ledgers.train, cursor)
    done: list[Lease] = []
    async with working(ledgers, generating(done)):
        await until(lambda: done)
        await asyncio.to_thread(run.restart)
        await until_async(lambda: is_empty(ledgers.train.keys.prompts, ledgers))
    assert await ledgers.connection.read("XLEN", ledgers.train.keys.rollouts) == 60
    assert await faults(ledgers.train) == []


async def test_a_foreign_entry_is_removed_with_an_error(ledgers: Ledgers, caplog):
    await ledgers.connection.read("XADD", ledgers.train.keys.rollouts, "*", "hello", "world")
    await ledgers.connection.read("XADD", ledgers.train.keys.rollouts, "*", "g", "one", "a", "1", "k", "0")
    await admit(ledgers.train, 0, samples=1)
    (prompt,) = await lease(ledgers.train, "prompts")
    await ledgers.train.emit(prompt, 0, b"x")
    done: list[Lease] = []

    async def score(found: Lease) -> None:
        await found.ledger.score(found, b"1")
        done.append(found)

    async with working(ledgers, score, stage="rollouts"):
        await until(lambda: done)
        await until_async(lambda: is_empty(ledgers.train.keys.rollouts, ledgers))
    assert caplog.text.count("foreign entry") == 2
    assert await ledgers.train.closed() == [0]


async def test_strays_are_found_however_many_there_are(ledgers: Ledgers):
    """More than fit into one look of `renew`: all are adopted, and all are handed back."""
    many = 1300
    await asyncio.gather(
        *(ledgers.connection.read("XADD", ledgers.train.keys.prompts, "*", "g", n, "a", 1) for n in range(many))
    )
    leases = Leases([ledgers.train], "prompts", "rollout.0", PATIENT, 4, forever)
    assert len(await lease(ledgers.train, "prompts", leases.consumer, count=many)) == many  # the reply was "lost"
    await leases._renew(ledgers.train.keys.prompts)
    assert len(await leases._renew(ledgers.train.keys.prompts)) == many
    await leases._leave()
    rows = await ledgers.connection.read("XPENDING", ledgers.train.keys.prompts, "g", "-", "+", 2 * many)
    assert {(owner, deliveries) for _, owner, _, deliveries in rows} == {(UNOWNED.encode(), 0)}
    assert len(rows) == many
    assert leases.consumer.encode() not in await consumers(ledgers.train)
