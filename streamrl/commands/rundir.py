"""The run that a command means, and its Redis: as it is, or started for this call."""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

from streamrl.config import RedisConfig, RunConfig
from streamrl.errors import ConfigError, Refused, Unreachable, UsageError, writing
from streamrl.queues import embedded
from streamrl.queues.access import redact
from streamrl.queues.connection import Connection, open_to_look
from streamrl.queues.supervision import Published, Supervision
from streamrl.runfile import RUN_DIGEST, RUNS, LoadedConfig, parse_saved, read_saved, save

if TYPE_CHECKING:
    from streamrl.queues import Ledgers

_PATIENCE: Final = 5.0
"""Seconds: a person is not as patient as a role."""
_SPEAKS_SECONDS: Final = 30.0
_SPEAKS_POLL: Final = 0.1
_JOIN_SECONDS: Final = 300.0
_JOIN_POLL: Final = 1.0


@dataclass(frozen=True)
class KnownRun:
    """A run as its Redis shows it; `path` is its directory, None if that is on another machine."""

    config: RunConfig
    path: Path | None

    @property
    def name(self) -> str:
        return self.config.name


@dataclass(frozen=True)
class RunDirectory(KnownRun):
    path: Path


def find_anywhere(chosen: str | None) -> KnownRun:
    """As `find_run`; a URL `redis://HOST:PORT/DB#NAME` finds a run whose directory is on another machine.

    The password is read from the file in STREAMRL_REDIS__PASSWORD_FILE. ConfigError: Redis knows no such run.
    """
    if chosen is None or "://" not in chosen:
        return find_run(Path(chosen) if chosen is not None else None)
    redis, name = _redis_of(chosen)
    run_file = asyncio.run(_run_file(redis, name))
    if run_file is None:
        raise ConfigError(f"Redis at {redact(chosen)} knows no run {name}", "`up` publishes a run as it starts")
    return KnownRun(_config_of(run_file, redis, name), None)


def join_run(chosen: str | None) -> RunDirectory:
    """As `find_anywhere`, for a role: of a run on another machine the directory `runs/NAME` is made here.

    It waits for the run to be published, with STREAMRL_RUN_DIGEST for that of its manifests. ConfigError: it was not.
    """
    if chosen is None or "://" not in chosen:
        return find_run(Path(chosen) if chosen is not None else None)
    from streamrl.weight_sync.files import TOKEN_VARIABLE, keep_token  # not needed by commands that only look

    redis, name = _redis_of(chosen)
    deadline = time.monotonic() + _JOIN_SECONDS
    digest = os.environ.get(RUN_DIGEST)
    while (run := asyncio.run(_published(redis, name))) is None or digest not in {None, run.digest}:
        if time.monotonic() > deadline:
            which = "" if run is None else " of these manifests"
            raise ConfigError(
                f"Redis at {redact(chosen)} knows no run {name}{which} after {_JOIN_SECONDS:g} s",
                "`streamrl up RUN.yaml --prepare` publishes it",
            )
        time.sleep(_JOIN_POLL)
    folder = RUNS / name
    config, token = _config_of(run.run_file, redis, name), run.weights_token
    with writing(inside=folder):
        folder.mkdir(parents=True, exist_ok=True)
        save(LoadedConfig(config=config, origins={}), folder / "run.json")
        if token is not None and TOKEN_VARIABLE not in os.environ:
            keep_token(folder, token)
    return RunDirectory(config, folder)


def _redis_of(chosen: str) -> tuple[RedisConfig, str]:
    url, _, name = chosen.partition("#")
    if not name:
        raise UsageError(f"--run {redact(chosen)} names no run", "write --run 'redis://HOST:PORT#NAME'")
    password = os.environ.get("STREAMRL_REDIS__PASSWORD_FILE")
    return RedisConfig(url=url, password_file=Path(password) if password else None), name


async def _run_file(redis: RedisConfig, name: str) -> bytes | None:
    async with open_to_look(redis, str(redis.url)) as connection:
        return await Supervision(connection, name).run_file()


async def _published(redis: RedisConfig, name: str) -> Published | None:
    async with open_to_look(redis, str(redis.url)) as connection:
        return await Supervision(connection, name).published()


def _config_of(run_file: bytes, redis: RedisConfig, name: str) -> RunConfig:
    """The configuration with the Redis as this machine reaches it."""
    config = parse_saved(run_file, f"the run file of {name} in Redis").config
    seen = config.redis.model_copy(update={"url": redis.url, "password_file": redis.password_file})
    return config.model_copy(update={"redis": seen})


def find_run(chosen: Path | None) -> RunDirectory:
    """The run in `chosen`, or the newest run in `runs/` if None."""
    written = [file for file in RUNS.glob("*/run.json") if file.is_file()] if chosen is None else []
    newest = max(written, key=lambda file: file.stat().st_mtime_ns, default=None)
    path = newest.parent if newest is not None else chosen
    if path is None:
        raise ConfigError(f"no run in {RUNS.resolve()}", "start one: `streamrl up RUN.yaml`; or name one: --run DIR")
    return RunDirectory(read_saved(path / "run.json").config, path)


def is_running(run: KnownRun) -> bool:
    """Whether the run's Redis is up, without starting it; a foreign one is assumed to be."""
    return run.config.redis.url is not None or (run.path is not None and embedded.is_listening(run.path))


def _url(run: KnownRun) -> str:
    if run.config.redis.url is not None:
        return run.config.redis.url
    if run.path is None:
        raise AssertionError("a run without a directory has a Redis with a URL")
    return embedded.url(run.config.redis, run.path)


@contextlib.asynccontextmanager
async def live(run: KnownRun) -> AsyncIterator[Connection | None]:
    """Connect to the Redis of a run as it is; None if the run's own server is not running."""
    if not is_running(run):
        yield None
        return
    async with open_to_look(run.config.redis, _url(run)) as connection:
        yield connection


@contextlib.asynccontextmanager
async def supervised(run: KnownRun) -> AsyncIterator[tuple[Supervision, dict[str, str]] | None]:
    """The supervisor of a run over its Redis, and what it said last; None if there is none.

    One that is starting on this machine is waited for. Refused: it does not speak.
    """
    from streamrl.runtime.launch import supervising_pid  # not needed by commands that only look

    deadline = time.monotonic() + _SPEAKS_SECONDS
    while True:
        here = supervising_pid(run.path) if run.path is not None else None
        async with contextlib.AsyncExitStack() as stack:
            try:
                connection = await stack.enter_async_context(live(run))
                supervision = None if connection is None else Supervision(connection, run.name)
                said = None if supervision is None else await supervision.supervisor()
            except Unreachable:
                if here is None:
                    raise
                supervision, said = None, None
            # Redis may still hold the last beat of its predecessor.
            if supervision is not None and said is not None and (here is None or said["pid"] == str(here)):
                yield supervision, said
                return
        if here is None:
            yield None
            return
        if time.monotonic() > deadline:
            raise Refused(
                f"the supervisor of {run.name}, process {here}, does not reach Redis",
                f"kill -INT {here} ends it",
            )
        await asyncio.sleep(_SPEAKS_POLL)


@contextlib.asynccontextmanager
async def looking(run: KnownRun) -> AsyncIterator[Connection]:
    """As `live`, but the run's own server is started for the block if it is not running. Only for reading."""
    redis = run.config.redis
    async with contextlib.AsyncExitStack() as stack:
        if run.path is None or is_running(run):
            url = _url(run)
        else:
            url = embedded.url(redis, await stack.enter_async_context(embedded.running_to_look(redis, run.path)))
        yield await stack.enter_async_context(open_to_look(redis, url))


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
