"""The address that our own server listens on; light, so that a wrong one is known before a model is loaded."""

from __future__ import annotations

import contextlib
import errno
import ipaddress
import socket
from collections.abc import Iterator

from streamrl.errors import ConfigError


@contextlib.contextmanager
def take_address(host: str, port: int, key: str | None) -> Iterator[socket.socket]:
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


def url_of(listening: socket.socket) -> str:
    """Return the URL of a bound socket."""
    host, port = listening.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
