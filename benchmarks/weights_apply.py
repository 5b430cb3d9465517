"""Publish and apply by way of shared memory, next to a plain copy; how long decoding stands still.

The plain copy takes the same bytes over the same road: into new files in /dev/shm of the same sizes, from there into
tensors of the same shapes, the files of the copy before last removed as the publisher removes its own. It has no names,
no checksums, no manifest, and looks at no value. It is made in both ways that there are, through a mapping and by reads
into the tensors; the ratio is that to the faster one.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import mmap
import os
import shutil
import time
from collections.abc import AsyncIterator, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from random_model import write_model
from spread import ratios, spread

import streamrl.producers.engines.weights as engine_weights
from streamrl.config import RunConfig
from streamrl.engine import Request
from streamrl.producers.engines.hf import HfEngine
from streamrl.weight_sync.follower import Apply, Follower
from streamrl.weight_sync.publisher import Publisher
from streamrl.weight_sync.tensors import Named, Version, buckets, raw_bytes

SHM = Path("/dev/shm")
FIRST = 2
"""Versions of a run that are not counted."""


class Stream:
    """The weights stream without Redis: manifests are small."""

    def __init__(self) -> None:
        self._newest: tuple[int, bytes] | None = None
        self._news = asyncio.Condition()

    async def show(self, version: int, manifest: bytes) -> None:
        """Publish."""
        async with self._news:
            self._newest = version, manifest
            self._news.notify_all()

    async def newest(self) -> tuple[int, bytes] | None:
        """See `Versions`."""
        return self._newest

    async def after(self, version: int, seconds: float) -> tuple[int, bytes] | None:
        """See `Versions`."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds), self._news:
                await self._news.wait_for(lambda: self._newest is not None and self._newest[0] > version)
                return self._newest
        return None


class Road:
    """A publisher and a follower: all that lies between a learner's weights and an engine's `apply`, but Redis."""

    def __init__(self, run_dir: Path, weights: Mapping[str, torch.Tensor], apply: Apply, config: RunConfig) -> None:
        self.weights, self._apply_to_engine = weights, apply
        self._publisher = Publisher(config.weights, config.name, run_dir)
        self._stream, self._applied = Stream(), asyncio.Event()
        self._follower = Follower(self._stream, config.weights, self._apply, run=config.name, run_dir=run_dir)
        self._numbers = itertools.count(1)
        self._stop = asyncio.Event()

    async def _apply(self, version: Version) -> None:
        await self._apply_to_engine(version)
        self._applied.set()

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Follow for the length of the block."""
        following = asyncio.create_task(self._follower.run(self._stop))
        try:
            yield
        finally:
            self._stop.set()
            await asyncio.gather(following)
            shutil.rmtree(self._publisher.root)

    async def send(self) -> dict[str, float]:
        """Seconds from the call of `publish` until the engine has the version, and the part until it is published."""
        number = next(self._numbers)
        self._applied.clear()
        begin = time.perf_counter()
        data = await asyncio.to_thread(
            self._publisher.publish, epoch=1, version=number, step=number, tensors=self.weights.items()
        )
        published = time.perf_counter()
        await self._stream.show(number, data)
        await asyncio.wait_for(self._applied.wait(), 600)
        done = time.perf_counter()
        return {"all": done - begin, "publish": published - begin}


class PlainCopy:
    """The same bytes over the same road, and nothing else."""

    def __init__(self, weights: Mapping[str, torch.Tensor], limit: int) -> None:
        self._buckets: list[list[Named]] = list(buckets(weights.items(), limit))
        self._targets = {name: torch.zeros_like(tensor) for name, tensor in weights.items()}
        self._root = SHM / f"streamrl-bench-{os.getpid()}"
        self._folders: list[Path] = []

    def close(self) -> None:
        """Remove the files."""
        shutil.rmtree(self._root, ignore_errors=True)

    def send(self, way: str) -> float:
        """Seconds of one copy; `way` is `mapped` or `read`."""
        begin = time.perf_counter()
        while len(self._folders) > 1:
            shutil.rmtree(self._folders.pop(0))
        folder = self._root / str(time.monotonic_ns())
        folder.mkdir(parents=True)
        self._folders.append(folder)
        for number, bucket in enumerate(self._buckets):
            with (folder / str(number)).open("xb", buffering=0) as file:
                for _, tensor in bucket:
                    write(file.fileno(), raw_bytes(tensor))
        for number, bucket in enumerate(self._buckets):
            with (folder / str(number)).open("rb", buffering=0) as file:
                take = self._read if way == "read" else self._mapped
                take(file.fileno(), bucket)
        return time.perf_counter() - begin

    def _mapped(self, descriptor: int, bucket: list[Named]) -> None:
        mapped = mmap.mmap(descriptor, 0, flags=mmap.MAP_PRIVATE)
        offset = 0
        for name, tensor in bucket:
            source = torch.frombuffer(mapped, dtype=tensor.dtype, count=tensor.numel(), offset=offset)
            self._targets[name].copy_(source.view(tensor.shape))
            offset += tensor.nbytes

    def _read(self, descriptor: int, bucket: list[Named]) -> None:
        for name, _ in bucket:
            view = raw_bytes(self._targets[name])
            while view.nbytes:
                view = view[os.readv(descriptor, [view]) :]


def write(descriptor: int, view: memoryview) -> None:
    while view.nbytes:
        view = view[os.write(descriptor, view) :]


@contextlib.contextmanager
def timing(found: list[float]) -> Iterator[None]:
    begin = time.perf_counter()
    try:
        yield
    finally:
        found.append(time.perf_counter() - begin)


async def measure(folder: Path, size: int, dtype: str, rounds: int, threads: int) -> dict[str, Any]:
    """One size and type: the road and the plain copy in turn, then updates under requests in flight."""
    torch.set_num_threads(threads)
    kind: torch.dtype = getattr(torch, dtype)
    weights = write_model(folder / "model", size // kind.itemsize, kind)
    total = sum(tensor.nbytes for tensor in weights.values())
    config = RunConfig.model_validate(
        {
            "name": "bench",
            "model": {"path": str(folder / "model"), "context": 512},
            "engine": {"slots": 4, "threads": threads, "dtype": dtype, "device": "cpu"},
            "weights": {"dtype": dtype},
        }
    )
    engine = HfEngine(config, 0)
    await engine.start()
    road, plain = Road(folder, weights, engine.apply, config), PlainCopy(weights, config.weights.shard_bytes)
    try:
        async with road.running():
            figures = await alternate(road, plain, rounds, total)
            check(engine, weights)
            figures |= await under_load(road, engine, rounds)
    finally:
        plain.close()
        await engine.close()
        shutil.rmtree(folder / "model")
    return {"bytes": total, **figures}


async def alternate(road: Road, plain: PlainCopy, rounds: int, total: int) -> dict[str, Any]:
    first, ours, mapped, read = [], [], [], []
    memory = memcpy_speed(total)
    for number in range(rounds + FIRST):
        for tensor in road.weights.values():
            tensor.neg_()  # so that a version that did not arrive is noticed
        times = [await road.send(), plain.send("mapped"), plain.send("read")]
        if number < FIRST:
            first.append(times[0]["all"])
        else:
            ours.append(times[0])
            mapped.append(times[1])
            read.append(times[2])
    faster = min((mapped, read), key=lambda runs: spread(runs)["median"])
    seconds = [one["all"] for one in ours]
    return {
        "seconds": spread(seconds),
        "seconds_of_the_first_two_versions": [float(f"{one:.4g}") for one in first],
        "publish_seconds": spread([one["publish"] for one in ours]),
        "plain_mapped_seconds": spread(mapped),
        "plain_read_seconds": spread(read),
        "ratio_to_plain_copy": ratios(seconds, faster),
        "plain_copy": "mapped" if faster is mapped else "read",
        "gigabytes_per_second": spread([total / one / 1e9 for one in seconds]),
        "memcpy_gigabytes_per_second": memory,
        "ratio_to_two_memcpys": spread([one / (2 * total / memory / 1e9) for one in seconds]),
    }


def memcpy_speed(total: int) -> float:
    source, target = torch.ones(total, dtype=torch.uint8), torch.ones(total, dtype=torch.uint8)
    found: list[float] = []
    for _ in range(5):
        with timing(found):
            target.copy_(source)
    return float(f"{total / sorted(found)[2] / 1e9:.4g}")


def check(engine: HfEngine, weights: Mapping[str, torch.Tensor]) -> None:
    held = dict(engine._decoder._batch.model.named_parameters())
    assert held.keys() == weights.keys()
    assert all(torch.equal(held[name], tensor) for name, tensor in weights.items())


async def under_load(road: Road, engine: HfEngine, rounds: int) -> dict[str, Any]:
    """Four requests decode while versions are published, fetched and applied."""
    with watched(engine) as (held, copied):
        async with busy(engine, 4, 480):
            held.clear()
            before = engine.load().tokens_sampled
            for _ in range(rounds):
                await road.send()
            pauses, copies = held[:rounds], copied[:rounds]
            assert engine.load().tokens_sampled > before
    return {
        "pause_milliseconds": spread([1000 * one for one in pauses]),
        "copy_milliseconds": spread([1000 * one for one in copies]),
        "ratio_pause_to_copy": ratios(pauses, copies),
    }


@contextlib.contextmanager
def watched(engine: HfEngine) -> Iterator[tuple[list[float], list[float]]]:
    """Times in which the decode loop was held between two steps, and those of copying the weights."""
    held: list[float] = []
    copied: list[float] = []
    exclusive, copy = engine._decoder.exclusive, engine_weights.copy_weights

    @contextlib.contextmanager
    def holding() -> Iterator[None]:
        with exclusive(), timing(held):
            yield

    def copying(pairs: Any) -> None:
        with timing(copied):
            copy(pairs)

    engine._decoder.exclusive, engine_weights.copy_weights = holding, copying
    try:
        yield held, copied
    finally:
        engine._decoder.exclusive, engine_weights.copy_weights = exclusive, copy


@contextlib.asynccontextmanager
async def busy(engine: HfEngine, width: int, length: int) -> AsyncIterator[None]:
    """Requests of so many tokens are always in flight within the block, which begins when all of them are decoded."""

    async def keep() -> None:
        while True:
            await engine.generate(Request("busy", np.arange(16, 32, dtype=np.int32), length))

    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(keep()) for _ in range(width)]
        while engine.load().running < width:  # noqa: ASYNC110 - an engine's load sets no event
            await asyncio.sleep(0.001)
        try:
            yield
        finally:
            for task in tasks:
                task.cancel()
