"""Processes and coroutines that lease, for the tests of leases."""

from __future__ import annotations

import asyncio
import contextlib
import subprocess
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

from streamrl.config import LeaseConfig, RunConfig
from streamrl.queues import Lease, Leases, Ledger, Ledgers
from streamrl.runfile import LoadedConfig, save
from tests.queues.ledger_kit import lease
from tests.redis_kit import RedisRun

QUICK = LeaseConfig(seconds=0.3, max_hold=60, max_deliveries=4)
PATIENT = LeaseConfig(seconds=60, max_hold=900, max_deliveries=4)
Handle = Callable[[Lease], Awaitable[None]]


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


def start(program: str, run: RedisRun, config: RunConfig, *words: str) -> subprocess.Popen[bytes]:
    """A real process that leases from the run."""
    save(LoadedConfig(config=config, origins={}), run.run_dir / "run.json")
    return subprocess.Popen([sys.executable, "-c", program, str(run.run_dir), *words], stdout=subprocess.PIPE)


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
