"""Fixtures for all areas."""

from __future__ import annotations

import gc
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from streamrl.queues.embedded import find_server
from tests.by_server import ByServer
from tests.durations import pytest_terminal_summary  # noqa: F401  (hook)
from tests.redis_kit import ForeignRedis, RedisRun
from tests.skipped import pytest_addoption, pytest_configure  # noqa: F401  (hooks)

gc.disable()  # until all is collected: imports and tests make no garbage worth a look, and each look takes longer


def pytest_xdist_make_scheduler(config: pytest.Config, log: object) -> ByServer | None:
    """With `--dist loadscope` a scope is a server."""
    return ByServer(config, log) if config.getvalue("dist") == "loadscope" else None


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Where slow tests are asked for, a file that has none need not be imported: most have none."""
    if "slow or engines" not in config.option.markexpr or not collection_path.name.startswith("test_"):
        return None
    return None if re.search(r"\b(slow|engines|chaos)\b", collection_path.read_text()) else True


def pytest_collection_finish() -> None:
    """What five thousand collected tests and torch are made of is no garbage: each collection need not look at it."""
    gc.collect()
    gc.freeze()
    gc.enable()


@pytest.fixture
def redis_run(tmp_path: Path) -> Iterator[RedisRun]:
    """A running Redis of the version the embedded server would take."""
    run = RedisRun(tmp_path / "run")
    run.start()
    yield run
    run.kill()


@pytest.fixture
def redis(tmp_path: Path) -> Iterator[ForeignRedis]:
    """A running Redis that no run started, as the one of `redis.url`."""
    server = ForeignRedis(tmp_path / "redis", find_server().executable)
    server.start()
    yield server
    server.kill()


@pytest.fixture(scope="session")
def sort_cache() -> Path:
    """Prompts, tokenizer and starting model of the sort demo; made here when they are not there."""
    return _prepared("sort")


@pytest.fixture(scope="session")
def tools_cache() -> Path:
    """Prompts, tokenizer and starting model of the tools demo; made here when they are not there."""
    return _prepared("tools")


@pytest.fixture(scope="session")
def look_cache() -> Path:
    """Prompts, tokenizer, image processor and starting model of the look demo; made here when they are not there."""
    return _prepared("look")


@pytest.fixture(scope="session")
def distill_cache() -> Path:
    """Prompts, student and teacher of the distillation demo; made here when they are not there."""
    return _prepared("distill")


def _prepared(example: str) -> Path:
    folder = Path(__file__).parent.parent / "examples" / example
    subprocess.run([sys.executable, str(folder / "prepare.py")], check=True, timeout=900)
    return folder / "cache"
