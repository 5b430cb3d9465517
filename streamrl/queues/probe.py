"""A synchronous connection for looking, without redis-py: `streamrl lag` must answer before redis-py is imported.

Measured on two cores: `import redis` 120 ms, `import hiredis` 11 ms, and a shell waits for every command. The parser is
the same (hiredis); what is left is a socket, AUTH and SELECT. Roles never use this: they have `connection`.
"""

from __future__ import annotations

import socket
import ssl
import time
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Self
from urllib.parse import ParseResult, parse_qs, unquote, urlparse

import hiredis

from streamrl.errors import ConfigError, StreamrlError, Unreachable
from streamrl.queues.address import URL_HINT, redact

_CHUNK: Final = 1 << 16
_FATAL: Final = ("NOAUTH", "WRONGPASS", "NOPERM", "ERR AUTH")
_LATER: Final = ("LOADING", "MASTERDOWN", "CLUSTERDOWN", "TRYAGAIN", "BUSY ")

Command = Sequence[str | bytes | float]


class Probe:
    """One connection to the Redis of a run, for reading.

    Args:
        url: `unix:///path/redis.sock[?db=0]`, `redis://[user:password@]host[:port][/db]` or `rediss://...`; also with
            `?db=`, `?username=` and `?password=`.
        password_file: file whose first line is the password; wins over the URL.
        deadline: seconds for the connection and for each round trip.

    Raises:
        Unreachable: nobody answers within the deadline, or the server is still loading.
        ConfigError: the URL is none, the password file cannot be read, or the server refuses the password.
    """

    def __init__(self, url: str, password_file: Path | None = None, deadline: float = 5.0) -> None:
        self._parts = _parsed(url)
        self._options = {name: values[0] for name, values in parse_qs(self._parts.query).items()}
        self._deadline = deadline
        self._reader = hiredis.Reader()
        self._socket = self._connect()
        try:
            self._introduce(password_file)
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close the socket; a second call does nothing."""
        self._socket.close()

    @property
    def where(self) -> str:
        """The address without credentials, for messages."""
        parts = self._parts
        if parts.scheme == "unix":
            return unquote(parts.path)
        return f"{parts.hostname or 'localhost'}:{parts.port or 6379}"

    def pipeline(self, commands: Sequence[Command]) -> list[Any]:
        """Send all commands in one round trip and return their replies in order.

        Replies are RESP2: integers, bytes, lists, None; an error reply of one command is returned in its place as
        `hiredis.ReplyError`, so that one missing key does not hide the rest.
        """
        try:
            self._socket.sendall(b"".join(map(_encode, commands)))
            replies = [self._checked_reply() for _ in commands]
        except TimeoutError as error:
            raise Unreachable(f"Redis at {self.where} gave no reply within {self._deadline:g} s") from error
        except OSError as error:
            raise Unreachable(f"Redis at {self.where} stopped answering: {error}") from error
        return replies

    def call(self, *command: str | bytes | float) -> Any:
        """Send one command and return its reply; an error reply raises `StreamrlError`."""
        (reply,) = self.pipeline([command])
        if isinstance(reply, hiredis.ReplyError):
            raise StreamrlError(f"Redis at {self.where} refused {command[0]!s}: {reply}")
        return reply

    def _connect(self) -> socket.socket:
        parts = self._parts
        try:
            if parts.scheme == "unix":
                link = socket.socket(socket.AF_UNIX)
                link.settimeout(self._deadline)
                link.connect(unquote(parts.path))
                return link
            link = socket.create_connection((parts.hostname or "localhost", parts.port or 6379), self._deadline)
            if parts.scheme == "rediss":
                link = ssl.create_default_context().wrap_socket(link, server_hostname=parts.hostname)
        except OSError as error:
            raise Unreachable(f"no Redis at {self.where}: {error}", "is the run up? see `streamrl status`") from error
        return link

    def _introduce(self, password_file: Path | None) -> None:
        parts = self._parts
        user = unquote(parts.username) if parts.username else self._options.get("username")
        password = unquote(parts.password) if parts.password else self._options.get("password")
        if password_file is not None:
            password = _password(password_file)
        if password:
            self.call("AUTH", *([user] if user else []), password)
        database = self._database()
        if database:
            self.call("SELECT", database)

    def _database(self) -> int:
        path = "" if self._parts.scheme == "unix" else self._parts.path.strip("/")
        text = self._options.get("db", path)
        return int(text) if text.isdigit() else 0

    def _reply(self) -> Any:
        until = time.monotonic() + self._deadline
        while (reply := self._reader.gets()) is False:
            left = until - time.monotonic()
            if left <= 0:
                raise TimeoutError
            self._socket.settimeout(left)
            data = self._socket.recv(_CHUNK)
            if not data:
                raise ConnectionError("connection closed")
            self._reader.feed(data)
        return reply

    def _checked_reply(self) -> Any:
        # Checked one by one: a server that wants a password hangs up after the first long command it refuses.
        reply = self._reply()
        if isinstance(reply, hiredis.ReplyError):
            self._refuse(str(reply))
        return reply

    def _refuse(self, reply: str) -> None:
        if reply.startswith(_FATAL):
            raise ConfigError(f"Redis at {self.where} refused us: {reply}", "check redis.url and redis.password_file")
        if reply.startswith(_LATER):
            raise Unreachable(f"Redis at {self.where} is not ready: {reply}", "try again in a moment")


def _password(path: Path) -> str:
    try:
        return path.read_text().strip()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"redis.password_file {path}: {error}", "name a file that holds the password") from error


def _parsed(url: str) -> ParseResult:
    try:
        parts = urlparse(url)
        right = parts.scheme in {"redis", "rediss", "unix"} and (parts.port is None or parts.port > 0)
        right = right and parse_qs(parts.query).get("db", ["0"])[0].isdigit()
    except ValueError:
        right = False
    if not right:
        raise ConfigError(f"redis.url {redact(url)} is no URL of a Redis server", URL_HINT)
    return parts


def _encode(command: Command) -> bytes:
    data: bytes = hiredis.pack_command(tuple(command))  # type: ignore[arg-type]  # its stub says a tuple of one
    return data
