"""Resumes a server that streamrl did not start, if the process that paused it dies before it can resume it.

`Watchdog` is the engine's side. The other side is this file run as a script with the standard library only. Its
standard input is a lifeline: the first line says what to send (`url`, `headers`, `calls`); then come `armed` before
each pause, `disarmed` after it, and `farewell` at an orderly end. If the pipe ends while it is armed, it sends the
calls, with retries, and ends.
"""

from __future__ import annotations

import json
import logging
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from http.client import HTTPConnection, HTTPException, HTTPSConnection
from typing import Any, TypeAlias
from urllib.parse import urlencode, urlsplit

logger = logging.getLogger(__name__)
_START_SECONDS = 15.0
_END_SECONDS = 5.0
_TRIES = 20
_TRY_PAUSE = 1.0
_CALL_SECONDS = 15.0


Call: TypeAlias = tuple[str, str, Mapping[str, str], Any]
"""Method, path, query and JSON body."""


class Watchdog:
    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        self._process = process
        self._told = False
        self._armed = False

    @classmethod
    async def start(cls, url: str, headers: Mapping[str, str], calls: Sequence[Call]) -> Watchdog:
        """Start a watchdog that sends `calls` to `url` if necessary. `OSError`, `TimeoutError`: it does not watch."""
        import asyncio

        order = {
            "url": url,
            "headers": dict(headers),
            "calls": [[method, path, dict(query), body] for method, path, query, body in calls],
        }
        # asyncio's own subprocesses are killed when the loop is closed.
        process = subprocess.Popen(  # noqa: ASYNC220, S603
            [sys.executable, "-I", "-S", __file__],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            start_new_session=True,
        )
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            process.stdin.write(json.dumps(order).encode() + b"\n")
            process.stdin.flush()
            async with asyncio.timeout(_START_SECONDS):
                await asyncio.to_thread(process.stdout.readline)
        except BaseException:
            process.kill()
            raise
        process.stdout.close()
        return cls(process)

    def arm(self) -> None:
        """Resume the server if this process dies from now on. A repeat does nothing."""
        if not self._armed:
            self._armed = True
            self._tell(b"armed\n")

    def disarm(self) -> None:
        """The server has resumed. A repeat does nothing."""
        if self._armed:
            self._armed = False
            self._tell(b"disarmed\n")

    async def close(self, *, farewell: bool = True) -> None:
        """End it. Without a farewell it first resumes the server, in the background. A repeat does nothing."""
        import asyncio

        stdin = self._process.stdin
        if stdin is None or stdin.closed:
            return
        if farewell:
            self._tell(b"farewell\n")
        try:
            stdin.close()
        except OSError:
            logger.warning("the watchdog of the server was gone")
        if farewell:
            try:
                await asyncio.to_thread(self._process.wait, _END_SECONDS)
            except subprocess.TimeoutExpired:
                self._process.kill()

    def _tell(self, line: bytes) -> None:
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(line)
            self._process.stdin.flush()
        except OSError:
            if not self._told:
                logger.warning("the watchdog of the server is gone: if this process dies, the server stays paused")
            self._told = True


def main() -> int:
    """Watch the lifeline; resume the server if it ends while armed. Returns 1 if the server does not resume."""
    lifeline = sys.stdin.buffer
    order = json.loads(lifeline.readline() or b"null")
    if order is None:
        return 0
    sys.stdout.write("watching\n")
    sys.stdout.flush()
    armed = False
    for line in lifeline:
        if line == b"farewell\n":
            return 0
        armed = line == b"armed\n"
    return _resume(order) if armed else 0


def _resume(order: Mapping[str, Any]) -> int:
    for attempt in range(_TRIES):
        if attempt:
            time.sleep(_TRY_PAUSE)
        try:
            if all(_send(order, *call) < 400 for call in order["calls"]):
                return 0
        except (OSError, HTTPException):
            continue
    return 1


def _send(order: Mapping[str, Any], method: str, path: str, query: Mapping[str, str], body: Any) -> int:
    parts = urlsplit(order["url"])
    kind = HTTPSConnection if parts.scheme == "https" else HTTPConnection
    connection = kind(parts.hostname or "", parts.port, timeout=_CALL_SECONDS)
    try:
        data = None if body is None else json.dumps(body)
        headers = {**order["headers"], **({} if data is None else {"Content-Type": "application/json"})}
        target = parts.path.rstrip("/") + path + (f"?{urlencode(query)}" if query else "")
        connection.request(method, target, data, headers)
        return connection.getresponse().status
    finally:
        connection.close()


if __name__ == "__main__":
    sys.exit(main())
