"""Reach the Redis of a run, also of one that is stopped: its own server is started for the length of the call."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import AsyncIterator, Iterator
from concurrent.futures import Future
from typing import TYPE_CHECKING, Final
from urllib.parse import quote

from streamrl.commands.rundir import RunDirectory
from streamrl.errors import Unreachable
from streamrl.queues.probe import Probe

_PATIENCE: Final = 5.0

if TYPE_CHECKING:
    from streamrl.config import RunConfig
    from streamrl.queues import Ledgers


@contextlib.contextmanager
def attached(run: RunDirectory) -> Iterator[Probe]:
    """Yield a connection to the Redis of a run.

    A foreign Redis and a server that is running are used as they are. Otherwise the run's own server is started,
    and stopped at the end of the block (or when the last of several such callers leaves).

    Raises:
        Unreachable: a foreign Redis does not answer, or the run's own does not start.
    """
    probe = live_probe(run)
    if probe is not None:
        with probe:
            yield probe
        return
    with _borrowed(run) as url, Probe(url, run.password_file) as started:
        yield started


def live_probe(run: RunDirectory) -> Probe | None:
    """A connection to the run's Redis as it is; None when its own server is not running.

    Raises:
        Unreachable: the run has a foreign Redis, and it does not answer.
    """
    if run.redis_url is not None:
        return Probe(run.redis_url, run.password_file)
    socket = run.path.resolve() / "redis.sock"
    try:
        if socket.exists():
            return Probe(f"unix://{quote(str(socket))}")
        from streamrl.queues.embedded import socket_path

        elsewhere = socket_path(run.path)
        return Probe(f"unix://{quote(str(elsewhere))}") if elsewhere.exists() else None
    except Unreachable:
        # A socket file that nobody listens on: the server was killed.
        return None


def is_running(run: RunDirectory) -> bool:
    """Whether the run's Redis is there as it is; always for a foreign one. Errors as of `live_probe`."""
    probe = live_probe(run)
    if probe is None:
        return False
    probe.close()
    return True


@contextlib.contextmanager
def _borrowed(run: RunDirectory) -> Iterator[str]:
    """Start the run's server for this block; its asyncio loop lives in a thread of its own."""
    left = threading.Event()
    url: Future[str] = Future()

    async def hold() -> None:
        from streamrl.queues.embedded import running_to_look
        from streamrl.queues.embedded import url as url_of
        from streamrl.runfile import read_saved

        config = read_saved(run.path / "run.json").config
        async with running_to_look(config.redis, run.path) as folder:
            url.set_result(url_of(config.redis, folder))
            await asyncio.to_thread(left.wait)

    def main() -> None:
        try:
            asyncio.run(hold())
        except BaseException as error:  # handed to the caller below
            if url.done():
                raise
            url.set_exception(error)

    thread = threading.Thread(target=main, name="redis-for-a-call")
    thread.start()
    try:
        yield url.result()
    finally:
        left.set()
        thread.join()


@contextlib.asynccontextmanager
async def ledgers(run: RunDirectory) -> AsyncIterator[Ledgers]:
    """Yield the ledgers of a run, to change something; its server is started when it is not running."""
    from streamrl.queues import open_ledgers
    from streamrl.queues.embedded import running

    config = _for_people(run)
    async with running(config.redis, run.path), open_ledgers(config, run.path) as opened:
        yield opened


@contextlib.asynccontextmanager
async def ledgers_to_look(run: RunDirectory) -> AsyncIterator[Ledgers]:
    """Yield the ledgers of a run, to look at them: also those of a stopped run that cannot be written.

    Nothing may be written to them, for they may be those of a copy.
    """
    from streamrl.queues import open_ledgers
    from streamrl.queues.embedded import running_to_look

    config = _for_people(run)
    async with running_to_look(config.redis, run.path) as folder, open_ledgers(config, folder) as opened:
        yield opened


def _for_people(run: RunDirectory) -> RunConfig:
    """The configuration of a run, for somebody who waits: not as patient as a role."""
    from streamrl.runfile import read_saved

    config = read_saved(run.path / "run.json").config
    redis = config.redis.model_copy(update={"patience": min(_PATIENCE, config.redis.patience)})
    return config.model_copy(update={"redis": redis})
