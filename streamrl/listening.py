"""Addresses on which streamrl's own HTTP servers listen, and serving an application for a block."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import ipaddress
import socket
from collections.abc import AsyncIterator, Iterator
from typing import Final

from aiohttp import web

from streamrl.errors import CannotCreate, ConfigError

_WILDCARDS: Final = ("0.0.0.0", "::", "")  # noqa: S104  (compared, not bound)


@contextlib.asynccontextmanager
async def listen(
    app: web.Application, host: str, port: int, *, what: str, hint: str, cancels: bool = False
) -> AsyncIterator[str]:
    """Serve an application for this block; yields its URL. Requests in flight end with the block.

    Port 0 is any free one; for a wildcard host the URL names this host. `what` is served and `hint` is the remedy in
    the message of CannotCreate. `cancels`: handlers are cancelled when their client leaves.
    """
    runner = web.AppRunner(
        app,
        access_log=None,
        handle_signals=False,
        handler_cancellation=cancels,
        shutdown_timeout=1.0,
        keepalive_timeout=30,
    )
    await runner.setup()
    async with contextlib.AsyncExitStack() as stack:
        stack.push_async_callback(runner.cleanup)
        assert runner.server is not None
        try:
            server = await asyncio.get_running_loop().create_server(runner.server, host, port, backlog=512)
        except (OSError, OverflowError) as error:
            raise CannotCreate(f"cannot serve {what} on {host} port {port}: {error}", hint) from error
        stack.callback(server.close)
        yield f"http://{_literal(reachable(host))}:{server.sockets[0].getsockname()[1]}"


@contextlib.contextmanager
def take_address(host: str, port: int, key: str | None) -> Iterator[socket.socket]:
    """Take an address, without listening yet. ConfigError: it is taken, or it is not loopback and there is no key."""
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except (socket.gaierror, UnicodeError) as error:
        raise ConfigError(
            f"{host!r} is not an address: {error}", "--host 127.0.0.1, or an address of this host"
        ) from error
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


def url_of(listening: socket.socket) -> str:
    host, port = listening.getsockname()[:2]
    return f"http://{_literal(host)}:{port}"


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


def _literal(host: str) -> str:
    return f"[{host}]" if ":" in host else host
