"""Taking over from the dead: when, in which company, and when no more."""

from __future__ import annotations

import asyncio
import math
import signal
from typing import Any

import pytest

from streamrl.config import LeaseConfig, RunConfig
from streamrl.queues import Lease, Leases, Ledgers
from streamrl.queues.leases import _PAGE, UNOWNED, deliveries_after
from tests.queues.lease_kit import (
    PATIENT,
    QUICK,
    abandon,
    consumers,
    forever,
    generating,
    pending,
    start,
    working,
)
from tests.queues.ledger_kit import admit, lease, until, until_async
from tests.redis_kit import RedisRun

PROGRAM = """
import asyncio, os, signal, sys
from pathlib import Path
from streamrl.config import LeaseConfig
from streamrl.runfile import read_saved
from streamrl.queues import Leases, open_ledgers

async def holds(lease):
    work = await lease.ledger.open_work(lease)
    await lease.ledger.journal(lease, work.missing[1], 0, b"turn of the dead")
    await lease.ledger.emit(lease, work.missing[0], b"of the dead")
    print("held", flush=True)
    await asyncio.Event().wait()

async def dies_of_poison(lease):
    work = await lease.ledger.open_work(lease)
    await asyncio.sleep(0.01)
    if work.prompt == b"poison":
        os.kill(os.getpid(), signal.SIGKILL)
    for k in work.missing:
        await lease.ledger.emit(lease, k, b"payload")

async def main(run_dir):
    async with open_ledgers(read_saved(run_dir / "run.json").config, run_dir) as ledgers:
        config = LeaseConfig(seconds=0.3, max_deliveries=3)
        await Leases([ledgers.train], "prompts", "worker", config, 8, HANDLE).run(asyncio.Event())

asyncio.run(main(Path(sys.argv[1])))
"""
HOLDER, POISONED = PROGRAM.replace("HANDLE", "holds"), PROGRAM.replace("HANDLE", "dies_of_poison")


async def test_a_holder_killed_with_9_is_replaced(ledgers: Ledgers, run: RedisRun, config: RunConfig):
    """A real process dies in mid-work: another takes over, generates what is missing only, and has its journal."""
    await admit(ledgers.train, 0, samples=3)
    with start(HOLDER, run, config) as holder:
        assert (await asyncio.to_thread(holder.stdout.readline)) == b"held\n"
        holder.send_signal(signal.SIGKILL)
    done: list[Lease] = []
    seen: list[Any] = []

    async def handle(found: Lease) -> None:
        seen.append((await found.ledger.open_work(found)).missing)
        seen.append(await found.ledger.read_journal(found, 1))
        await generating(done)(found)

    async with working(ledgers, handle):
        await until(lambda: done)
    assert [found.deliveries for found in done] == [2]
    assert seen == [(1, 2), ([b"turn of the dead"], None)]
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
        running.add(found.group_id)
        for _ in range(20):
            await asyncio.sleep(0)
            if found.group_id == suspect.group_id or suspect.group_id in running:
                alone.append(running == {suspect.group_id})
        await finish(found)
        running.discard(found.group_id)

    async with working(ledgers, handle):
        await until(lambda: len(done) == 9)
    assert len(alone) == 20
    assert all(alone)
    assert [found.deliveries for found in done if found.group_id == suspect.group_id] == [3]


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


async def test_what_killed_fewest_goes_first(ledgers: Ledgers):
    """What kills its holder is older than its neighbours: they need not wait until it is buried."""
    for cursor, deaths in enumerate((3, 2, 1, 1)):
        await admit(ledgers.train, cursor)
        await abandon(ledgers.train, deaths=deaths)
    done: list[Lease] = []
    async with working(ledgers, generating(done), width=1):
        await until(lambda: len(done) == 4)
    assert [(found.group_id, found.deliveries) for found in done] == [(2, 2), (3, 2), (1, 3), (0, 4)]


async def test_work_of_a_process_that_held_much_runs_few_at_a_time_after_a_second_death(ledgers: Ledgers):
    """None of it is known to have killed: it is not run one after the other, and is charged with no third death."""
    for cursor in range(8):
        await admit(ledgers.train, cursor)
        await abandon(ledgers.train, deaths=2)
    four = asyncio.Barrier(4)
    done: list[Lease] = []
    most = 0

    async def handle(found: Lease) -> None:
        nonlocal most
        async with asyncio.timeout(20):
            await four.wait()
        most = max(most, sum(work.task is not None for work in leases._leased.values()))
        await generating(done)(found)

    async with working(ledgers, handle, width=8) as leases:
        await until(lambda: len(done) == 8)
    assert most == 4
    assert {found.deliveries for found in done} == {2}


@pytest.mark.parametrize("deaths", [2, 3])
async def test_work_that_waits_for_fewer_neighbours_is_handed_back_without_a_death(ledgers: Ledgers, deaths: int):
    """It has not begun when its process drains, so the one that takes it next counts no more than this one would."""
    for cursor in range(5):
        await admit(ledgers.train, cursor)
        await abandon(ledgers.train, deaths=deaths)
    for cursor in range(5, 10):
        await admit(ledgers.train, cursor)
    async with working(ledgers, forever, PATIENT, width=8, drain=0) as leases:
        await until(lambda: leases.leased == 5)
        leases._started -= PATIENT.seconds
        leases._scan_at = 0.0
        await until(lambda: leases.leased == 6)
    handed_back = [count for owner, count in await pending(ledgers.train) if owner == UNOWNED.encode()]
    assert sorted(handed_back) == [0] * 5 + [deaths - 1]


@pytest.mark.parametrize(
    ("deaths", "held", "deliveries"),
    [(1, 1, 2), (2, 4, 3), (4, 1, 5), (1, 64, 2), (2, 64, 2), (3, 64, 3), (1, 0, 1), (3, 0, 3), (0, 0, 1)],
)
def test_a_death_counts_for_what_may_be_to_blame(deaths: int, held: int, deliveries: int):
    assert deliveries_after(deaths, held) == deliveries


SEEN, LEASE = 20_000, 15_000
"""Milliseconds since the dead process renewed its work, and those of a lease."""


@pytest.mark.parametrize(
    ("lives", "suspects"),
    [
        ({}, 2),
        ({"a rollout.0 1": (90_000, 18_000)}, 2),
        ({"a rollout.0 1": (90_000, 18_000), "a reward.0 1": (90_000, 17_500)}, 0),
        ({"a rollout.0 1": (90_000, 18_000), "a reward.0 1": (90_000, 300)}, 2),
        ({"a rollout.0 1": (90_000, 18_000), "a reward.0 1": (90_000, 17_500), "a supervisor 1": (90_000, 500)}, 2),
        ({"a rollout.0 1": (90_000, 18_000), "b reward.0 1": (90_000, 17_500)}, 2),
        ({"a rollout.0 1": (90_000, 18_000), "a reward.0 1": (90_000, 18_000), "a reward.0 2": (9_000, 400)}, 0),
        ({"a rollout.0 1": (90_000, 18_000), "a reward.0 1": (90_000, 60_000)}, 2),
    ],
    ids=[
        "nothing is known",
        "it was alone on its host",
        "all on its host died",
        "another lives",
        "one of two lives",
        "another host",
        "another came back as a new process",
        "the other had died long before",
    ],
)
async def test_the_death_of_a_host_is_no_death_of_its_work(ledgers: Ledgers, lives: Any, suspects: int):
    keys, connection = ledgers.train.keys, ledgers.connection
    for cursor in range(2):
        await admit(ledgers.train, cursor)
    await lease(ledgers.train, "prompts", "rollout.0-x", count=2)
    seconds, micros = await connection.read("TIME")
    now = int(seconds) * 1000 + int(micros) // 1000
    for life, (first, last) in lives.items():
        await connection.read("HSET", keys.hosts, life, f"{now - first} {now - last}")
    names = [keys.deaths, keys.hosts, keys.prompts, keys.rollouts]
    arguments = ["rollout.0-x", "rollout.0", SEEN, LEASE]
    await connection.read("DEL", keys.rollouts)  # a stream may be gone
    assert await connection.call("suspects", names, arguments) == suspects
    await connection.read("DEL", keys.hosts)
    await connection.read("XGROUP", "DELCONSUMER", keys.prompts, "g", "rollout.0-x")
    assert await connection.call("suspects", names, arguments) == suspects, "the first answer stays"


async def test_with_a_short_lease_the_answer_waits_for_the_beats_of_those_who_live(ledgers: Ledgers):
    keys, connection = ledgers.train.keys, ledgers.connection
    await admit(ledgers.train, 0)
    await lease(ledgers.train, "prompts", "rollout.0-x")
    seconds, micros = await connection.read("TIME")
    now = int(seconds) * 1000 + int(micros) // 1000
    for role in ("rollout.0", "reward.0"):
        await connection.read("HSET", keys.hosts, f"a {role} 1", f"{now - 90_000} {now - 3_000}")
    names = [keys.deaths, keys.hosts, keys.prompts]
    for silent_ms, suspects in ((3_000, None), (5_500, 0)):
        arguments = ["rollout.0-x", "rollout.0", silent_ms, 3_000]
        assert await connection.call("suspects", names, arguments) == suspects


async def test_work_is_left_until_it_is_known_what_died(ledgers: Ledgers, monkeypatch):
    await admit(ledgers.train, 0)
    await abandon(ledgers.train, deaths=1)
    answers = [0, None]

    async def suspects(*_: Any) -> int | None:
        return answers.pop()

    monkeypatch.setattr(Leases, "_suspects", suspects)
    done: list[Lease] = []
    async with working(ledgers, generating(done)):
        await until(lambda: done)
    assert [found.deliveries for found in done] == [1]


async def test_what_was_said_of_a_death_is_void_when_the_process_renews(ledgers: Ledgers):
    """It was stalled with one piece of work; when it dies later, with many, each counts as one of many."""
    deaths = ledgers.train.keys.deaths
    async with working(ledgers, forever, PATIENT) as leases:
        await ledgers.connection.read("HSET", deaths, leases.consumer, "1 0")
        await leases._renew(ledgers.train.keys.prompts)
        assert await ledgers.connection.read("HGET", deaths, leases.consumer) is None


ON_SPOT = """
import asyncio, socket, sys
from pathlib import Path
from streamrl.config import LeaseConfig
from streamrl.runfile import read_saved
from streamrl.queues import Leases, open_role

async def hold(lease):
    print("held", flush=True)
    await asyncio.Event().wait()

async def main(run_dir, name):
    async with open_role(name, read_saved(run_dir / "run.json").config, run_dir) as role:
        await Leases([role.ledgers.train], "prompts", name, LeaseConfig(seconds=6), 6, hold).run(asyncio.Event())

socket.gethostname = lambda: "spot"
asyncio.run(main(Path(sys.argv[1]), sys.argv[2]))
"""


@pytest.mark.slow
async def test_two_preemptions_of_a_host_do_not_make_its_work_suspect(
    ledgers: Ledgers, run: RedisRun, config: RunConfig
):
    """Real processes, all of one host, killed at once, twice: then all work runs together, and none of it dies."""
    for cursor in range(12):
        await admit(ledgers.train, cursor)
    for _ in range(2):
        holders = [start(ON_SPOT, run, config, f"rollout.{number}") for number in range(2)]
        try:
            for holder in holders:
                for _ in range(6):
                    assert (await asyncio.to_thread(holder.stdout.readline)) == b"held\n"
        finally:
            for holder in holders:
                holder.send_signal(signal.SIGKILL)
            for holder in holders:
                holder.wait()
    together = asyncio.Barrier(12)
    done: list[Lease] = []

    async def handle(found: Lease) -> None:
        async with asyncio.timeout(30):
            await together.wait()
        await generating(done)(found)

    async with working(ledgers, handle, LeaseConfig(seconds=6), width=12):
        await until(lambda: len(done) == 12)
    assert {found.deliveries for found in done} == {1}
    assert await ledgers.train.dead_letters() == []


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
    assert {letter.group_id for letter in await ledgers.train.dead_letters()} == {3, 11}
    assert await ledgers.connection.read("XLEN", ledgers.train.keys.rollouts) == 36


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
        assert [found.group_id for found in done] == [1]
        since = math.inf
        await until(lambda: len(done) == 2)
    assert done[1].group_id == expired.group_id


async def test_a_new_process_waits_one_lease_before_it_takes_over(ledgers: Ledgers):
    """It cannot know of an outage before its start. What was handed back it takes at once."""
    await admit(ledgers.train, 0)
    await abandon(ledgers.train, deaths=1)
    await admit(ledgers.train, 1)
    await abandon(ledgers.train, deaths=0, owner=UNOWNED)
    done: list[Lease] = []
    async with working(ledgers, generating(done), PATIENT):
        await until(lambda: done)
    assert [(found.group_id, found.deliveries) for found in done] == [(1, 1)]
    assert (b"dead-1", 1) in await pending(ledgers.train)


async def test_what_expired_waits_behind_nobody(ledgers: Ledgers):
    """The first look is full of entries that are not to be taken, its own that are late to be renewed: it goes on."""
    many = room = 3 * _PAGE
    for cursor in range(many):
        await admit(ledgers.train, cursor)
    async with working(ledgers, forever, PATIENT, width=lambda: room, drain=0.05) as leases:
        await until(lambda: leases.leased == many)
        for stream, entry in leases._leased:
            late = ("XCLAIM", stream, "g", leases.consumer, 0, entry, "IDLE", 100_000, "JUSTID")
            await ledgers.connection.read(*late)
        await admit(ledgers.train, many)
        await abandon(ledgers.train, deaths=0, owner=UNOWNED)
        room += 1
        leases._scan_at = 0.0
        await until(lambda: leases.leased == many + 1)
