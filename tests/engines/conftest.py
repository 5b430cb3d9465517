"""Engines of every kind, one at a time and each once: a real server takes half a minute to start."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio
import torch
from streamrl.producers.group.group import EngineGroup, ServerSpec

from streamrl.config.base import SERVER_KINDS
from streamrl.producers.engines.hf import HfEngine
from streamrl.servers.environments import find_environment
from streamrl.servers.kinds import make_dialect
from streamrl.servers.process import ManagedServer, ServerSettings
from tests.engines.conformance_kit import LORA, Bench, HeardServer, run_config


@pytest.fixture(scope="session", autouse=True)
def environments() -> None:
    """Both environments are there, or the command that makes them is the failure of every test here."""
    torch.set_num_threads(1)
    for kind in SERVER_KINDS:
        find_environment(None, kind)


@pytest_asyncio.fixture(scope="session", loop_scope="session", params=["hf", "vllm", "sglang"])
async def running(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Bench]:
    """One engine for all tests of its kind: in this process, or a group of one server as replicas have it."""
    kind, folder = request.param, tmp_path_factory.mktemp(request.param)
    lora = LORA if kind in SERVER_KINDS else None
    bench = Bench(kind, run_config(kind, folder, lora=lora), folder)
    if kind == "hf":
        bench.engine = HfEngine(bench.config, seed=7)
    else:
        bench.engine = group = _group_of_one(bench, folder)
        group.follow(bench.deliver)
    await bench.engine.start()
    try:
        yield bench
    finally:
        await bench.engine.close()


def _group_of_one(bench: Bench, folder: Path) -> EngineGroup:
    def make() -> HeardServer:
        dialect = make_dialect(bench.config)
        life = len(bench.servers)
        server = ManagedServer(
            dialect, ServerSettings.of_engine(bench.config), folder, "rollout.0.server0", seed=7 + life
        )
        bench.servers.append(server)
        engine = HeardServer(dialect, bench.config, server=server)
        engine.ears = bench.ears
        return engine

    return EngineGroup(bench.config, [ServerSpec("rollout.0.server0", make, ours=True)])


@pytest_asyncio.fixture(loop_scope="session")
async def bench(running: Bench, caplog: pytest.LogCaptureFixture) -> Bench:
    """The engine with fresh weights; whatever a failed test left behind is gone."""
    caplog.set_level(logging.INFO)
    await running.engine.abort()
    await running.engine.resume()
    await running.apply()
    return running
