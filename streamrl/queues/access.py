"""How to reach a Redis server: URL, options of the connection, version and policy of the server, meaning of errors."""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Sequence
from typing import Any, Final, TypeAlias
from urllib.parse import urlsplit

import hiredis
from redis.asyncio.connection import AbstractConnection, Connection, parse_url
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import AuthenticationError, AuthorizationError, InvalidResponse, RedisError, ResponseError

from streamrl.config import RedisConfig
from streamrl.errors import ConfigError, StreamrlError

logger = logging.getLogger(__name__)

Argument: TypeAlias = bytes | str | int | float
MINIMUM: Final = (6, 2)
URL_HINT: Final = (
    "write redis://HOST:PORT/DB, rediss://... or unix:///PATH; special characters of a password are written as %XX, "
    "or better: redis.password_file"
)


class ReplyError(StreamrlError):
    """Redis refused a command for good; `code` is the first word (NOGROUP, WRONGTYPE)."""

    def __init__(self, message: str, hint: str = "") -> None:
        super().__init__(message, hint)
        self.code = error_code(message)


def error_code(message: str) -> str:
    """Code of an error reply (OOM, NOGROUP); 6.2 hides it in `ERR Error running script ...: -OOM command ...`."""
    inner = re.search(r"Error running script.*?[ :]-?([A-Z]{3,})\b", message.removeprefix("ERR "))
    first = re.match(r"-?([A-Z]{3,})\b", message)
    if inner is not None:
        return inner.group(1)
    return first.group(1) if first is not None else ""


def redact(url: str) -> str:
    """The URL without passwords and options; never raises, and hides almost all of a broken URL."""
    scheme, there, _ = url.partition("://")
    try:
        parts = urlsplit(url)
        _ = parts.port
    except ValueError:
        return f"{scheme}://***"
    credentials, at, place = parts.netloc.rpartition("@")
    # A password with a bare / ? or # ends the host early; the rest of it looks like a path.
    if not there or (scheme != "unix" and not at and "@" in url):
        return f"{scheme}://***" if there else "***"
    user, colon, _ = credentials.partition(":")
    hidden = f"{user}:***@" if colon else "***@"
    return f"{scheme}://{hidden if at else ''}{place}{parts.path}{'?***' if parts.query else ''}"


def connection_options(config: RedisConfig, url: str) -> tuple[dict[str, Any], type[AbstractConnection]]:
    """Arguments and class of a redis-py connection; `ConfigError` if URL or password file cannot be used."""
    try:
        options: dict[str, Any] = dict(parse_url(url))
    except ValueError:
        # The parser's message may contain part of the password.
        raise ConfigError(f"redis.url {redact(url)} is not the URL of a Redis server", URL_HINT) from None
    kind: type[AbstractConnection] = options.pop("connection_class", Connection)
    if config.password_file is not None:
        try:
            options["password"] = config.password_file.read_text("utf-8").strip()
        except (OSError, UnicodeDecodeError) as error:
            hint = "name a file that holds the password"
            raise ConfigError(f"redis.password_file {config.password_file}: {error}", hint) from error
    for name in ("ssl_ca_certs", "ssl_certfile", "ssl_keyfile"):
        if name in options and not os.access(options[name], os.R_OK):
            raise ConfigError(
                f"redis.url names {name}={options[name]}, which cannot be read here", "each host needs this file"
            )
    options |= {
        "protocol": 3,
        "legacy_responses": False,
        "retry": Retry(NoBackoff(), 0),
        "socket_timeout": None,
        "socket_connect_timeout": 5.0,
        "driver_info": None,
    }
    try:
        kind(**options)
    except TypeError as error:
        raise ConfigError(f"redis.url {redact(url)} has an unknown option: {error}", URL_HINT) from error
    return options, kind


def pack(command: Sequence[Argument]) -> bytes:
    parts: Any = tuple(command)
    data: bytes = hiredis.pack_command(parts)
    return data


async def open_socket(connection: AbstractConnection) -> None:
    connect: Any = connection.connect
    try:
        await connect()
    except InvalidResponse as error:
        raise ConfigError(
            f"what answers at redis.url is no Redis: {error}", "set redis.url to the port of a Redis server"
        ) from error


async def read_reply(connection: AbstractConnection) -> Any:
    """An error reply is returned, not raised."""
    try:
        return await connection.read_response()
    except ResponseError as error:
        return error


async def ask(connection: AbstractConnection, *command: Argument) -> Any:
    """An error reply is returned, not raised."""
    await connection.send_packed_command(pack(command), check_health=False)
    return await read_reply(connection)


def error_text(error: BaseException) -> str:
    """Message of an error with its code, which redis-py removes for codes that it knows."""
    code = getattr(error, "status_code", None)
    message = str(error) or type(error).__name__
    return f"{code} {message}" if code and not message.startswith(code) and isinstance(error, RedisError) else message


def is_denied(error: BaseException | None) -> bool:
    """Whether a connection failed because of password or rights; redis-py hides it in a connection error."""
    while error is not None:
        if isinstance(error, (AuthenticationError, AuthorizationError)):
            return True
        error = error.__cause__
    return False


async def check_server(connection: AbstractConnection, url: str) -> int:
    """Refuse a server that is too old, or that evicts data when it is full; returns its version, 0 if it hides it."""
    info = await ask(connection, "INFO", "server")
    version = re.search(rb"redis_version:(\d+)\.(\d+)", info if isinstance(info, bytes) else b"")
    if version is not None and (int(version[1]), int(version[2])) < MINIMUM:
        raise ConfigError(f"Redis at {url} is version {version[0].decode()}, 6.2 or later is needed")
    major = int(version[1]) if version is not None else 0
    answer = await ask(connection, "CONFIG", "GET", "maxmemory-policy")
    if not isinstance(answer, dict):
        logger.info("cannot see maxmemory-policy", extra={"url": url})  # managed servers hide CONFIG
        return major
    policy = answer.get(b"maxmemory-policy", b"noeviction")
    if policy != b"noeviction":
        raise ConfigError(
            f"Redis at {url} has maxmemory-policy {policy.decode()}: it would throw work away when it is full",
            "CONFIG SET maxmemory-policy noeviction",
        )
    return major


async def rewrite_append_only_file(connection: AbstractConnection, url: str) -> None:
    """Have a foreign server rewrite its append-only file, once after each of its starts.

    A tail torn inside a script is loaded correctly once; the next start applies half of the script (our own server's
    file is checked before a start, see `embedded`). A file rewritten from memory has no such tail. The server knows
    whether it has rewritten the file since its start, so only the first connecting process asks for it.
    """
    info = await ask(connection, "INFO", "persistence")
    known = dict(re.findall(rb"^(aof_\w+):([\w-]+)", info, re.MULTILINE)) if isinstance(info, bytes) else {}
    busy = b"1" in {known.get(b"aof_rewrite_in_progress"), known.get(b"aof_rewrite_scheduled")}
    done = known.get(b"aof_last_rewrite_time_sec") != b"-1" and known.get(b"aof_last_bgrewrite_status") == b"ok"
    if known.get(b"aof_enabled") != b"1" or busy or done:
        return
    answer = await ask(connection, "BGREWRITEAOF")
    if isinstance(answer, ResponseError):
        extra = {"url": url, "error": error_text(answer), "hint": "run redis-check-aof --fix before each of its starts"}
        logger.warning("redis cannot rewrite its append-only file", extra=extra)
    else:
        logger.info("redis rewrites its append-only file", extra={"url": url})
