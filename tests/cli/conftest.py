"""Two runs for most tests: one that is stopped, one whose Redis is up."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from streamrl.queues import embedded

from .run_kit import fill, filled_and_stopped, make_run


@pytest.fixture(scope="module")
def stopped_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with five groups and nothing running; tests only read it."""
    run_dir = tmp_path_factory.mktemp("stopped")
    asyncio.run(filled_and_stopped(run_dir))
    return run_dir


@pytest.fixture
async def live_run(tmp_path: Path) -> AsyncIterator[Path]:
    """The same with its Redis up for the length of the test."""
    run_dir = tmp_path / "live"
    config = make_run(run_dir)
    async with embedded.running(config.redis, run_dir):
        await fill(config, run_dir)
        yield run_dir
