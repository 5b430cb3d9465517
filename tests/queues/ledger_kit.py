"""Short ways to put groups where a test needs them, and the audit of the structure of a ledger."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable
from typing import Any

from streamrl.queues import Lease, Ledger, replies
from streamrl.queues.keys import ALL_SAMPLES
from streamrl.queues.records import Admission, ReplayOutcome

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
    return [_lease(ledger, stage, entry, fields) for entry, fields in found]


def _lease(ledger: Ledger, stage: str, entry: str, fields: dict[bytes, bytes], deliveries: int = 1) -> Lease:
    number = fields[b"k"].decode() if stage == "rollouts" else None
    sample = int(number) if number is not None and number != ALL_SAMPLES else None
    return Lease(
        ledger, entry, int(fields[b"g"]), int(fields[b"a"]), sample, deliveries, is_group=number == ALL_SAMPLES
    )


async def take(ledger: Ledger, stage: str, old: Lease, consumer: str) -> Lease | None:
    """Take a lease away from whoever holds it, as after its expiry."""
    stream = getattr(ledger.keys, stage)
    fields = await ledger.connection.call(
        "claim", [stream], [consumer, old.entry, 0, old.deliveries, old.deliveries + 1]
    )
    return None if fields is None else _lease(ledger, stage, old.entry, replies.pairs(fields), old.deliveries + 1)


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


def _order(entry: str) -> tuple[int, int]:
    left, _, right = entry.partition("-")
    return int(left), int(right)


async def faults(ledger: Ledger) -> list[Any]:
    """What is wrong with the structure of a ledger; nothing may be running. Empty is right.

    A group has a hash if and only if it is live. Its prompt is in `prompts` if and only if a sample has neither payload
    nor cause of death; a sample is in `rollouts` if and only if it has a payload and neither score nor cause, and of a
    group that is scored whole all together if and only if nothing is left to generate and something to score; a group
    is in `scored` if and only if all samples have a score or a cause, which is what `closed` means. Nothing is there
    twice, nothing pending without an entry, nothing delivered without being pending.
    """
    keys, call = ledger.keys, ledger.connection.read
    bad: list[Any] = []
    live = {int(group_id) for group_id in await call("ZRANGE", keys.live, 0, -1)}
    prefix = keys.group(0).removesuffix("0")
    hashes = {
        int(key.removeprefix(prefix)): value
        for key, value in (await everything(ledger)).items()
        if key.startswith(prefix)
    }
    if set(hashes) != live:
        bad.append(("hash without live or live without hash", set(hashes) ^ live))

    async def entries(stream: str) -> list[tuple[str, dict[bytes, bytes]]]:
        return replies.entries(await call("XRANGE", stream, "-", "+"))

    prompts = Counter(int(f[b"g"]) for _, f in await entries(keys.prompts))
    rollouts = Counter((int(f[b"g"]), f[b"k"].decode()) for _, f in await entries(keys.rollouts))
    scored = Counter(int(f[b"g"]) for _, f in await entries(keys.scored))
    for name, counter in (("prompts", prompts), ("rollouts", rollouts), ("scored", scored)):
        bad += [("twice", name, place) for place, times in counter.items() if times > 1]
    dangling = (set(prompts) | {group_id for group_id, _ in rollouts} | set(scored)) - live
    bad += [("entry of a group that is not live", group_id) for group_id in dangling]
    for group_id, known in hashes.items():
        bad += _group_faults(group_id, known, prompts, rollouts, scored)
    for stream in (keys.prompts, keys.rollouts):
        pending = {row[0].decode() for row in await call("XPENDING", stream, GROUP, "-", "+", 100_000)}
        (group,) = await call("XINFO", "GROUPS", stream)
        last = _order(group[b"last-delivered-id"].decode())
        ids = {entry for entry, _ in await entries(stream)}
        bad += [("delivered and not pending", stream, e) for e in ids if _order(e) <= last and e not in pending]
        bad += [("pending without an entry", stream, e) for e in pending - ids]
    return bad


def _group_faults(group_id: int, known: dict[bytes, bytes], prompts: Any, rollouts: Any, scored: Any) -> list[Any]:
    bad: list[Any] = []
    todo = left = failed = waiting = 0
    whole = b"whole" in known
    for k in range(int(known[b"n"])):
        payload, score, cause = (b"%c:%d" % (letter, k) in known for letter in b"srx")
        todo += not payload and not cause
        left += not score and not cause
        failed += cause
        waiting += payload and not score and not cause
        if ((group_id, str(k)) in rollouts) != (payload and not score and not cause and not whole):
            bad.append(("sample in the wrong place", group_id, k))
        if whole and score and known[b"st"] == b"open":
            bad.append(("scored alone", group_id, k))
        if score and cause:
            bad.append(("score and cause of death", group_id, k))
    if [todo, left, failed] != [int(known[name]) for name in (b"todo", b"left", b"nx")]:
        bad.append(("counters", group_id, todo, left, failed, known))
    if ((group_id, ALL_SAMPLES) in rollouts) != (whole and waiting > 0 and todo == 0):
        bad.append(("group in the wrong place", group_id))
    if (group_id in prompts) != (todo > 0):
        bad.append(("prompt in the wrong place", group_id))
    if not (group_id in scored) == (left == 0) == (known[b"st"] == b"closed"):
        bad.append(("closed", group_id, left, known[b"st"]))
    return bad
