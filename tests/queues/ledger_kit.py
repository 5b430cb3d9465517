"""Short ways to put groups where a test needs them; `faults` are those that `streamrl audit` finds (test_audit)."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

from streamrl.queues import Lease, Ledger, replies
from streamrl.queues.keys import ALL_SAMPLES
from streamrl.queues.records import Admission, ReplayOutcome
from streamrl.runtime.audit import structural_faults as faults

GROUP = "g"


async def until(condition: Callable[[], Any], seconds: float = 60.0) -> None:
    """Wait for a condition that other tasks make true; `TimeoutError` after `seconds`."""
    async with asyncio.timeout(seconds):
        while not condition():  # noqa: ASYNC110 - what is waited for has no event
            await asyncio.sleep(0.005)


async def until_async(condition: Callable[[], Awaitable[Any]], seconds: float = 60.0) -> None:
    """Like `until`, for a condition that has to be asked for."""
    async with asyncio.timeout(seconds):
        while not await condition():  # noqa: ASYNC110 - what is waited for has no event
            await asyncio.sleep(0.005)


async def admit(ledger: Ledger, cursor: int, **changed: Any) -> Admission:
    arguments = {
        "fingerprint": "data",
        "prompt": b"prompt %d" % cursor,
        "samples": 2,
        "min_group": 1,
        "budget": 100,
        "hard_cap": 100,
        "max_dead": 100,
        "version": 0,
    }
    return await ledger.admit(cursor=cursor, **(arguments | changed))


async def lease(ledger: Ledger, stage: str, consumer: str = "worker", count: int = 1) -> list[Lease]:
    """Lease new entries without any of the machinery of `Leases`."""
    stream = getattr(ledger.keys, stage)
    command = ("XREADGROUP", "GROUP", GROUP, consumer, "COUNT", count, "STREAMS", stream, ">")
    found = replies.streams(await ledger.connection.read(*command)).get(stream, [])
    return [_lease(ledger, stage, consumer, entry, fields) for entry, fields in found]


def _lease(
    ledger: Ledger, stage: str, consumer: str, entry: str, fields: dict[bytes, bytes], deliveries: int = 1
) -> Lease:
    number = fields[b"k"].decode() if stage == "rollouts" else None
    sample = int(number) if number is not None and number != ALL_SAMPLES else None
    group, attempt = int(fields[b"g"]), int(fields[b"a"])
    whole = number == ALL_SAMPLES
    return Lease(ledger, entry, group, attempt, sample, deliveries, is_group=whole, consumer=consumer)


async def take(ledger: Ledger, stage: str, old: Lease, consumer: str, deaths: int | None = None) -> Lease | None:
    """Take a lease away from whoever holds it, as after its expiry; `deaths`: those that the taker knows of."""
    stream = getattr(ledger.keys, stage)
    if deaths is None:
        rows = await ledger.connection.read("XPENDING", stream, GROUP, old.entry, old.entry, 1)
        deaths = rows[0][3] if rows else old.deliveries
    fields = await ledger.connection.call("claim", [stream], [consumer, old.entry, 0, deaths, deaths + 1])
    return None if fields is None else _lease(ledger, stage, consumer, old.entry, replies.pairs(fields), deaths + 1)


async def close_group(ledger: Ledger, cursor: int, samples: int = 2, **changed: Any) -> None:
    """Admit a group, emit and score all of its samples."""
    await admit(ledger, cursor, samples=samples, **changed)
    (prompt,) = await lease(ledger, "prompts")
    for k in range(samples):
        assert await ledger.emit(prompt, k, b"payload %d.%d" % (cursor, k))
    for sample in await lease(ledger, "rollouts", count=samples):
        await ledger.score(sample, b"score %d.%d" % (cursor, sample.sample or 0))


async def replay(ledger: Ledger, group_id: int, **bounds: int) -> ReplayOutcome:
    """Admit one dead group again."""
    return (await ledger.replay_each([group_id], **bounds))[group_id]


async def same_again(ledger: Ledger, call: Callable[[], Awaitable[Any]]) -> None:
    """A repeat of a call changes no key, and nothing is out of place."""
    before = await everything(ledger)
    await call()
    assert await everything(ledger) == before
    assert await faults(ledger) == []


async def everything(ledger: Ledger) -> dict[str, Any]:
    """All keys of all key spaces with their values, pending entries without their idle times: equal means unchanged."""
    found: dict[str, Any] = {}
    call = ledger.connection.read
    names, cursor = [], b"0"
    while True:
        cursor, page = await call("SCAN", cursor, "COUNT", 1000)
        names += page
        if cursor == b"0":
            break
    for key in sorted(names):
        kind = await call("TYPE", key)
        if kind == b"hash":
            value: Any = replies.pairs(await call("HGETALL", key))
        elif kind == b"zset":
            value = await call("ZRANGE", key, 0, -1)
        elif kind == b"set":
            value = sorted(await call("SMEMBERS", key))
        elif kind == b"stream":
            groups = [(group[b"name"], group[b"last-delivered-id"]) for group in await call("XINFO", "GROUPS", key)]
            pending = [
                [row[:2] + row[3:] for row in await call("XPENDING", key, name, "-", "+", 1000)] for name, _ in groups
            ]
            value = (await call("XRANGE", key, "-", "+"), groups, pending)
        else:
            value = await call("GET", key)
        found[key.decode()] = value
    return found
