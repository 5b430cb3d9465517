"""`streamrl engines serve`: an engine in a process of its own, for replicas of this host and of others."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import ipaddress
import logging
import os
import signal
import socket
import tempfile
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any, Final

import uvicorn

from streamrl import __version__
from streamrl.config import RunConfig
from streamrl.errors import ConfigError, ExitCode, unwrap
from streamrl.producers.engines.hf import HfEngine
from streamrl.producers.servers.asgi import EngineApp
from streamrl.producers.servers.deliveries import Deliveries
from streamrl.producers.servers.dialect import PROBE
from streamrl.producers.servers.native import SOFTWARE
from streamrl.producers.tokenizer import Tokenizer

logger = logging.getLogger(__name__)
_LOOK_SECONDS: Final = 0.5
_FAREWELL_SECONDS: Final = 5
_KEEP_ALIVE: Final = 30
"""Longer than any client's: a connection that the server closes just as a request goes out loses it."""


async def serve(
    config: RunConfig, *, host: str, port: int, key: str | None, ready: Callable[[str], None] = lambda _: None
) -> None:
    """Load the model, then serve it until SIGTERM or SIGINT; responses in flight then end with what they have.

    Args:
        config: `model`, `engine`, `seed`, `weights.deadline` and `lease.max_hold` are read.
        host: address to listen on.
        port: to listen on; 0: any free one.
        key: that every request must bear; None only on loopback.
        ready: gets the URL as soon as requests are taken.

    Raises:
        ConfigError: the address is taken or no address, a key is missing, or the model cannot be served.
        Unreachable: the engine died; this process must end, whatever its threads do.
    """
    with listener(host, port, key) as listening:
        url = _url(listening)
        async with contextlib.AsyncExitStack() as stack:
            engine = HfEngine(config, config.seed)
            stack.push_async_callback(engine.close)
            await engine.start()
            place = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="streamrl-serve-")))
            deliveries = await stack.enter_async_context(
                Deliveries(config.weights.deadline, place, pulls=key is not None)
            )
            about = await asyncio.to_thread(describe_engine, config, engine)
            served = EngineApp(engine, about, deliveries, key)
            logger.info("serving", extra={"url": url, "model": config.model.path})
            try:
                await _run(served, engine, listening, lambda: ready(url))
            except BaseExceptionGroup as group:
                raise unwrap(group) from group


def describe_engine(config: RunConfig, engine: HfEngine) -> dict[str, Any]:
    """Return what `GET /about` says. Slow: loads the tokenizer."""
    try:
        probe = Tokenizer.load(config.model).plain_ids(PROBE)
    except ConfigError as error:
        logger.warning("no tokenizer to compare a run's with", extra={"why": error.message})
        probe = None
    return {
        "software": SOFTWARE,
        "version": __version__,
        "kind": "hf",
        "model": config.model.path,
        "decode": engine.decode,
        "context": engine.limits.context,
        "vocabulary": engine.limits.vocabulary,
        "probe": probe,
    }


@contextlib.contextmanager
def listener(host: str, port: int, key: str | None) -> Iterator[socket.socket]:
    """Take an address, without listening yet.

    Raises:
        ConfigError: it is taken or none, or it is no loopback address and there is no key.
    """
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except (socket.gaierror, UnicodeError) as error:
        raise ConfigError(f"{host!r} is no address: {error}", "--host 127.0.0.1, or an address of this host") from error
    family, kind, protocol, _, address = found[0]
    if key is None and not ipaddress.ip_address(str(address[0]).partition("%")[0]).is_loopback:
        raise ConfigError(f"{host} can be reached from other hosts", "give the server a key with --api-key-file")
    with socket.socket(family, kind, protocol) as taken:
        taken.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            taken.bind(address)
        except OSError as error:
            said = "address already in use" if error.errno == errno.EADDRINUSE else str(error.strerror)
            raise ConfigError(f"cannot listen on {host} port {port}: {said}", "choose another --port") from error
        yield taken


class _Server(uvicorn.Server):
    """uvicorn without signal handlers of its own: it would raise the signal again when all is done."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


async def _run(served: EngineApp, engine: HfEngine, listening: socket.socket, ready: Callable[[], None]) -> None:
    """Serve until a signal, or until the engine dies."""
    logging.getLogger("uvicorn").setLevel(logging.WARNING)
    server = _Server(
        uvicorn.Config(
            served.app(),
            log_config=None,
            access_log=False,
            lifespan="off",
            ws="none",
            server_header=False,
            timeout_keep_alive=_KEEP_ALIVE,
            timeout_graceful_shutdown=_FAREWELL_SECONDS,
        )
    )
    async with _stop_signal() as stop, asyncio.TaskGroup() as group:
        serving = group.create_task(server.serve(sockets=[listening]), name="serve")
        watches = [group.create_task(served.watch_leases()), group.create_task(_watch(engine))]
        while not server.started and not serving.done():  # noqa: ASYNC110 - uvicorn sets no event
            await asyncio.sleep(0.01)
        ready()
        await stop.wait()
        for watch in watches:
            watch.cancel()
        await engine.close()
        server.should_exit = True


async def _watch(engine: HfEngine) -> None:
    """Raise when the engine is dead."""
    while True:
        await engine.health()
        await asyncio.sleep(_LOOK_SECONDS)


@contextlib.asynccontextmanager
async def _stop_signal() -> AsyncIterator[asyncio.Event]:
    """An event that SIGTERM and SIGINT set; the second one ends the process on the spot."""
    loop = asyncio.get_running_loop()
    stop = asyncio.Event()

    def take(number: int) -> None:
        if stop.is_set():
            os._exit(ExitCode.INTERRUPTED if number == signal.SIGINT else ExitCode.TERMINATED)
        stop.set()

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, take, number)
    yield stop


def _url(listening: socket.socket) -> str:
    host, port = listening.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
