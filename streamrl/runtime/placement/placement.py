"""What the supervisor asks of whatever places its processes."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import TypeAlias

from streamrl.runtime.plan import UnitSpec
from streamrl.runtime.role_log import RoleLog

OnStatus: TypeAlias = Callable[[str, str], None]
OnLines: TypeAlias = Callable[[Sequence[bytes]], None]
OnBytes: TypeAlias = Callable[[bytes], None]


class PlacedProcess(ABC):
    """A running process of a role, wherever it is; await `wait` exactly once.

    Attributes:
        pid: on its host.
        beat_at: when it last said anything, by the clock of the event loop; None before.
        error, fenced: why it is about to end, in its own words.
    """

    def __init__(self, pid: int, log: RoleLog) -> None:
        self.pid = pid
        self.beat_at: float | None = None
        self.error = ""
        self.fenced = ""
        self._log = log

    async def wait(self, on_status: OnStatus, on_lines: OnLines) -> int:
        """Copy its output to the log until it ends, then kill its session. Returns the exit code (negative: a signal).

        `on_status` gets name and value of each line on the status pipe, `on_lines` the lines it logs, in batches.
        """

        def output(data: bytes) -> None:
            if lines := self._log.feed(data):
                on_lines(lines)

        def status(line: bytes) -> None:
            name, _, value = line.decode(errors="replace").partition("=")
            self.beat_at = asyncio.get_running_loop().time()
            if name == "ERROR":
                self.error = value
            elif name == "FENCED":
                self.fenced = value
            on_status(name, value)

        try:
            return await self._end(status, output)
        finally:
            on_lines(self._log.close())

    @abstractmethod
    async def _end(self, status: OnBytes, output: OnBytes) -> int:
        """Wait for the end and return the exit code; pass on lines of the status pipe and pieces of output."""

    @abstractmethod
    def signal(self, number: int) -> None:
        """To the process alone. Does nothing if it is gone."""

    @abstractmethod
    def kill(self) -> None:
        """Send SIGKILL to the process and to all that it has started in its session. Does nothing if all are gone."""


class Placement(ABC):
    """Places the processes of one run. When it is closed, or its process dies, no process of the run is left."""

    @abstractmethod
    async def start(self, unit: UnitSpec, position: int, start: str, log: RoleLog) -> PlacedProcess:
        """Start the process at a position of a unit; `start` is new for each start, and ranks of a start meet by it.

        `OSError`: it cannot be started.
        """

    @abstractmethod
    def release(self, unit: UnitSpec) -> None:
        """Give up what is kept for a unit that will not start again."""

    @abstractmethod
    def close(self) -> None:
        """Processes that still run then end by themselves."""
