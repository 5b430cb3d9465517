"""Samples per second through reward workers, next to what there is without them.

    python benchmarks/rewards.py [--json FILE] [--rounds N] [--only rule,scaling,http]

Workers are processes as in a run, on a real Redis with an append-only file. Samples (512 tokens each) lie in Redis
before they are put where workers look, so nothing but scoring is timed: from that moment until the stream is empty.

rule      one worker with `exact_match`, next to a process that leases, reads and scores as fast as the ledger lets it
          and looks at nothing. Goal: 60 %. The same in processor time, which other work on the machine does not change.
          Then one worker with `regex`, which matches in processes that can be killed (their time is not counted).
scaling   1, 2 and 4 workers, with `exact_match` and with a reward that waits 50 ms and has 16 places in each worker.
http      one worker with `reward_model` on a server that takes 32 requests at a time for 50 ms, next to sixty-four
          connections that send the same requests to the same server and wait for the answers. Goal: 90 %.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import orjson
from facts import write_json

from streamrl import wire
from streamrl.config import LeaseConfig, RedisConfig, RunConfig
from streamrl.queues import Lease, Leases, Ledgers, embedded, open_ledgers
from streamrl.runfile import LoadedConfig, save

HERE = Path(__file__).parent
SAMPLES, TOKENS, WIDTH = 8, 512, 64
TEXT = "4"
BATCH, BATCH_SECONDS = 32, 0.05


@dataclass(frozen=True)
class Found:
    """One measurement: samples per second, and processor seconds per sample of all processes that score."""

    rate: float
    cpu: float


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, metavar="FILE")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--groups", type=int, default=750, help="groups of eight samples for a rule")
    parser.add_argument("--only", default="rule,scaling,http")
    parser.add_argument("--bare-worker", type=Path, metavar="RUN_DIR", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.bare_worker:
        asyncio.run(bare_worker(arguments.bare_worker))
        return
    parts: dict[str, Callable[[int, int], Awaitable[dict[str, Any]]]] = {"rule": rule, "scaling": scaling, "http": http}
    results: dict[str, Any] = {"rounds": arguments.rounds, "tokens": TOKENS, "width": WIDTH}
    for name in arguments.only.split(","):
        results[name] = asyncio.run(parts[name](arguments.rounds, arguments.groups))
        print(name)
        for key, value in results[name].items():
            print(f"  {key:34} {value}")
    if arguments.json:
        write_json(arguments.json, results)


async def rule(rounds: int, groups: int) -> dict[str, Any]:
    """One worker with a trivial rule, and the ledger alone, in turn."""
    config = config_of({"use": "exact_match"})
    killable = config_of({"use": "regex", "args": {"pattern": TEXT}})
    bare, worker, beside = [], [], []
    for _ in range(rounds):
        bare.append(await measured(config, groups, bare_process, 1))
        worker.append(await measured(config, groups, worker_process, 1))
        beside.append(await measured(killable, groups, worker_process, 1))
    pairs = list(zip(worker, bare, strict=True))
    return {
        "ledger_per_second": spread([found.rate for found in bare]),
        "worker_per_second": spread([found.rate for found in worker]),
        "worker_to_ledger": spread([ours.rate / theirs.rate for ours, theirs in pairs]),
        "ledger_cpu_us": spread([1e6 * found.cpu for found in bare]),
        "worker_cpu_us": spread([1e6 * found.cpu for found in worker]),
        "worker_to_ledger_by_cpu": spread([theirs.cpu / ours.cpu for ours, theirs in pairs]),
        "in_processes_per_second": spread([found.rate for found in beside]),
        "in_processes_cpu_us": spread([1e6 * found.cpu for found in beside]),
    }


async def scaling(rounds: int, groups: int) -> dict[str, Any]:
    """1, 2 and 4 workers."""
    waiting = {"use": "waiting_reward:Waiting", "args": {"seconds": BATCH_SECONDS}, "concurrency": 16}
    kinds = {"exact_match": ({"use": "exact_match"}, groups), "waits_50_ms": (waiting, max(1, groups // 3))}
    results: dict[str, Any] = {}
    for name, (reward, count) in kinds.items():
        config = config_of(reward)
        rates: dict[int, list[float]] = {1: [], 2: [], 4: []}
        for _ in range(rounds):
            for workers, found in rates.items():
                found.append((await measured(config, count, worker_process, workers)).rate)
        for workers, found in rates.items():
            results[f"{name}_{workers}_per_second"] = spread(found)
            results[f"{name}_{workers}_to_1"] = spread([of / one for of, one in zip(found, rates[1], strict=True)])
    return results


async def http(rounds: int, groups: int) -> dict[str, Any]:
    """One worker that asks a reward model, and a load generator on the same server, in turn."""
    count = max(1, groups // 3)
    with model_server() as url:
        reward = {"use": "reward_model", "name": "judge", "args": {
            "model": "critic", "path": "/score", "body": {"text": "{prompt}{response}"}, "value": "score",
        }}  # fmt: skip
        model = {"kind": "template", "url": [url], "concurrency": WIDTH}
        config = config_of(reward, reward_models={"critic": model})
        bare, worker = [], []
        for _ in range(rounds):
            bare.append(await generated(url, count * SAMPLES))
            worker.append(await measured(config, count, worker_process, 1))
    return {
        "generator_per_second": spread([found.rate for found in bare]),
        "worker_per_second": spread([found.rate for found in worker]),
        "worker_to_generator": spread([ours.rate / theirs.rate for ours, theirs in zip(worker, bare, strict=True)]),
        "generator_cpu_us": spread([1e6 * found.cpu for found in bare]),
        "worker_cpu_us": spread([1e6 * found.cpu for found in worker]),
    }


def spread(values: list[float]) -> dict[str, float]:
    """Median and range."""
    return {
        "median": round(statistics.median(values), 4),
        "least": round(min(values), 4),
        "greatest": round(max(values), 4),
    }


def config_of(reward: dict[str, Any], **sections: Any) -> RunConfig:
    """A run with one reward."""
    return RunConfig.model_validate(
        {
            "name": "bench",
            "redis": RedisConfig(maxmemory=4 << 30).model_dump(),
            "rewards": [reward],
            "reward_worker": {"concurrency": WIDTH},
            "plugin_paths": [str(HERE)],
            **sections,
        }
    )


async def measured(config: RunConfig, groups: int, start: Callable[[int, Path], Any], workers: int) -> Found:
    """Samples per second of so many processes, from the moment the samples are there until all are scored."""
    with tempfile.TemporaryDirectory() as folder:
        run_dir = Path(folder)
        save(LoadedConfig(config=config, origins={}), run_dir / "run.json")
        async with embedded.running(config.redis, run_dir), open_ledgers(config, run_dir) as ledgers:
            await filled(ledgers, groups)
            keys, read = ledgers.train.keys, ledgers.connection.read
            parked = keys.rollouts + ":parked"
            await read("RENAME", keys.rollouts, parked)
            await ledgers.train.ensure()
            with contextlib.ExitStack() as processes:
                started = [processes.enter_context(start(index, run_dir)) for index in range(workers)]
                await all_ready(ledgers, workers)
                computed, began = sum(map(cpu_seconds, started)), time.perf_counter()
                await read("RENAME", parked, keys.rollouts)
                while await read("XLEN", keys.rollouts):  # noqa: ASYNC110 (nobody announces it)
                    await asyncio.sleep(0.01)
                seconds = time.perf_counter() - began
                computed = sum(map(cpu_seconds, started)) - computed
            closed = len(await ledgers.train.closed())
            assert closed == groups, f"{closed} of {groups} groups are scored"
            assert not await ledgers.train.dead_letters(), "some were not scored"
    return Found(groups * SAMPLES / seconds, computed / (groups * SAMPLES))


def cpu_seconds(running: subprocess.Popen[str]) -> float:
    """Processor time of the threads of a process so far."""
    threads = Path(f"/proc/{running.pid}/task").glob("*/schedstat")
    return sum(int(thread.read_text().split()[0]) for thread in threads) / 1e9


async def filled(ledgers: Ledgers, groups: int) -> None:
    """Groups of generated samples that wait for their scores."""
    prompt = wire.encode(wire.Prompt(tokens=wire.pack_int32(range(64)), text="2 + 2 =", answer=TEXT))
    sample = wire.encode(
        wire.Sample(
            tokens=wire.pack_int32(range(TOKENS)),
            logprobs=wire.pack_float32([-0.5] * TOKENS),
            runs=[(0, 0)],
            finish="stop",
            text=TEXT,
        )
    )
    bounds: dict[str, Any] = {"budget": groups, "hard_cap": groups, "max_dead": 1, "min_group": 1, "version": 0}
    for cursor in range(groups):
        await ledgers.train.admit(cursor=cursor, fingerprint="bench", prompt=prompt, samples=SAMPLES, **bounds)
    left, done = groups, asyncio.Event()

    async def generate(lease: Lease) -> None:
        nonlocal left
        work = await ledgers.train.open_work(lease)
        if work is not None:
            await asyncio.gather(*(ledgers.train.emit(lease, index, sample) for index in work.missing))
            left -= 1
        if not left:
            done.set()

    leases = Leases([ledgers.train], "prompts", "bench", LeaseConfig(), WIDTH // SAMPLES, generate)
    async with asyncio.TaskGroup() as tasks:
        running = tasks.create_task(leases.run(asyncio.Event()))
        await done.wait()
        running.cancel()


async def all_ready(ledgers: Ledgers, workers: int) -> None:
    async with asyncio.timeout(120):
        while True:
            states = [status.get("state") for status in (await ledgers.roles.read()).values()]
            if states.count("ready") == workers:
                break
            await asyncio.sleep(0.1)
    await asyncio.sleep(1.0)  # what a worker does just after its start is over


@contextlib.contextmanager
def process(*command: Any) -> Iterator[subprocess.Popen[str]]:
    environ = {name: value for name, value in os.environ.items() if not name.startswith("STREAMRL_")}
    started = subprocess.Popen(
        [sys.executable, *map(str, command)], env=environ, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    )
    try:
        yield started
    finally:
        started.kill()
        started.wait()
        assert started.stdout is not None
        started.stdout.close()


def worker_process(index: int, run_dir: Path) -> Any:
    return process("-P", "-m", "streamrl.runtime", "reward", index, run_dir)


def bare_process(_: int, run_dir: Path) -> Any:
    return process(__file__, "--bare-worker", run_dir)


@contextlib.contextmanager
def model_server() -> Iterator[str]:
    with process(HERE / "reward_model_server.py", BATCH, BATCH_SECONDS) as started:
        assert started.stdout is not None
        yield f"http://127.0.0.1:{int(started.stdout.readline())}"


async def bare_worker(run_dir: Path) -> None:
    """Lease, read and score, with the ledger and nothing else. Runs until it is killed."""
    config = config_of({"use": "exact_match"})
    score = wire.encode(wire.SampleScore(value=1.0, parts={"exact_match": 1.0}, seconds=0.001))
    async with open_ledgers(config, run_dir) as ledgers:

        async def handle(lease: Lease) -> None:
            if await lease.ledger.leased_sample(lease) is not None:
                await lease.ledger.score(lease, score)

        both = [ledgers.train, ledgers.evaluation]
        leases = Leases(both, "rollouts", "bare", config.lease, WIDTH, handle)
        await ledgers.roles.beat("bare", {"state": "ready"}, 600)
        await leases.run(asyncio.Event())


async def generated(url: str, requests: int) -> Found:
    """Requests per second that sixty-four connections get answered, and processor seconds of each."""
    body = orjson.dumps({"text": "2 + 2 =" + TEXT})

    async def send(session: aiohttp.ClientSession, left: Iterator[int]) -> None:
        for _ in left:
            async with session.post("/score", data=body, headers={"Content-Type": "application/json"}) as response:
                assert "score" in orjson.loads(await response.read())

    async with session_of(url) as session:
        await asyncio.gather(*(send(session, iter([0])) for _ in range(WIDTH)))  # the connections are there
        left = iter(range(requests))
        computed, began = time.process_time(), time.perf_counter()
        await asyncio.gather(*(send(session, left) for _ in range(WIDTH)))
        seconds, computed = time.perf_counter() - began, time.process_time() - computed
        return Found(requests / seconds, computed / requests)


@contextlib.asynccontextmanager
async def session_of(url: str) -> AsyncIterator[aiohttp.ClientSession]:
    async with aiohttp.ClientSession(url, connector=aiohttp.TCPConnector(limit=0)) as session:
        yield session


if __name__ == "__main__":
    main()
