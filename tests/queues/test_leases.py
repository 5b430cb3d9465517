"""Leases: renewing, taking over, probation, handing back, and what happens to what cannot be done."""

from __future__ import annotations

import asyncio
import contextlib
import math
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from streamrl.config import LeaseConfig, LoadedConfig, RunConfig, save
from streamrl.queues import Lease, Leases, Ledger, Ledgers, embedded, open_ledgers
from streamrl.queues.leases import KEEPER
from tests.queues.ledger_kit import admit, close_group, everything, faults, lease, until, until_async
from tests.queues.proxy import open_proxy
from tests.redis_kit import RedisRun

QUICK = LeaseConfig(seconds=0.3, max_hold=60, max_deliveries=4)
PATIENT = LeaseConfig(seconds=60, max_hold=900, max_deliveries=4)
Handle = Callable[[Lease], Awaitable[None]]


@pytest.fixture
def server() -> embedded.Server:
    """One version is enough here: the scripts are tested on both."""
    return embedded.find_server()


@contextlib.asynccontextmanager
async def working(
    ledgers: Ledgers, handle: Handle, config: LeaseConfig = QUICK, stage: Any = "prompts", **options: Any
) -> AsyncIterator[Leases]:
    """Leases that run for the length of a block, and drain at its end."""
    stop = asyncio.Event()
    both = [ledgers.train, ledgers.evaluation]
    leases = Leases(both, stage, "rollout.0", config, options.pop("width", 4), handle, **options)
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(leases.run(stop))
        try:
            yield leases
        finally:
            stop.set()


def generating(done: list[Lease]) -> Handle:
    async def handle(found: Lease) -> None:
        work = await found.ledger.open_work(found)
        for k in work.missing if work is not None else ():
            await found.ledger.emit(found, k, b"payload")
        done.append(found)

    return handle


async def forever(_: Lease) -> None:
    await asyncio.Event().wait()


async def pending(ledger: Ledger, stage: str = "prompts") -> list[tuple[bytes, int]]:
    """Owner and deliveries of each pending entry."""
    rows = await ledger.connection.read("XPENDING", getattr(ledger.keys, stage), "g", "-", "+", 100)
    return [(owner, deliveries) for _, owner, _, deliveries in rows]


async def is_empty(stream: str, ledgers: Ledgers) -> bool:
    return not await ledgers.connection.read("XLEN", stream)


def start(program: str, run: RedisRun, config: RunConfig) -> subprocess.Popen[bytes]:
    """A real process that leases from the run."""
    save(LoadedConfig(config=config, origins={}), run.run_dir / "run.json")
    return subprocess.Popen([sys.executable, "-c", program, str(run.run_dir)], stdout=subprocess.PIPE)


async def consumers(ledger: Ledger, stage: str = "prompts") -> list[bytes]:
    rows = await ledger.connection.read("XINFO", "CONSUMERS", getattr(ledger.keys, stage), "g")
    return [row[b"name"] for row in rows]


async def abandon(ledger: Ledger, deaths: int, owner: str = "dead-1") -> Lease:
    """Make the next prompt one that expired after so many deaths."""
    (found,) = await lease(ledger, "prompts", owner)
    claim = (
        "XCLAIM",
        ledger.keys.prompts,
        "g",
        owner,
        0,
        found.entry,
        "IDLE",
        10_000_000,
        "RETRYCOUNT",
        deaths,
        "JUSTID",
    )
    await ledger.connection.read(*claim)
    return found


async def test_both_ledgers_are_served_to_the_end(ledgers: Ledgers):
    for cursor in range(10):
        await admit(ledgers.train, cursor)
        await admit(ledgers.evaluation, cursor)
    done: list[Lease] = []
    async with working(ledgers, generating(done)) as leases:
        await until(lambda: len(done) == 20)
    assert leases.held == 0
    assert {(found.ledger.evaluation, found.gid) for found in done} == {
        (e, g) for e in (True, False) for g in range(10)
    }
    assert await consumers(ledgers.train) == [], "the process took its name with it"
    assert await faults(ledgers.train) == []


async def test_no_more_handlers_than_the_width(ledgers: Ledgers):
    for cursor in range(20):
        await admit(ledgers.train, cursor)
    done: list[Lease] = []
    most = 0
    finish = generating(done)

    async def handle(found: Lease) -> None:
        nonlocal most
        most = max(most, leases.held)
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
        await until(lambda: leases.held == 1)
        async with working(ledgers, generating(others)):
            before = asyncio.get_running_loop().time()
            await until(lambda: asyncio.get_running_loop().time() > before + 4 * QUICK.seconds)
            await admit(ledgers.train, 1)
            await until(lambda: others)
        let_go.set()
        await until(lambda: done)
    assert [found.gid for found in others] == [1]
    assert [found.deliveries for found in done] == [1]


HOLDER = """
import asyncio, sys
from pathlib import Path
from streamrl.config import LeaseConfig, read_saved
from streamrl.queues import Leases, open_ledgers

async def main(run_dir):
    async def handle(lease):
        work = await lease.ledger.open_work(lease)
        await lease.ledger.emit(lease, work.missing[0], b"of the dead")
        print("held", flush=True)
        await asyncio.Event().wait()

    async with open_ledgers(read_saved(run_dir / "run.json").config, run_dir) as ledgers:
        config = LeaseConfig(seconds=0.3)
        await Leases([ledgers.train], "prompts", "holder", config, 4, handle).run(asyncio.Event())

asyncio.run(main(Path(sys.argv[1])))
"""


async def test_a_holder_killed_with_9_is_replaced(ledgers: Ledgers, run: RedisRun, config: RunConfig):
    """A real process dies in mid-work: another takes over, and generates what is missing only."""
    await admit(ledgers.train, 0, samples=3)
    with start(HOLDER, run, config) as holder:
        assert (await asyncio.to_thread(holder.stdout.readline)) == b"held\n"
        holder.send_signal(signal.SIGKILL)
    done: list[Lease] = []
    seen: list[Any] = []

    async def handle(found: Lease) -> None:
        seen.append((await found.ledger.open_work(found)).missing)
        await generating(done)(found)

    async with working(ledgers, handle):
        await until(lambda: done)
    assert [found.deliveries for found in done] == [2]
    assert seen == [(1, 2)]
    assert await consumers(ledgers.train) == [], "the name of the dead is forgotten too"


async def test_after_a_second_death_work_runs_alone(ledgers: Ledgers):
    """Hole 23: probation. The neighbours finish first, nothing begins next to it."""
    await admit(ledgers.train, 0)
    suspect = await abandon(ledgers.train, deaths=2)
    for cursor in range(1, 9):
        await admit(ledgers.train, cursor)
    running: set[int] = set()
    alone: list[bool] = []
    done: list[Lease] = []
    finish = generating(done)

    async def handle(found: Lease) -> None:
        running.add(found.gid)
        for _ in range(20):
            await asyncio.sleep(0)
            if found.gid == suspect.gid or suspect.gid in running:
                alone.append(running == {suspect.gid})
        await finish(found)
        running.discard(found.gid)

    async with working(ledgers, handle):
        await until(lambda: len(done) == 9)
    assert len(alone) == 20
    assert all(alone)
    assert [found.deliveries for found in done if found.gid == suspect.gid] == [3]


async def test_after_one_death_work_runs_with_the_others(ledgers: Ledgers):
    await admit(ledgers.train, 0)
    await abandon(ledgers.train, deaths=1)
    await admit(ledgers.train, 1)
    together = asyncio.Barrier(2)

    async def handle(found: Lease) -> None:
        async with asyncio.timeout(20):
            await together.wait()
        await generating(done)(found)

    done: list[Lease] = []
    async with working(ledgers, handle):
        await until(lambda: len(done) == 2)
    assert sorted(found.deliveries for found in done) == [1, 2]


async def test_after_max_deliveries_work_is_buried(ledgers: Ledgers):
    await admit(ledgers.train, 0, samples=2, prompt=b"poison")
    await abandon(ledgers.train, deaths=QUICK.max_deliveries)
    done: list[Lease] = []
    async with working(ledgers, generating(done)):
        await until_async(ledgers.train.dead_letters)
    assert done == []
    letters = await ledgers.train.dead_letters()
    assert [(letter.sample, letter.stage) for letter in letters] == [(0, "prompt"), (1, "prompt"), (None, "close")]
    assert letters[0].why == "4 holders died of it"
    assert letters[0].deliveries == 4


POISONED = """
import asyncio, os, signal, sys
from pathlib import Path
from streamrl.config import LeaseConfig, read_saved
from streamrl.queues import Leases, open_ledgers

async def main(run_dir):
    async def handle(lease):
        work = await lease.ledger.open_work(lease)
        await asyncio.sleep(0.01)
        if work.prompt == b"poison":
            os.kill(os.getpid(), signal.SIGKILL)
        for k in work.missing:
            await lease.ledger.emit(lease, k, b"payload")

    async with open_ledgers(read_saved(run_dir / "run.json").config, run_dir) as ledgers:
        config = LeaseConfig(seconds=0.3, max_deliveries=3)
        await Leases([ledgers.train], "prompts", "worker", config, 8, handle).run(asyncio.Event())

asyncio.run(main(Path(sys.argv[1])))
"""


@pytest.mark.slow
async def test_poison_kills_no_neighbours(ledgers: Ledgers, run: RedisRun, config: RunConfig):
    """Real processes die of two poison prompts among twenty; only those two become dead letters."""
    for cursor in range(20):
        await admit(ledgers.train, cursor, prompt=b"poison" if cursor in (3, 11) else b"good")
    deaths = 0
    holders = [start(POISONED, run, config) for _ in range(2)]
    try:
        async with asyncio.timeout(60):
            while await ledgers.connection.read("XLEN", ledgers.train.keys.prompts):
                for i, holder in enumerate(holders):
                    if holder.poll() is not None:
                        deaths += 1
                        holders[i] = start(POISONED, run, config)
                await asyncio.sleep(0.05)
    finally:
        for holder in holders:
            holder.kill()
            holder.wait()
    assert deaths >= 5
    assert {letter.gid for letter in await ledgers.train.dead_letters()} == {3, 11}
    assert await ledgers.connection.read("XLEN", ledgers.train.keys.rollouts) == 36


async def test_a_clean_hand_back_is_no_death(ledgers: Ledgers):
    """Hole 24: stop hands back what the drain leaves, and the next taker is the first again."""
    await admit(ledgers.train, 0)
    await admit(ledgers.train, 1)
    async with working(ledgers, forever, PATIENT, drain=0.05) as leases:
        await until(lambda: leases.held == 2)
    assert await pending(ledgers.train) == [(KEEPER.encode(), 0)] * 2
    assert await consumers(ledgers.train) == [KEEPER.encode()]
    done: list[Lease] = []
    async with working(ledgers, generating(done), PATIENT):  # no wait of a lease for what was handed back
        await until(lambda: len(done) == 2)
    assert [found.deliveries for found in done] == [1, 1]


async def test_the_drain_lets_work_end(ledgers: Ledgers):
    await admit(ledgers.train, 0)
    let_go = asyncio.Event()
    done: list[Lease] = []

    async def handle(found: Lease) -> None:
        await let_go.wait()
        await generating(done)(found)

    async with working(ledgers, handle, drain=30) as leases:
        await until(lambda: leases.held == 1)
        asyncio.get_running_loop().call_later(0.05, let_go.set)
    assert len(done) == 1
    assert await pending(ledgers.train) == []


async def test_an_exception_of_a_handler_surfaces(ledgers: Ledgers, caplog):
    """Its work stays pending and counts as a death; the neighbours are handed back without one."""
    await admit(ledgers.train, 0)
    await admit(ledgers.train, 1)

    async def handle(found: Lease) -> None:
        await until(lambda: leases.held == 2)
        if found.gid == 1:
            raise ZeroDivisionError("a bug")
        await forever(found)

    leases = Leases([ledgers.train], "prompts", "rollout.0", PATIENT, 4, handle)
    with pytest.raises(ZeroDivisionError):
        await leases.run(asyncio.Event())
    assert "handler failed" in caplog.text
    assert await pending(ledgers.train) == [(KEEPER.encode(), 0), (leases.consumer.encode(), 1)]


async def test_cancelling_hands_back(ledgers: Ledgers):
    await admit(ledgers.train, 0)
    leases = Leases([ledgers.train], "prompts", "rollout.0", PATIENT, 4, forever)
    task = asyncio.create_task(leases.run(asyncio.Event()))
    await until(lambda: leases.held == 1)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert await pending(ledgers.train) == [(KEEPER.encode(), 0)]


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
        await until(lambda: leases.held == 0)
    assert "max_hold" in (await ledgers.train.dead_letters())[0].why
    assert await faults(ledgers.train) == []


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
        await until(lambda: leases.held == 1)
        ((entry, *_),) = await ledgers.connection.read("XPENDING", ledgers.train.keys.prompts, "g", "-", "+", 1)
        await ledgers.connection.read("XCLAIM", ledgers.train.keys.prompts, "g", "thief", 0, entry)
        await cancelled.wait()
        await until(lambda: leases.held == 0)
        assert await pending(ledgers.train) == [(b"thief", 2)]


async def test_work_settled_elsewhere_is_given_up(ledgers: Ledgers):
    """The group is gone (a zombie finished it): the handler is told after a grace of one renewal."""
    await admit(ledgers.train, 0)
    async with working(ledgers, forever) as leases:
        await until(lambda: leases.held == 1)
        ((entry, *_),) = await ledgers.connection.read("XPENDING", ledgers.train.keys.prompts, "g", "-", "+", 1)
        zombie = Lease(ledgers.train, entry.decode(), 0, 1, None, 1)
        assert await ledgers.train.fail_prompt(zombie, "elsewhere")
        await until(lambda: leases.held == 0)


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
    assert {found.gid for found in done} == {0, 1, 2}


async def test_a_handler_that_settles_nothing_is_counted(ledgers: Ledgers):
    """Work that always comes back unsettled ends as a dead letter instead of going round for ever."""
    await admit(ledgers.train, 0, samples=1)
    seen: list[int] = []

    async def lazy(found: Lease) -> None:
        seen.append(found.deliveries)

    async with working(ledgers, lazy):
        await until_async(ledgers.train.dead_letters)
    assert seen == [1, 2, 3, 4]


async def test_after_a_connection_error_nobody_takes_over_for_one_lease(ledgers: Ledgers, monkeypatch):
    """Hole 25: after an outage everything looks expired; the owners renew first."""
    await admit(ledgers.train, 0)
    expired = await abandon(ledgers.train, deaths=1)
    since = 0.0
    monkeypatch.setattr(ledgers.connection, "since_error", lambda: since)
    done: list[Lease] = []
    began = asyncio.get_running_loop().time()
    async with working(ledgers, generating(done)):
        await until(lambda: asyncio.get_running_loop().time() > began + 4 * QUICK.seconds)
        await admit(ledgers.train, 1)
        await until(lambda: done)
        assert [found.gid for found in done] == [1]
        since = math.inf
        await until(lambda: len(done) == 2)
    assert done[1].gid == expired.gid


async def test_a_new_process_waits_one_lease_before_it_takes_over(ledgers: Ledgers):
    """It cannot know of an outage before its start. What was handed back it takes at once."""
    await admit(ledgers.train, 0)
    await abandon(ledgers.train, deaths=1)
    await admit(ledgers.train, 1)
    await abandon(ledgers.train, deaths=0, owner=KEEPER)
    done: list[Lease] = []
    async with working(ledgers, generating(done), PATIENT):
        await until(lambda: done)
    assert [(found.gid, found.deliveries) for found in done] == [(1, 1)]
    assert (b"dead-1", 1) in await pending(ledgers.train)


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
    assert caplog.text.count("none of ours") == 2
    assert await ledgers.train.closed() == [0]


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
