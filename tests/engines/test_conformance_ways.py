"""Published versions reach every engine by every road, whole and as changes, and none is lost on the way."""

from __future__ import annotations

import asyncio
import itertools
import shutil
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
import torch

from streamrl.config import RunConfig
from streamrl.weight_sync.files import make_token
from streamrl.weight_sync.follower import Follower
from streamrl.weight_sync.manifest import Manifest, decode
from streamrl.weight_sync.publisher import Publisher
from streamrl.weight_sync.transports import WeightServer, open_server
from tests.engines import tiny
from tests.engines.conformance_kit import INTERVAL, Bench, prompt
from tests.weight_sync.sync_kit import Stream

pytestmark = [
    pytest.mark.engines,
    pytest.mark.slow,
    pytest.mark.timeout(600),
    pytest.mark.asyncio(loop_scope="session"),
]


class Road:
    """A learner's side and an engine role's side of one transport, with the engine at its end."""

    def __init__(
        self, bench: Bench, config: RunConfig, run_dir: Path, server: WeightServer, publisher: Publisher
    ) -> None:
        self._bench, self._server, self._publisher = bench, server, publisher
        self._stream = Stream()
        self.follower = Follower(
            self._stream,
            config.weights,
            self._apply,
            run=config.name,
            run_dir=run_dir,
            name="engine.0",
            fetches=config.weights.transport == "collective" and bench.kind != "hf",
        )
        self._applied = asyncio.Condition()

    async def _apply(self, version) -> None:
        await self._bench.engine.apply(version)
        async with self._applied:
            self._bench.number = version.number
            self._applied.notify_all()

    async def publish(self, weights: dict[str, torch.Tensor]) -> Manifest:
        """Publish weights under the next number; the judge knows them."""
        number = max(self._bench.models) + 1
        self._bench.weights[number], self._bench.models[number] = weights, tiny.build(weights)
        data = await asyncio.to_thread(
            self._publisher.publish,
            epoch=1,
            version=number,
            step=number,
            tensors=list(weights.items()),
            sources=self._server.sources(),
            lane=self._server.lane,
        )
        manifest = decode(data)
        self._server.announce(manifest)
        await self._stream.put(data)
        return manifest

    async def arrived(self, manifest: Manifest) -> None:
        """Wait until the engine has a version."""
        async with asyncio.timeout(60), self._applied:
            await self._applied.wait_for(lambda: self._bench.number >= manifest.version)


@asynccontextmanager
async def road(bench: Bench, run_dir: Path, **weights: object) -> AsyncIterator[Road]:
    settings = {"dtype": "bfloat16", "shard_bytes": 100_000, "deadline": 30, **weights}
    config = bench.config.model_copy(update={"weights": RunConfig.model_validate({"weights": settings}).weights})
    publisher = Publisher(config.weights, config.name, run_dir)
    make_token(run_dir, make_token(bench.folder))  # the server was told where that of its run is
    stop = asyncio.Event()
    try:
        async with open_server(config, run_dir, publisher.root) as server:
            made = Road(bench, config, run_dir, server, publisher)
            async with asyncio.TaskGroup() as group:
                group.create_task(made.follower.run(stop))
                yield made
                stop.set()
    finally:
        shutil.rmtree(publisher.root, ignore_errors=True)


def step(weights: dict[str, torch.Tensor], seed: int) -> dict[str, torch.Tensor]:
    """One value in fifty of every tensor is another one."""
    source, others = torch.Generator().manual_seed(seed), tiny.random_weights(5000 + seed)
    return {
        name: torch.where(torch.rand(tensor.shape, generator=source) < 0.02, others[name], tensor)
        for name, tensor in weights.items()
    }


@pytest.mark.parametrize(
    ("transport", "delta"),
    [*itertools.product(["shm", "directory", "http"], [False, True]), ("collective", False)],
    ids=lambda value: value if isinstance(value, str) else "delta" if value else "full",
)
async def test_versions_come_by_every_road(bench: Bench, transport: str, delta: bool, tmp_path: Path):
    before, tokens = bench.number, prompt(1)
    async with road(bench, tmp_path, transport=transport, delta={"enabled": delta}) as way:
        weights = tiny.random_weights(before + 1000)
        first = await way.publish(weights)
        await way.arrived(first)
        assert first.base is None
        assert len(first.shards) > 1
        assert bench.judge(tokens, await bench.generate(tokens, 32)) == [(0, 32, first.version)]
        begun = bench.begin(tokens)
        await begun[1].at_least(INTERVAL)
        for seed in range(3):
            weights = step(weights, seed)
            manifest = await way.publish(weights)
            await way.arrived(manifest)
            assert (manifest.base is not None) == delta
            if delta:
                assert manifest.total_bytes < first.total_bytes / 5
            assert bench.judge(tokens, await bench.generate(tokens, 32)) == [(0, 32, manifest.version)]
        bench.judge(tokens, await bench.end(begun))
        assert way.follower.refused == 0
    bench.newest = bench.number
