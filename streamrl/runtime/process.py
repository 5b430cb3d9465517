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
import os
import signal
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from streamrl.runtime.rolelog import RoleLog

LIFELINE_FD: Final = "STREAMRL_LIFELINE_FD"
STATUS_FD: Final = "STREAMRL_STATUS_FD"
PIPE_GRACE: Final = 2.0
"""Seconds to read the last output after the end of a process: a grandchild may hold the pipe open forever."""

OnStatus = Callable[[str, str], None]
OnLines = Callable[[Sequence[bytes]], None]


@dataclass(frozen=True, slots=True)
class RoleCommand:
    """What to execute: program and arguments, and what is added to the environment."""

    argv: tuple[str, ...]
    env: Mapping[str, str]
    cwd: Path | None = None


class Lifeline:
    """A pipe whose writing end exists only in this process: it closes when the process ends, also by SIGKILL."""

    def __init__(self) -> None:
        self.read_end, self._write_end = os.pipe()

    def close(self) -> None:
        """Close both ends; children that still run then end by themselves."""
        os.close(self.read_end)
        os.close(self._write_end)


@dataclass(frozen=True, slots=True)
class _Pipe:
    """The reading end of a pipe whose other end a child has.

    Not the pipes of asyncio's subprocess: their end would be awaited by `Process.wait`, and a grandchild may hold them.
    """

    reader: asyncio.StreamReader
    transport: asyncio.ReadTransport

    @classmethod
    async def open(cls, ours: contextlib.ExitStack) -> tuple[_Pipe, int]:
        """Return the pipe and the end for the child, which is closed here when `ours` ends."""
        read_end, write_end = os.pipe()
        ours.callback(os.close, write_end)
        reader = asyncio.StreamReader()
        transport, _ = await asyncio.get_running_loop().connect_read_pipe(
            lambda: asyncio.StreamReaderProtocol(reader), os.fdopen(read_end, "rb", buffering=0)
        )
        return cls(reader, transport), write_end


class RoleProcess:
    """A running child. Made by `spawn`; `wait` must be awaited once, until it returns or the supervisor ends."""

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
        """Start a child in a session of its own, so that the terminal's Ctrl-C reaches only the supervisor.

        Raises:
            OSError: the program cannot be executed, or there are too many processes or files.
        """
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
        """Send SIGKILL to the process and to all that it has started in its session. Does nothing when all are gone."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)

    def signal(self, number: int) -> None:
        """Send a signal to the process alone. Does nothing when it is gone."""
        with contextlib.suppress(ProcessLookupError):
            self._process.send_signal(number)

    async def wait(self, on_status: OnStatus, on_lines: OnLines) -> int:
        """Copy its output to the log until it ends, then kill its session. Returns the exit code (negative: a signal).

        Args:
            on_status: called with name and value of each line on the status pipe.
            on_lines: called with the lines it logs, in batches.
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
