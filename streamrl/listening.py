"""Addresses on which streamrl's own HTTP servers listen, and serving an application for a block."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import socket
from collections.abc import AsyncIterator
from typing import Final

from aiohttp import web

from streamrl.errors import CannotCreate

_WILDCARDS: Final = ("0.0.0.0", "::", "")  # noqa: S104  (compared, not bound)


@contextlib.asynccontextmanager
async def listen(app: web.Application, host: str, port: int, *, what: str, hint: str) -> AsyncIterator[str]:
    """Serve an application for this block; yields its URL. `what` and `hint` are for the message of `CannotCreate`."""
    runner = web.AppRunner(app, access_log=None, handle_signals=False, shutdown_timeout=1.0, keepalive_timeout=30)
    await runner.setup()
    async with contextlib.AsyncExitStack() as stack:
        stack.push_async_callback(runner.cleanup)
        assert runner.server is not None
        try:
            server = await asyncio.get_running_loop().create_server(runner.server, host, port, backlog=512)
        except (OSError, OverflowError) as error:
            raise CannotCreate(f"cannot serve {what} on {host} port {port}: {error}", hint) from error
        stack.callback(server.close)
        yield url_of(host, server.sockets[0].getsockname()[1])


def own_address(host: str) -> str:
    """`host`, or, if that belongs to another host, the address by which others reach this host."""
    try:
        with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
            probe.bind((host, 0))
    except OSError as error:
        if error.errno == errno.EADDRNOTAVAIL:
            return _outgoing() or host
    return host


def reachable(host: str) -> str:
    if host not in _WILDCARDS:
        return host
    name = socket.gethostname()
    try:
        address = socket.gethostbyname(name)
    except OSError:
        return _outgoing() or name
    # Debian's own name leads to 127.0.1.1, which on any other host means that host.
    return (_outgoing() or address) if address.startswith("127.") else address


def _outgoing() -> str | None:
    """The address of this host in packets to others; None without a network. Nothing is sent."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))  # RFC 5737: an unused address
        except OSError:
            return None
        return str(probe.getsockname()[0])


def url_of(host: str, port: int) -> str:
    """Where others reach what listens on `host`; for a wildcard it names this host."""
    name = reachable(host)
    return f"http://[{name}]:{port}" if ":" in name else f"http://{name}:{port}"
