"""The run that a command means, and its Redis: as it is, or started for this call."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

from streamrl.config import RunConfig
from streamrl.errors import ConfigError
from streamrl.queues import embedded
from streamrl.queues.connection import Connection, open_to_look
from streamrl.runfile import RUNS, read_saved

if TYPE_CHECKING:
    from streamrl.queues import Ledgers

_PATIENCE: Final = 5.0
"""Seconds: a person is not as patient as a role."""


@dataclass(frozen=True, slots=True)
class RunDirectory:
    path: Path
    config: RunConfig

    @property
    def name(self) -> str:
        return self.config.name


def find_run(chosen: Path | None) -> RunDirectory:
    """The run in `chosen`, or the newest run in `runs/` if None."""
    written = [file for file in RUNS.glob("*/run.json") if file.is_file()] if chosen is None else []
    newest = max(written, key=lambda file: file.stat().st_mtime_ns, default=None)
    path = newest.parent if newest is not None else chosen
    if path is None:
        raise ConfigError(f"no run in {RUNS.resolve()}", "start one: `streamrl up RUN.yaml`; or name one: --run DIR")
    return RunDirectory(path, read_saved(path / "run.json").config)


def is_running(run: RunDirectory) -> bool:
    """Whether the run's Redis is up, without starting it; a foreign one is assumed to be."""
    return run.config.redis.url is not None or embedded.is_listening(run.path)


@contextlib.asynccontextmanager
async def live(run: RunDirectory) -> AsyncIterator[Connection | None]:
    """Connect to the Redis of a run as it is; None if the run's own server is not running."""
    if not is_running(run):
        yield None
        return
    redis = run.config.redis
    async with open_to_look(redis, embedded.url(redis, run.path)) as connection:
        yield connection


@contextlib.asynccontextmanager
async def looking(run: RunDirectory) -> AsyncIterator[Connection]:
    """As `live`, but the run's own server is started for the block if it is not running. Only for reading."""
    redis = run.config.redis
    async with contextlib.AsyncExitStack() as stack:
        folder = run.path
        if not is_running(run):
            folder = await stack.enter_async_context(embedded.running_to_look(redis, run.path))
        yield await stack.enter_async_context(open_to_look(redis, embedded.url(redis, folder)))


@contextlib.asynccontextmanager
async def ledgers(run: RunDirectory) -> AsyncIterator[Ledgers]:
    """The ledgers of a run, for writing; its server is started if it is not running."""
    from streamrl.queues import open_ledgers

    config = _for_people(run)
    async with embedded.running(config.redis, run.path), open_ledgers(config, run.path) as opened:
        yield opened


@contextlib.asynccontextmanager
async def ledgers_to_look(run: RunDirectory) -> AsyncIterator[Ledgers]:
    """The ledgers of a run for reading only; of a stopped run that cannot be written, those of a copy."""
    from streamrl.queues import open_ledgers

    config = _for_people(run)
    async with embedded.running_to_look(config.redis, run.path) as folder, open_ledgers(config, folder) as opened:
        yield opened


def _for_people(run: RunDirectory) -> RunConfig:
    redis = run.config.redis.model_copy(update={"patience": min(_PATIENCE, run.config.redis.patience)})
    return run.config.model_copy(update={"redis": redis})
