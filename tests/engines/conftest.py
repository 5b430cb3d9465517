"""Engines of every kind, one at a time and each once: a real server takes half a minute to start."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator

import pytest
import pytest_asyncio
import torch

from streamrl.config.base import SERVER_KINDS
from streamrl.servers.environments import find_environment
from tests.engines.conformance_kit import LORA, Bench, HeardEngine, HeardServer, run_config


@pytest.fixture(scope="session", autouse=True)
def environments() -> None:
    """Both environments are there, or the command that makes them is the failure of every test here."""
    torch.set_num_threads(1)
    for kind in SERVER_KINDS:
        find_environment(None, kind)


@pytest_asyncio.fixture(scope="session", loop_scope="session", params=["hf", "vllm", "sglang"])
async def running(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Bench]:
    """One engine for all tests of its kind: in this process, or a server as role `engine.0` has it."""
    kind, folder = request.param, tmp_path_factory.mktemp(request.param)
    config = run_config(kind, folder, lora=LORA if kind in SERVER_KINDS else None)
    engine = HeardEngine(config, seed=7) if kind == "hf" else HeardServer(config, folder, "engine.0", seed=7)
    bench = Bench(kind, config, folder, engine)
    await engine.start()
    try:
        yield bench
    finally:
        if kind != "hf":
            bench.server.kept = False
        await bench.engine.close()


@pytest_asyncio.fixture(loop_scope="session")
async def bench(running: Bench, caplog: pytest.LogCaptureFixture) -> Bench:
    """The engine with fresh weights; whatever a failed test left behind is gone."""
    caplog.set_level(logging.INFO)
    await running.engine.abort()
    if running.kind != "hf" and running.server.control.blocked:
        await running.server.control.wake()
    await running.apply()
    return running
