"""Samples per second through lease, emit, read and score, next to bare pipelined Redis commands on the same server.

    python benchmarks/queue.py [--json FILE] [--groups N]      (that file only calls this one)

One asyncio process plays rollout replica and reward worker with the real `Leases`; sixty-four samples are in work at a
time, as in a reward worker, and their calls travel together. The bare figures are what the same server does with
redis-py's own pipelines of sixty-four: XADD, XREADGROUP, and XACK with XDEL, each of a payload. A sample of the ledger
is four scripts or reads (emit, lease, read, score); the floor of a queue with the same promise is the three bare ones.
`whole_` are the figures of groups that are scored whole: one lease, one read and one script for the eight samples.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import redis.asyncio
from facts import write_json

from streamrl.config import LeaseConfig, RedisConfig, RunConfig
from streamrl.queues import Lease, Leases, Ledger, Ledgers, embedded, open_ledgers

SAMPLES = 8
WIDTH = 64
ROUNDS = 5
SIZES = {"1 KiB": 1 << 10, "26 KiB": 26 << 10}
# The wait of a learner for the disk of Redis, once per start, is no throughput.
CONFIG = RunConfig(name="bench", redis=RedisConfig(maxmemory=4 << 30, fsync_period=1e-6))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, metavar="FILE")
    parser.add_argument("--groups", type=int, default=300, help="groups of eight samples per round")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        results = asyncio.run(measure(Path(folder), arguments.groups))
    for size, figures in results["payloads"].items():
        print(size)
        for name, value in figures.items():
            print(f"  {name:36} {value:>10,.0f}")
    if arguments.json:
        write_json(arguments.json, results)


async def measure(folder: Path, groups: int) -> dict[str, Any]:
    """Median of the rounds for each size of payload."""
    payloads = {}
    for name, size in SIZES.items():
        rounds = []
        for i in range(ROUNDS):
            async with server(folder / f"{size}-{i}") as ledgers:
                single = await ledger_round(ledgers.train, groups, size)
                together = await ledger_round(ledgers.evaluation, groups, size, whole=True)
                rounds.append(
                    single
                    | {f"whole_{figure}": value for figure, value in together.items()}
                    | await bare_round(folder / f"{size}-{i}", size)
                )
        payloads[name] = {key: statistics.median(found[key] for found in rounds) for key in rounds[0]}
    return {
        "samples_per_second": payloads["1 KiB"]["samples_per_second"],
        "payloads": payloads,
        "rounds": ROUNDS,
        "groups": groups,
        "samples_per_group": SAMPLES,
        "width": WIDTH,
        "server": ".".join(map(str, embedded.find_server().version)),
    }


@asynccontextmanager
async def server(run_dir: Path) -> AsyncIterator[Ledgers]:
    """A fresh server with the settings of a run: unix socket, append-only file, fsync every second."""
    async with embedded.running(CONFIG.redis, run_dir), open_ledgers(CONFIG, run_dir) as ledgers:
        yield ledgers


async def ledger_round(ledger: Ledger, groups: int, size: int, *, whole: bool = False) -> dict[str, float]:
    """Admit, generate and score, retire; each stage timed alone, so that one is not the other's load."""
    await ledger.set_group_scored(whole)
    seconds = {"admit": await timed(lambda: admit_all(ledger, groups))}
    payload = b"\x5a" * size

    async def generate(lease: Lease) -> None:
        work = await ledger.open_work(lease)
        if work is not None:
            await asyncio.gather(*(ledger.emit(lease, k, payload) for k in work.missing))

    async def score(lease: Lease) -> None:
        if lease.is_group:
            group = await ledger.leased_group(lease)
            assert group is not None
            await ledger.score_group(lease, dict.fromkeys(group.payloads, b"\x80"), {})
        elif await ledger.leased_sample(lease) is not None:
            await ledger.score(lease, b"\x80")

    entries, width = (groups, WIDTH // SAMPLES) if whole else (groups * SAMPLES, WIDTH)
    seconds["emit"] = await timed(lambda: work(ledger, "prompts", generate, groups, WIDTH // SAMPLES))
    seconds["score"] = await timed(lambda: work(ledger, "rollouts", score, entries, width))
    closed = await ledger.closed()
    assert len(closed) == groups
    await ledger.fence("bench", 0)
    seconds["retire"] = await timed(lambda: ledger.retire("bench", "1-1", 0, closed))
    samples = groups * SAMPLES
    return {
        "samples_per_second": samples / (seconds["emit"] + seconds["score"]),
        "with_admit_and_retire_per_second": samples / sum(seconds.values()),
        **{f"{stage}_us_per_sample": 1e6 * spent / samples for stage, spent in seconds.items()},
    }


async def admit_all(ledger: Ledger, groups: int) -> None:
    bounds = {"budget": groups, "hard_cap": groups, "max_dead": 1}
    for cursor in range(groups):
        arguments: dict[str, Any] = {"fingerprint": "bench", "prompt": b"p" * 2048, "version": 0, **bounds}
        await ledger.admit(cursor=cursor, samples=SAMPLES, min_group=2, **arguments)


async def work(ledger: Ledger, stage: Any, handle: Callable[[Lease], Awaitable[None]], count: int, width: int) -> None:
    """Lease and handle until `count` pieces of work are done."""
    left = count
    done = asyncio.Event()

    async def counted(lease: Lease) -> None:
        nonlocal left
        await handle(lease)
        left -= 1
        if not left:
            done.set()

    leases = Leases([ledger], stage, "bench", LeaseConfig(), width, counted)
    async with asyncio.TaskGroup() as tasks:
        running = tasks.create_task(leases.run(asyncio.Event()))
        await done.wait()
        running.cancel()


async def bare_round(run_dir: Path, size: int, count: int = 4096, batch: int = 64) -> dict[str, float]:
    """XADD, XREADGROUP and XACK with XDEL of the same payload, in pipelines of sixty-four."""
    client = redis.asyncio.Redis.from_url(embedded.url(CONFIG.redis, run_dir), protocol=3, legacy_responses=False)
    payload = b"\x5a" * size
    entries: list[Any] = []
    await client.xgroup_create("bare", "g", id="0", mkstream=True)

    async def add() -> None:
        for _ in range(0, count, batch):
            pipeline = client.pipeline(transaction=False)
            for _ in range(batch):
                pipeline.xadd("bare", {"p": payload})
            await pipeline.execute()

    async def read() -> None:
        for _ in range(0, count, batch):
            found = await client.xreadgroup("g", "me", {"bare": ">"}, count=batch)
            entries.append([entry for entry, _ in next(iter(found.values()))])

    async def acknowledge() -> None:
        for ids in entries:
            pipeline = client.pipeline(transaction=False)
            pipeline.xack("bare", "g", *ids)
            pipeline.xdel("bare", *ids)
            await pipeline.execute()

    spent = {"xadd": await timed(add), "xreadgroup": await timed(read), "xack_xdel": await timed(acknowledge)}
    await client.aclose()
    return {"bare_per_second": count / sum(spent.values())} | {
        f"bare_{name}_per_second": count / seconds for name, seconds in spent.items()
    }


async def timed(call: Callable[[], Awaitable[Any]]) -> float:
    began = time.perf_counter()
    await call()
    return time.perf_counter() - began


if __name__ == "__main__":
    main()
