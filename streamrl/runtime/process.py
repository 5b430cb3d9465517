"""One child process of the supervisor: its own session, a lifeline, a status pipe, its output in a log.

The child inherits two pipes. `STREAMRL_LIFELINE_FD` is the reading end of a pipe that only the supervisor holds open:
the child reads end of file when the supervisor dies for any reason. The child writes lines to `STREAMRL_STATUS_FD`:

```
READY=1            it can do work
BEAT=1             its event loop lives (once a second)
ERROR=text         why it is about to end
FENCED=text        it ends because a newer process has taken over
```
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, Final

import orjson

from streamrl.isolation.lifeline import LIFELINE_FD

logger = logging.getLogger(__name__)

STATUS_FD: Final = "STREAMRL_STATUS_FD"
PIPE_GRACE: Final = 2.0
"""Seconds to read the last output after the end of a process: a grandchild may hold the pipe open forever."""

RING_LINES: Final = 200
LONGEST_LINE: Final = 64 << 10

OnStatus = Callable[[str, str], None]
OnLines = Callable[[Sequence[bytes]], None]


@dataclass(frozen=True, slots=True)
class RoleCommand:
    argv: tuple[str, ...]
    env: Mapping[str, str]
    cwd: Path | None = None


class Lifeline:
    """A pipe whose writing end exists only in this process: it closes when the process ends, also by SIGKILL."""

    def __init__(self) -> None:
        self.read_end, self._write_end = os.pipe()

    def close(self) -> None:
        """Children that still run then end by themselves."""
        os.close(self.read_end)
        os.close(self._write_end)


@dataclass(frozen=True, slots=True)
class _Pipe:
    """The reading end of a pipe whose other end a child has.

    Not the pipes of asyncio's subprocess: `Process.wait` would await their end, and a grandchild may hold them.
    """

    reader: asyncio.StreamReader
    transport: asyncio.ReadTransport

    @classmethod
    async def open(cls, ours: contextlib.ExitStack) -> tuple[_Pipe, int]:
        """The pipe and the child's end, which is closed here when `ours` ends."""
        read_end, write_end = os.pipe()
        ours.callback(os.close, write_end)
        reader = asyncio.StreamReader()
        transport, _ = await asyncio.get_running_loop().connect_read_pipe(
            lambda: asyncio.StreamReaderProtocol(reader), os.fdopen(read_end, "rb", buffering=0)
        )
        return cls(reader, transport), write_end


class RoleProcess:
    """A running child, made by `spawn`; await `wait` exactly once."""

    def __init__(self, process: asyncio.subprocess.Process, log: RoleLog, output: _Pipe, status: _Pipe) -> None:
        self.pid = process.pid
        self.beat_at: float | None = None
        self.error = ""
        self.fenced = ""
        self._process = process
        self._log = log
        self._output = output
        self._status = status

    @classmethod
    async def spawn(cls, command: RoleCommand, log: RoleLog, lifeline: Lifeline) -> RoleProcess:
        """Start a child in a session of its own, so that the terminal's Ctrl-C reaches only the supervisor."""
        with contextlib.ExitStack() as ours:
            output, output_end = await _Pipe.open(ours)
            status, status_end = await _Pipe.open(ours)
            process = await asyncio.create_subprocess_exec(
                *command.argv,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=output_end,
                stderr=output_end,
                env={
                    **os.environ,
                    **command.env,
                    LIFELINE_FD: str(lifeline.read_end),
                    STATUS_FD: str(status_end),
                },
                cwd=command.cwd,
                pass_fds=(lifeline.read_end, status_end),
                start_new_session=True,
            )
        return cls(process, log, output, status)

    def kill(self) -> None:
        """Send SIGKILL to the process and to all that it has started in its session. Does nothing if all are gone."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)

    def signal(self, number: int) -> None:
        """To the process alone. Does nothing if it is gone."""
        with contextlib.suppress(ProcessLookupError):
            self._process.send_signal(number)

    async def wait(self, on_status: OnStatus, on_lines: OnLines) -> int:
        """Copy its output to the log until it ends, then kill its session. Returns the exit code (negative: a signal).

        `on_status` gets name and value of each line on the status pipe, `on_lines` the lines it logs, in batches.
        """
        readers = [
            asyncio.create_task(self._copy_output(on_lines)),
            asyncio.create_task(self._read_status(on_status)),
        ]
        try:
            code = await self._process.wait()
            self.kill()
            await asyncio.wait(readers, timeout=PIPE_GRACE)
        finally:
            for reader in readers:
                reader.cancel()
            results = await asyncio.gather(*readers, return_exceptions=True)
            self._output.transport.close()
            self._status.transport.close()
            on_lines(self._log.close())
        for result in results:
            if isinstance(result, Exception):
                raise result
        return code

    async def _copy_output(self, on_lines: OnLines) -> None:
        while data := await self._output.reader.read(1 << 16):
            if lines := self._log.feed(data):
                on_lines(lines)

    async def _read_status(self, on_status: OnStatus) -> None:
        loop = asyncio.get_running_loop()
        rest = b""
        while data := await self._status.reader.read(1 << 12):
            *lines, rest = (rest + data)[-(1 << 14) :].split(b"\n")
            for line in lines:
                name, _, value = line.decode(errors="replace").partition("=")
                self.beat_at = loop.time()
                if name == "ERROR":
                    self.error = value
                elif name == "FENCED":
                    self.fenced = value
                on_status(name, value)


class RoleLog:
    """The log of one process: its stdout and stderr.

    JSON objects are kept; any other line (a traceback of the interpreter, a warning of a library) becomes one with
    `event`, `role`, `at` and `level: "raw"`. A line over 64 KiB is cut. If the file cannot be written (full disk), its
    lines are lost and counted in `lost`, and the process goes on. At `max_bytes` the file is rotated to `path` with
    `.1` appended.
    """

    def __init__(self, role: str, path: Path, max_bytes: int) -> None:
        self.role = role
        self.tail: deque[bytes] = deque(maxlen=RING_LINES)
        self.lost = 0
        self._path = path
        self._max_bytes = max_bytes
        self._rest = b""
        self._skipping = False
        self._file: BinaryIO | None = None
        self._size = 0

    def feed(self, data: bytes) -> list[bytes]:
        """Take a piece of output; return the whole lines in it, as JSON without newlines."""
        *lines, self._rest = (self._rest + data).split(b"\n")
        if self._skipping and lines:  # the end of a line that was cut before
            lines.pop(0)
            self._skipping = False
        if len(self._rest) > LONGEST_LINE:
            if not self._skipping:
                lines.append(self._rest)
            self._rest, self._skipping = b"", True
        return self._keep([line for line in lines if line.strip()])

    def close(self) -> list[bytes]:
        """Take the last line even without its newline, and close the file. The log can be fed again afterwards."""
        rest, self._rest = self._rest, b""
        lines = self._keep([rest] if rest.strip() and not self._skipping else [])
        self._skipping = False
        if self._file is not None:
            self._file.close()
            self._file = None
        return lines

    def note(self, event: str, **fields: object) -> bytes:
        """Write a line of the supervisor's own into this log and return it."""
        line = orjson.dumps({"at": time.time(), "level": "info", "role": self.role, "event": event, **fields})
        return self._keep([line])[0]

    def _keep(self, lines: list[bytes]) -> list[bytes]:
        kept = [self._as_json(line) for line in lines]
        self.tail.extend(kept)
        if kept:
            try:
                self._write(b"\n".join(kept) + b"\n")
            except OSError as error:
                if not self.lost:
                    logger.warning("log file cannot be written", extra={"file": str(self._path), "why": str(error)})
                self.lost += len(kept)
        return kept

    def _as_json(self, line: bytes) -> bytes:
        line = line[:LONGEST_LINE].rstrip(b"\r")
        if line.startswith(b"{"):
            try:
                orjson.loads(line)
            except orjson.JSONDecodeError:
                pass  # only looks like one: kept as text below
            else:
                return line
        text = line.decode(errors="replace")
        return orjson.dumps({"at": time.time(), "level": "raw", "role": self.role, "event": text})

    def _write(self, data: bytes) -> None:
        if self._file is None:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            self._file = self._path.open("ab", buffering=0)
            self._size = self._file.tell()
        if self._size and self._size + len(data) > self._max_bytes:
            self._file.close()
            self._file = None
            self._path.rename(self._path.with_name(f"{self._path.name}.1"))
            self._file = self._path.open("ab", buffering=0)
            self._size = 0
        self._size += self._file.write(data)


class StatusPipe:
    """Writes lines to the supervisor; without one (Kubernetes, Ray, a shell) it writes nothing.

    Errors are ignored: if the supervisor is gone or does not read, the lifeline and the log handle it.
    """

    def __init__(self) -> None:
        number = os.environ.pop(STATUS_FD, None)
        self._handle = None if number is None else int(number)
        if self._handle is not None:
            os.set_inheritable(self._handle, False)
            os.set_blocking(self._handle, False)

    def ready(self) -> None:
        self._tell("READY", "1")

    def beat(self) -> None:
        self._tell("BEAT", "1")

    def error(self, text: str) -> None:
        self._tell("ERROR", text)

    def fenced(self, text: str) -> None:
        self._tell("FENCED", text)

    def _tell(self, name: str, value: str) -> None:
        if self._handle is not None:
            line = f"{name}={' '.join(value.split())[:2000]}\n".encode(errors="replace")
            with contextlib.suppress(BlockingIOError, BrokenPipeError):
                os.write(self._handle, line)
