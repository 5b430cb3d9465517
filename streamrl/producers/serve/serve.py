"""`streamrl engines serve`: an engine in a process of its own, for replicas of this host and of others."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import socket
import tempfile
from collections.abc import AsyncIterator, Callable
from functools import partial
from pathlib import Path
from typing import Any, Final

from aiohttp import web

from streamrl import __version__
from streamrl.config import RunConfig
from streamrl.errors import ConfigError, ExitCode, unwrapped
from streamrl.listening import url_of
from streamrl.producers.engines.hf import HfEngine
from streamrl.producers.serve.app import EngineApp
from streamrl.producers.serve.deliveries import Deliveries
from streamrl.producers.tokenizer import Tokenizer
from streamrl.servers.dialect import PROBE
from streamrl.servers.native import SOFTWARE

logger = logging.getLogger(__name__)
_LOOK_SECONDS: Final = 0.5
_FAREWELL_SECONDS: Final = 5
_KEEP_ALIVE: Final = 30
"""Longer than any client's: a request is lost when the server closes the connection just as it is sent."""


async def serve(
    config: RunConfig, listening: socket.socket, *, key: str | None, ready: Callable[[str], None] = lambda _: None
) -> None:
    """Load the model, then serve it until SIGTERM or SIGINT; responses in flight then end with what they have.

    `listening` comes from `take_address`; `key` may be None only on loopback; `ready` gets the URL when requests are
    taken. `Unreachable`: the engine died; this process must end, even if some of its threads hang.
    """
    url = url_of(listening)
    async with contextlib.AsyncExitStack() as stack:
        engine = HfEngine(config, config.seed)
        stack.push_async_callback(engine.close)
        await engine.start()
        place = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="streamrl-serve-")))
        deliveries = await stack.enter_async_context(Deliveries(config.weights.deadline, place, pulls=key is not None))
        about = await asyncio.to_thread(describe_engine, config, engine)
        logger.info("serving", extra={"url": url, "model": config.model.path})
        with unwrapped():
            make = partial(EngineApp, engine, about, deliveries, key)
            await _run(engine, listening, make, lambda: ready(url))


def describe_engine(config: RunConfig, engine: HfEngine) -> dict[str, Any]:
    """Return what `GET /about` says. Slow: loads the tokenizer."""
    try:
        probe = Tokenizer.load(config.model).plain_ids(PROBE)
    except ConfigError as error:
        logger.warning("no tokenizer to compare with that of a run", extra={"why": error.message})
        probe = None
    return {
        "software": SOFTWARE,
        "version": __version__,
        "kind": "hf",
        "model": config.model.path,
        "context": engine.limits.context,
        "vocabulary": engine.limits.vocabulary,
        "probe": probe,
    }


async def _run(
    engine: HfEngine,
    listening: socket.socket,
    make: Callable[[asyncio.TaskGroup], EngineApp],
    ready: Callable[[], None],
) -> None:
    async with _stop_signal() as stop, asyncio.TaskGroup() as tasks:
        served = make(tasks)
        runner = web.AppRunner(
            served.app(),
            access_log=None,
            handle_signals=False,
            handler_cancellation=True,
            keepalive_timeout=_KEEP_ALIVE,
            shutdown_timeout=_FAREWELL_SECONDS / 2,  # aiohttp waits for it twice
            auto_decompress=False,  # nothing is inflated before the key is checked
        )
        await runner.setup()
        try:
            await web.SockSite(runner, listening, backlog=512).start()
            watches = [tasks.create_task(served.watch_leases()), tasks.create_task(_watch(engine))]
            ready()
            await stop.wait()
            for watch in watches:
                watch.cancel()
            await engine.close()
        finally:
            await runner.cleanup()
            served.cancel_controls()


async def _watch(engine: HfEngine) -> None:
    while True:
        await engine.health()
        await asyncio.sleep(_LOOK_SECONDS)


@contextlib.asynccontextmanager
async def _stop_signal() -> AsyncIterator[asyncio.Event]:
    """An event that SIGTERM and SIGINT set; the second signal ends the process at once."""
    loop = asyncio.get_running_loop()
    stop = asyncio.Event()

    def take(number: int) -> None:
        if stop.is_set():
            os._exit(ExitCode.INTERRUPTED if number == signal.SIGINT else ExitCode.TERMINATED)
        stop.set()

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, take, number)
    yield stop
