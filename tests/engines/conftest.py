"""Engines of every kind, one at a time and each once: a real server takes half a minute to start."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio
import torch

from streamrl.producers.engines.contract import Engine
from streamrl.producers.engines.hf import HfEngine
from streamrl.producers.servers.dialects import make_dialect
from streamrl.producers.servers.environments import KINDS, find_environment
from streamrl.producers.servers.managed import ManagedServer
from streamrl.producers.servers.server import ServerEngine
from tests.engines.conformance_kit import Bench, run_config


@pytest.fixture(scope="session", autouse=True)
def environments() -> None:
    """Both environments are there, or the command that makes them is the failure of every test here."""
    torch.set_num_threads(1)
    for kind in KINDS:
        find_environment(None, kind)


@pytest_asyncio.fixture(scope="session", loop_scope="session", params=["hf", "vllm", "sglang"])
async def running(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Bench]:
    """One started engine for all tests of its kind."""
    folder: Path = tmp_path_factory.mktemp(request.param)
    config = run_config(request.param, folder)
    engine: Engine
    if request.param == "hf":
        engine = HfEngine(config, seed=7)
    else:
        dialect = make_dialect(config)
        server = ManagedServer(dialect, config, folder, f"{request.param}.server0", seed=7)
        engine = ServerEngine(dialect, config, server=server)
    await engine.start()
    try:
        yield Bench(request.param, engine, config, folder)
    finally:
        await engine.close()


@pytest_asyncio.fixture(loop_scope="session")
async def bench(running: Bench, caplog: pytest.LogCaptureFixture) -> Bench:
    """The engine with fresh weights; whatever a failed test left behind is gone."""
    caplog.set_level(logging.INFO)
    await running.engine.abort()
    await running.engine.resume()
    await running.apply()
    return running
