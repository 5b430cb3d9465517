"""The connection of a process to Redis: concurrent calls travel together, calls without a reply are sent again.

Any number of coroutines call at the same time. One task sends all waiting calls as one pipeline and hands out the
replies, so sixty-four calls cost about one round trip. Every call may be sent twice (scripts of the ledger, reads):
after a broken connection the calls without a reply are sent again, with full jitter, until `patience` is over.
XREADGROUP must not be repeated: it goes through `block`, and `renew` finds entries of a lost reply.

redis-py brings the socket, TLS, HELLO and AUTH. Its retries are off, because they would repeat XREADGROUP, and so are
its socket time-outs, because they cut blocking reads: deadlines are set here.
"""

from __future__ import annotations

import asyncio
import collections
import contextlib
import errno
import hashlib
import logging
import math
import os
import random
import re
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import Any, Final

from redis.asyncio.connection import AbstractConnection
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import NoScriptError, ResponseError
from redis.exceptions import TimeoutError as RedisTimeoutError

from streamrl.config import RedisConfig
from streamrl.errors import UNKNOWN_NAME, ConfigError, StreamrlError, Unreachable
from streamrl.queues.access import (
    Argument,
    ReplyError,
    check_server,
    connection_options,
    error_code,
    error_text,
    is_denied,
    open_socket,
    pack,
    read_reply,
    redact,
    rewrite_append_only_file,
)

logger = logging.getLogger(__name__)

ROUND_TRIP: Final = 10.0
"""Seconds after which a silent server counts as gone."""
LOOK_SECONDS: Final = 5.0
"""The same for a command for which a person waits."""
_FIRST_PAUSE: Final = 0.05
LONGEST_PAUSE: Final = 2.0
_BATCH_CALLS: Final = 512
_BATCH_BYTES: Final = 4 << 20
_SLOWEST: Final = 1 << 20
"""Bytes per second below which sending counts as hanging."""
_TRANSIENT: Final = (RedisConnectionError, RedisTimeoutError, OSError, TimeoutError)
# Replies that say "not now": the same command may succeed later. OOM and MISCONF are back-pressure.
_LATER: Final = frozenset({"OOM", "MISCONF", "READONLY", "LOADING", "MASTERDOWN", "CLUSTERDOWN", "TRYAGAIN", "BUSY"})
_RECONNECT: Final = frozenset({"READONLY", "MASTERDOWN"})
_CANNOT_WRITE: Final = "MISCONF"
_NO_ROOM: Final = os.strerror(errno.ENOSPC)
_LAST_PATIENCE: Final = 5.0
"""Seconds for which a process that is to end waits for a Redis that cannot write."""
_WARN_SECONDS: Final = 5.0
_ONLY_READ: Final = frozenset({"snapshot"})
"""Scripts for people who may only look."""
_KNOWS_READERS: Final = 7
"""The first version of Redis with scripts and rights that only read."""
_FATAL: Final = frozenset({"NOAUTH", "WRONGPASS", "NOPERM"})
_ABSENT: Final = (
    "is the server running, is its port open to this host, and is it `rediss://` with TLS, `redis://` without?"
)
_HINTS: Final = {
    "OOM": "Redis is full: raise redis.maxmemory, or lower learner.groups_per_step, max_staleness or checkpoint.every",
    _NO_ROOM: "make room on the disk of Redis; the run goes on by itself",
    _CANNOT_WRITE: "Redis cannot write its append-only file: look for a full disk",
    "CERTIFICATE_VERIFY_FAILED": (
        "name the file of its authority with `?ssl_ca_certs=` in redis.url, and reach it by a name in its certificate;"
        " the clock of this host counts too"
    ),
    # Redis-py keeps only the text of `getaddrinfo`: unknown, unknown for now, no address.
    **dict.fromkeys(("Error -2 connecting", "Error -3 connecting", "Error -5 connecting"), UNKNOWN_NAME),
}


def pause(failures: int, chance: float) -> float:
    """Seconds to wait after failure number `failures` in a row, with full jitter; `chance` is uniform in [0, 1).

    Source: Brooker, Exponential Backoff And Jitter (AWS Architecture Blog, 2015).
    """
    exponent = min(failures - 1, 16)  # bounded, so that a long outage overflows nothing
    return chance * min(LONGEST_PAUSE, _FIRST_PAUSE * 2.0**exponent)


@dataclass
class Outage:
    """Failures in a row since `since` (None: all is well)."""

    patience: float
    since: float | None = None
    failures: int = 0

    def failed(self, now: float, chance: float) -> float | None:
        """Note a failure; return the seconds to wait before the next attempt, None when the patience is over."""
        if self.since is None:
            self.since = now
        self.failures += 1
        return None if now - self.since >= self.patience else pause(self.failures, chance)

    def recovered(self) -> None:
        self.since, self.failures = None, 0


@dataclass(frozen=True)
class Script:
    name: str
    text: str
    digest: str


@cache
def load_scripts() -> dict[str, Script]:
    """All scripts of the package; the header of each file in `lua/` says what it and a repeat of it do."""
    folder = files("streamrl.queues") / "lua"
    texts = {item.name.removesuffix(".lua"): item.read_text("utf-8") for item in folder.iterdir()}
    return {name: _build(name, texts) for name in texts if not name.startswith("_")}


def _build(name: str, texts: dict[str, str]) -> Script:
    include = re.search(r"^-- include ([\w ]+)$", texts[name], re.MULTILINE)
    parts = [texts[part] for part in include.group(1).split()] if include else []
    text = "\n".join([*parts, texts[name]])
    # Redis identifies scripts by SHA-1; nothing here depends on it being hard to forge.
    return Script(name, text, hashlib.sha1(text.encode(), usedforsecurity=False).hexdigest())


@dataclass(eq=False, slots=True)
class _Call:
    """One command on its way; its patience runs from `failed_at`, its first failure."""

    packed: bytes
    future: asyncio.Future[Any]
    failed_at: float | None = None
    failures: int = 0


def _hint(reason: str) -> str:
    return next((hint for code, hint in _HINTS.items() if code in reason), "")


class Connection:
    def __init__(self, config: RedisConfig, url: str, round_trip: float = ROUND_TRIP, *, looks: bool = False) -> None:
        self._url = redact(url)
        self._round_trip_seconds = round_trip
        self._patience = config.patience
        self._rewrites = config.url is not None and not looks
        self._options, self._kind = connection_options(config, url)
        self._scripts = {name: script.digest for name, script in load_scripts().items()}
        self._queue: collections.deque[_Call] = collections.deque()
        self._paused: set[_Call] = set()
        self._wake = asyncio.Event()
        self._connection: AbstractConnection | None = None
        self._idle: list[AbstractConnection] = []
        self._outage = Outage(config.patience)
        self._block_outage = Outage(config.patience)
        self._last_error = -math.inf
        self._checked = False
        self._major = 0
        self._stale = False
        self._ended: BaseException | None = None
        self._leaving = False
        self._warned: dict[str, float] = {}

    async def call(self, script: str, keys: Sequence[str], args: Sequence[Argument]) -> Any:
        """Run a script of the ledger and return its reply (bytes, int, list or None).

        Sent again after a lost reply, a restart of Redis, or "not now" (out of memory, loading, read-only). On
        cancellation the script may or may not have run; a repeat makes it certain. Unreachable: no reply for
        `redis.patience` seconds after the first failure. ConfigError: wrong password or permissions. ReplyError: Redis
        refused: a bug, or foreign keys.
        """
        only_reads = script in _ONLY_READ and self._major >= _KNOWS_READERS
        run = "EVALSHA_RO" if only_reads else "EVALSHA"
        return await self._send((run, self._scripts[script], len(keys), *keys, *args))

    async def read(self, *command: Argument) -> Any:
        """Send a command that may be repeated (a read, or one that sets an absolute value). Errors as in `call`."""
        return await self._send(command)

    async def block(self, *command: Argument, milliseconds: int) -> Any:
        """Send a blocking read (BLOCK included) on a connection of its own and return its reply.

        None means "nothing now": `milliseconds` are over, or the connection broke (after a pause, so that a loop does
        not spin). The command is never repeated. On cancellation the connection closes: entries of a reply on its way
        stay pending. Errors as in `call`; ReplyError also for a deleted stream (NOGROUP, UNBLOCKED).
        """
        packed = pack(command)
        connection = self._idle.pop() if self._idle else self._kind(**self._options)
        try:
            async with asyncio.timeout(milliseconds / 1000 + ROUND_TRIP):
                if not connection.is_connected:
                    await open_socket(connection)
                await connection.send_packed_command(packed, check_health=False)
                reply = await read_reply(connection)
        except _TRANSIENT as error:
            await connection.disconnect(nowait=True)
            if is_denied(error):
                raise self._no_access(error) from error
            await self._block_failed(error)
            return None
        except BaseException:
            await connection.disconnect(nowait=True)
            raise
        self._idle.append(connection)
        self._block_outage.recovered()
        if not isinstance(reply, ResponseError):
            return reply
        if error_code(error_text(reply)) not in _LATER:
            raise self._refused(reply)
        await self._block_failed(reply)
        return None

    def leave(self) -> None:
        """Wait only seconds for a Redis that cannot write: this process is to end, and a full disk stays full."""
        self._leaving = True

    def since_error(self) -> float:
        """Seconds since the last connection error of this process; infinite if there was none."""
        return asyncio.get_running_loop().time() - self._last_error

    # From here on: the task that `open_connection` owns.

    async def _send(self, command: Sequence[Argument]) -> Any:
        if self._ended is not None:
            raise self._ended
        call = _Call(pack(command), asyncio.get_running_loop().create_future())
        self._queue.append(call)
        self._wake.set()
        return await call.future

    async def serve(self) -> None:
        """Send waiting calls until cancelled; when it ends, every waiting call gets its error."""
        try:
            while True:
                await self._wake.wait()
                batch = self._take()
                if batch:
                    await self._round_trip(batch)
        except asyncio.CancelledError:
            self._end(Unreachable("the connection to Redis was closed"))
            raise
        except Exception as error:
            if not isinstance(error, StreamrlError):
                logger.exception("connection task failed")
            self._end(error)

    def _end(self, error: BaseException) -> None:
        self._ended = error
        for call in (*self._queue, *self._paused):
            if not call.future.done():
                call.future.set_exception(error)
        self._queue.clear()
        self._paused.clear()

    def _take(self) -> list[_Call]:
        batch: list[_Call] = []
        size = 0
        while self._queue and len(batch) < _BATCH_CALLS and size < _BATCH_BYTES:
            call = self._queue.popleft()
            if not call.future.done():
                batch.append(call)
                size += len(call.packed)
        if not self._queue:
            self._wake.clear()
        return batch

    async def _round_trip(self, batch: list[_Call]) -> None:
        try:
            async with asyncio.timeout(self._round_trip_seconds + sum(len(call.packed) for call in batch) / _SLOWEST):
                connection = await self._connected()
                await connection.send_packed_command([call.packed for call in batch], check_health=False)
                for call in batch:
                    self._settle(call, await read_reply(connection))
        except _TRANSIENT as error:
            if is_denied(error):
                self._queue.extendleft(reversed(batch))
                raise self._no_access(error) from error
            await self._failed(error, batch)
        except BaseException:
            self._queue.extendleft(reversed(batch))  # `serve` gives them the error
            raise
        else:
            if self._outage.since is not None:
                logger.info("redis answers again", extra={"url": self._url, "failures": self._outage.failures})
                self._outage.recovered()

    async def _connected(self) -> AbstractConnection:
        if self._connection is not None and (self._stale or not self._connection.is_connected):
            await self._drop()
        if self._connection is not None:
            return self._connection
        self._connection = connection = self._kind(**self._options)
        await open_socket(connection)
        if not self._checked:
            self._major = await check_server(connection, self._url)
            self._checked = True
        # In one go: one after the other they would take longer than ROUND_TRIP where Redis is far away.
        loads = [pack(("SCRIPT", "LOAD", script.text)) for script in load_scripts().values()]
        await connection.send_packed_command(loads, check_health=False)
        for _ in loads:
            reply = await read_reply(connection)
            if isinstance(reply, ResponseError):
                if error_code(error_text(reply)) in _LATER:
                    raise RedisConnectionError(error_text(reply))
                raise self._refused(reply)
        if self._rewrites:
            await rewrite_append_only_file(connection, self._url)
        return connection

    def _settle(self, call: _Call, reply: Any) -> None:
        if not isinstance(reply, ResponseError):
            if not call.future.done():
                call.future.set_result(reply)
            return
        if isinstance(reply, NoScriptError):
            self._stale = True  # scripts are loaded with each connection
            self._pause(call, "NOSCRIPT", reply)
            return
        code = error_code(error_text(reply))
        if code in _LATER:
            if code in _RECONNECT:
                self._stale = True
            self._pause(call, code, reply)
        elif not call.future.done():
            call.future.set_exception(self._refused(reply))

    def _pause(self, call: _Call, code: str, reply: ResponseError) -> None:
        loop = asyncio.get_running_loop()
        if not self._still_patient(call, loop.time(), error_text(reply)):
            return
        if call.failures == 1 and code in _HINTS:
            self._warn_refused(error_text(reply))
        self._paused.add(call)
        loop.call_later(pause(call.failures, random.random()), self._resume, call)  # noqa: S311

    def _resume(self, call: _Call) -> None:
        if call in self._paused:
            self._paused.discard(call)
            self._queue.append(call)
            self._wake.set()

    def _still_patient(self, call: _Call, now: float, reason: str) -> bool:
        if call.failed_at is None:
            call.failed_at = now
        call.failures += 1
        hopeless = self._leaving and _CANNOT_WRITE in reason
        if now - call.failed_at < (min(_LAST_PATIENCE, self._patience) if hopeless else self._patience):
            return True
        if not call.future.done():
            call.future.set_exception(self._unreachable(reason, now - call.failed_at))
        return False

    async def _failed(self, error: BaseException, batch: Sequence[_Call]) -> None:
        now = asyncio.get_running_loop().time()
        self._note(error)
        await self._drop()
        paused = self._paused
        waiting = [call for call in (*batch, *self._queue) if not call.future.done() and call not in paused]
        silent = type(error) is TimeoutError
        reason = f"no reply within {self._round_trip_seconds:g} s" if silent else error_text(error)
        self._queue.clear()
        self._queue.extend(call for call in waiting if self._still_patient(call, now, reason))
        if self._queue:
            self._wake.set()
        wait = self._outage.failed(now, random.random())  # noqa: S311
        await asyncio.sleep(pause(self._outage.failures, random.random()) if wait is None else wait)  # noqa: S311

    async def _block_failed(self, error: BaseException) -> None:
        self._note(error)
        wait = self._block_outage.failed(asyncio.get_running_loop().time(), random.random())  # noqa: S311
        if wait is None:
            raise self._unreachable(error_text(error), self._patience) from error
        await asyncio.sleep(wait)

    def _note(self, error: BaseException) -> None:
        now = asyncio.get_running_loop().time()
        if self._patience and self._outage.since is None and self._block_outage.since is None:
            text = error_text(error)
            if error_code(text) in _HINTS:
                self._warn_refused(text)
            else:
                self._warn("redis does not answer", url=self._url, error=text)
        self._last_error = now

    def _warn_refused(self, reply: str) -> None:
        cause = "disk is full: " if _NO_ROOM in reply else ""
        self._warn(f"{cause}redis refuses writes for now", reply=reply, hint=_hint(reply))

    def _warn(self, what: str, **fields: str) -> None:
        """Log a warning at most every `_WARN_SECONDS`: a full disk refuses hundreds of calls in a second."""
        now = asyncio.get_running_loop().time()
        if now - self._warned.get(what, -math.inf) >= _WARN_SECONDS:
            self._warned[what] = now
            logger.warning(what, extra=fields)

    async def _drop(self) -> None:
        connection, self._connection, self._stale = self._connection, None, False
        if connection is not None:
            await connection.disconnect(nowait=True)

    def _refused(self, reply: ResponseError) -> StreamrlError:
        if error_code(error_text(reply)) in _FATAL:
            return self._no_access(reply)
        return ReplyError(error_text(reply))

    def _no_access(self, error: Exception) -> ConfigError:
        text = error_text(error)
        if "already authenticated" in text:  # the reply to HELLO without a password is misleading
            text = "the server requires a password (NOAUTH)"
        return ConfigError(
            f"Redis at {self._url} refuses access: {text}",
            "set redis.password_file (or the user and password in redis.url) to those of the server",
        )

    def _unreachable(self, reason: str, seconds: float) -> Unreachable:
        hint = _hint(reason)
        reason = f"disk is full ({reason})" if _NO_ROOM in reason else reason
        if not self._patience:
            return Unreachable(f"Redis at {self._url} does not answer: {reason}", hint or _ABSENT)
        return Unreachable(
            f"Redis at {self._url} did not serve a call for {seconds:.0f} s: {reason}",
            hint or f"{_ABSENT} `redis.patience` is how long a role waits for it",
        )

    async def close(self) -> None:
        for connection in (*self._idle, *([self._connection] if self._connection is not None else [])):
            await connection.disconnect(nowait=True)
        self._idle.clear()
        self._connection = None


@contextlib.asynccontextmanager
async def open_connection(
    config: RedisConfig, url: str, round_trip: float = ROUND_TRIP, *, looks: bool = False
) -> AsyncIterator[Connection]:
    """Connect, own the task that serves the calls, and close. Returns once the server has answered.

    Calls that wait at the end of the block get `Unreachable`. ConfigError: wrong URL, password, version or eviction
    policy of the server.
    """
    connection = Connection(config, url, round_trip, looks=looks)
    task = asyncio.create_task(connection.serve(), name="redis connection")
    try:
        await connection.read("PING")
        yield connection
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        await connection.close()


@contextlib.asynccontextmanager
async def open_to_look(config: RedisConfig, url: str) -> AsyncIterator[Connection]:
    """As `open_connection`, while a person waits: the first failure or `LOOK_SECONDS` without a reply is final.

    It asks no foreign server to rewrite its append-only file.
    """
    impatient = config.model_copy(update={"patience": 0.0})
    async with open_connection(impatient, url, LOOK_SECONDS, looks=True) as connection:
        yield connection
