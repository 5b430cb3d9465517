"""One child process: a session of its own, a lifeline, a status pipe, its output read as it comes.

A child inherits two pipes. `STREAMRL_LIFELINE_FD` is the reading end of a pipe that only this process holds open: the
child reads end of file when this process dies for any reason. The child writes lines to `STREAMRL_STATUS_FD`
(status_pipe.py).
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from streamrl.isolation.lifeline import LIFELINE_FD
from streamrl.runtime.placement.placement import OnBytes
from streamrl.runtime.status_pipe import STATUS_FD

PIPE_GRACE: Final = 2.0
"""Seconds to read the last output after the end of a process: a grandchild may hold the pipe open forever."""


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


class Child:
    """A running child, made by `spawn`; await `end` exactly once."""

    def __init__(self, process: asyncio.subprocess.Process, output: _Pipe, status: _Pipe) -> None:
        self.pid = process.pid
        self._process = process
        self._output = output
        self._status = status

    @classmethod
    async def spawn(
        cls, argv: Sequence[str], environ: Mapping[str, str], lifeline: Lifeline, cwd: Path | None = None
    ) -> Child:
        """Start a child in a session of its own, so that the terminal's Ctrl-C reaches only this process."""
        with contextlib.ExitStack() as ours:
            output, output_end = await _Pipe.open(ours)
            status, status_end = await _Pipe.open(ours)
            process = await asyncio.create_subprocess_exec(
                *argv,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=output_end,
                stderr=output_end,
                env={**environ, LIFELINE_FD: str(lifeline.read_end), STATUS_FD: str(status_end)},
                cwd=cwd,
                pass_fds=(lifeline.read_end, status_end),
                start_new_session=True,
            )
        return cls(process, output, status)

    def kill(self) -> None:
        """Send SIGKILL to the child and to all that it has started in its session. Does nothing if all are gone."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)

    def signal(self, number: int) -> None:
        """To the child alone. Does nothing if it is gone."""
        with contextlib.suppress(ProcessLookupError):
            self._process.send_signal(number)

    async def end(self, status: OnBytes, output: OnBytes) -> int:
        """Wait for the end, then kill its session. Returns the exit code (negative: a signal).

        `status` gets each line of the status pipe, `output` pieces of what it prints.
        """
        readers = [asyncio.create_task(self._copy(output)), asyncio.create_task(self._read_status(status))]
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
        for result in results:
            if isinstance(result, Exception):
                raise result
        return code

    async def _copy(self, output: OnBytes) -> None:
        while data := await self._output.reader.read(1 << 16):
            output(data)

    async def _read_status(self, status: OnBytes) -> None:
        rest = b""
        while data := await self._status.reader.read(1 << 12):
            *lines, rest = (rest + data)[-(1 << 14) :].split(b"\n")
            for line in lines:
                status(line)
