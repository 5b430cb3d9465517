"""A real rollout worker and a bare load generator in turn on one running server."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import random
import shutil
import sys
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import orjson
import torch
from random_model import write_model
from spread import ratios, spread

from streamrl.config import RunConfig, SourceConfig
from streamrl.demo.prepare import make_tokenizer
from streamrl.engine import Request
from streamrl.http import HttpClient
from streamrl.producers.dataset import PromptLimits, load_prompts
from streamrl.producers.tokenizer import Tokenizer
from streamrl.queues import Ledgers, embedded, open_ledgers
from streamrl.runfile import LoadedConfig, save
from streamrl.servers.dialect import Dialect, ServerMetrics
from streamrl.servers.kinds import make_dialect
from streamrl.servers.process import ManagedServer, ServerSettings
from streamrl.weight_sync.publisher import Publisher
from streamrl.wire import Prompt, decode

GROUP = 8
PROMPTS = 256
PROMPT_TOKENS = 32
PARAMETERS = 300_000
CONTEXT = 16384
VERSION = 1
START_SECONDS = 300.0


@dataclass(frozen=True)
class Load:
    """Requests in flight, tokens of each response, seconds that are counted of each run, and those before them.

    The worker raises its concurrency step by step, and requests that began together end together for a while.
    """

    width: int
    tokens: int
    seconds: float
    settle: float


@dataclass(frozen=True)
class Rate:
    """Tokens per second, and microseconds of processor time for each: of the driving process, and of all together.

    The processor time of all, server and Redis included, says on a machine without spare cores what the speed says on
    one where nothing else runs.
    """

    tokens: float
    driver: float
    together: float


def cpu_seconds(pid: int) -> float:
    """Processor time of a process."""
    return _times(Path(f"/proc/{pid}/stat").read_text())[0]


def cpu_seconds_of_group(group: int) -> float:
    """Processor time of all processes of a process group."""
    found = 0.0
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            seconds, its_group = _times(path.read_text())
            found += seconds if its_group == group else 0.0
    return found


def _times(stat: str) -> tuple[float, int]:
    fields = stat.rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK"), int(fields[2])


def run_config(kind: str, model: Path, width: int, tokens: int, context: int, url: str = "") -> RunConfig:
    return RunConfig.model_validate(
        {
            "name": "bench",
            "max_dead": 1_000_000,
            "redis": {"maxmemory": 4 << 30, "fsync_period": 1e-6},
            "model": {"path": str(model), "context": context},
            "sampling": {"group_size": GROUP, "min_group": 1, "max_new_tokens": tokens},
            "engine": {"kind": kind, "slots": width, "dtype": "bfloat16", "device": "cpu", "url": [url] if url else []},
            "weights": {"dtype": "bfloat16"},
        }
    )


@contextlib.asynccontextmanager
async def server(config: RunConfig, folder: Path) -> AsyncIterator[ManagedServer]:
    """A server as streamrl starts it, on the first half of the cores; who drives it gets the others.

    A model on a GPU does not wait for the processor that its client uses. On shared cores it would, and the ratio would
    say how two processes fight for them.
    """
    cores = sorted(os.sched_getaffinity(0))
    half = len(cores) // 2
    started = ManagedServer(make_dialect(config), ServerSettings.of_engine(config), folder, "server", seed=1)
    try:
        os.sched_setaffinity(0, cores[:half] or cores)
        try:
            await started.start()
        finally:
            os.sched_setaffinity(0, cores[half:])
        yield started
    finally:
        await started.stop()
        os.sched_setaffinity(0, cores)


async def measure(kind: str, folder: Path, load: Load, rounds: int) -> dict[str, Any]:
    """Both in turn; the first round only warms up."""
    model = folder / "model"
    weights = write_model(model, PARAMETERS, torch.bfloat16, CONTEXT)
    make_tokenizer().save_pretrained(model)
    config = run_config(kind, model, load.width, load.tokens, CONTEXT)
    prompts = make_prompts(config, folder)
    ours, bare = [], []
    async with server(config, folder) as started:
        url = started.url
        external = run_config(kind, model, load.width, load.tokens, CONTEXT, url)
        dialect, client = make_dialect(external), HttpClient(url)
        counter = Counter(dialect, client, started.pid or 0)
        try:
            async with replica(external, folder, weights, prompts, counter) as driven:
                for number in range(rounds + 1):
                    found = await driven.run(load), await drive_bare(url, dialect, counter, prompts, load)
                    if number:
                        ours.append(found[0])
                        bare.append(found[1])
        finally:
            await client.close()
    return {
        "tokens_per_second": spread([one.tokens for one in ours]),
        "bare_tokens_per_second": spread([one.tokens for one in bare]),
        "ratio_to_bare": ratios([one.tokens for one in ours], [one.tokens for one in bare]),
        "replica_microseconds_per_token": spread([one.driver for one in ours]),
        "bare_microseconds_per_token": spread([one.driver for one in bare]),
        "all_microseconds_per_token": spread([one.together for one in ours]),
        "bare_all_microseconds_per_token": spread([one.together for one in bare]),
        "ratio_of_processor_time": ratios([one.together for one in bare], [one.together for one in ours]),
    }


def make_prompts(config: RunConfig, folder: Path) -> list[bytes]:
    """Prompts as the feeder makes them of a file."""
    source = random.Random(0)
    lines = [
        {"prompt": "".join(source.choices("abcdefghijklmnopqrstuvwxyz", k=PROMPT_TOKENS)), "answer": ""}
        for _ in range(PROMPTS)
    ]
    path = folder / "train.jsonl"
    path.write_bytes(b"".join(orjson.dumps(line) + b"\n" for line in lines))
    return load_prompts(
        [SourceConfig(source=path)], Tokenizer.load(config.model), PromptLimits(PROMPT_TOKENS, config.model.context)
    ).prompts


class Counter:
    """What the server says of itself."""

    def __init__(self, dialect: Dialect, client: HttpClient, group: int) -> None:
        self._dialect, self._client, self._group = dialect, client, group

    async def figures(self) -> ServerMetrics:
        """Requests running and waiting, and tokens sampled since its start."""
        return self._dialect.read_metrics(await self._client.call(self._dialect.metrics, 10.0))

    async def rate(self, load: Load, driver: int, *others: int) -> Rate:
        """Count tokens from the moment on that all places are taken, and processor time.

        Args:
            load: how long.
            driver: process that sends the requests.
            others: processes that it needs, but for the server.
        """
        begin = time.perf_counter()
        while (await self.figures()).running < load.width:
            assert time.perf_counter() - begin < START_SECONDS
            await asyncio.sleep(0.1)
        await asyncio.sleep(load.settle)
        before = await self._look(driver, *others)
        await asyncio.sleep(load.seconds)
        after = await self._look(driver, *others)
        tokens, seconds, driving, helping, serving = (b - a for a, b in zip(before, after, strict=True))
        return Rate(tokens / seconds, 1e6 * driving / tokens, 1e6 * (driving + helping + serving) / tokens)

    async def _look(self, driver: int, *others: int) -> list[float]:
        tokens = (await self.figures()).tokens_sampled
        helping = sum(map(cpu_seconds, others))
        return [tokens, time.perf_counter(), cpu_seconds(driver), helping, cpu_seconds_of_group(self._group)]

    async def idle(self) -> None:
        """Return when nothing is at the server."""
        while (figures := await self.figures()).running or figures.waiting:  # noqa: ASYNC110  (it is another process)
            await asyncio.sleep(0.1)


class Driven:
    """A rollout worker and its engine in processes of their own, and prompts as long as a run lasts."""

    def __init__(self, ledgers: Ledgers, prompts: list[bytes], counter: Counter, pid: int, engine: int) -> None:
        self._pid, self._engine = pid, engine
        self._ledger, self._prompts, self._counter = ledgers.train, prompts, counter
        self._cursors = itertools.count()

    async def _waiting(self) -> int:
        return await self._ledger.connection.read("XLEN", self._ledger.keys.prompts)

    async def _redis(self) -> int:
        text = await self._ledger.connection.read("INFO", "server")
        return int(next(line for line in text.splitlines() if line.startswith(b"process_id")).partition(b":")[2])

    async def _feed(self, groups: int) -> None:
        bounds = {"samples": GROUP, "min_group": 1, "budget": 1 << 30, "hard_cap": 1 << 30, "max_dead": 1 << 20}
        while True:
            for _ in range(groups - await self._waiting()):
                cursor = next(self._cursors)
                prompt = self._prompts[cursor % len(self._prompts)]
                await self._ledger.admit(cursor=cursor, fingerprint="bench", prompt=prompt, version=VERSION, **bounds)
            await asyncio.sleep(0.1)

    async def run(self, load: Load) -> Rate:
        """One run of the worker."""
        feeding = asyncio.create_task(self._feed(3 * max(1, load.width // GROUP)))
        try:
            return await self._counter.rate(load, self._pid, self._engine, await self._redis())
        finally:
            feeding.cancel()
            while await self._waiting():  # noqa: ASYNC110  (it is another process)
                await asyncio.sleep(0.1)
            await self._counter.idle()


@contextlib.asynccontextmanager
async def replica(
    config: RunConfig, folder: Path, weights: dict[str, torch.Tensor], prompts: list[bytes], counter: Counter
) -> AsyncIterator[Driven]:
    """Redis, a published version, and an engine and a rollout worker as the supervisor starts them."""
    run_dir = folder / "run"
    run_dir.mkdir()
    save(LoadedConfig(config=config, origins={}), run_dir / "run.json")
    async with embedded.running(config.redis, run_dir), open_ledgers(config, run_dir) as ledgers:
        publisher = Publisher(config.weights, config.name, run_dir)
        await ledgers.train.fence("bench", 0)
        manifest = publisher.publish(
            epoch=1, version=VERSION, step=1, tensors=[(name, 1.001 * tensor) for name, tensor in weights.items()]
        )
        await ledgers.train.finish_step("bench", 0, VERSION, manifest)
        async with role("engine", run_dir) as engine, role("rollout", run_dir) as worker:
            yield Driven(ledgers, prompts, counter, worker, engine)
        shutil.rmtree(publisher.root)


@contextlib.asynccontextmanager
async def role(kind: str, run_dir: Path) -> AsyncIterator[int]:
    """A role as the supervisor starts it; its process id."""
    with (run_dir / f"{kind}.log").open("wb") as log:
        command = [sys.executable, "-m", "streamrl.runtime", kind, "0", str(run_dir)]
        process = await asyncio.create_subprocess_exec(*command, stdout=log, stderr=log)
        try:
            yield process.pid
        finally:
            process.terminate()
            await asyncio.wait_for(process.wait(), 60)


async def drive_bare(url: str, dialect: Dialect, counter: Counter, prompts: list[bytes], load: Load) -> Rate:
    """One run of a load generator that sends what the worker sends, and throws away what comes."""
    tokens = [decode(prompt, Prompt).token_ids for prompt in prompts]
    numbers = itertools.count()

    async def keep(session: aiohttp.ClientSession) -> None:
        while True:
            number = next(numbers)
            request = Request(f"{number:032x}", tokens[number // GROUP % len(tokens)], load.tokens)
            call = dialect.generation(request, version=VERSION)
            async with session.request(call.method, url + call.path, json=call.body) as answer:
                assert answer.status == 200
                await answer.read()

    async with aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0), timeout=aiohttp.ClientTimeout()
    ) as session:
        tasks = [asyncio.create_task(keep(session)) for _ in range(load.width)]
        try:
            return await counter.rate(load, os.getpid())
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            await counter.idle()
