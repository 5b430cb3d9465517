"""Processes that work for a reward: a request that takes too much kills its process, and nothing else.

A thread cannot be stopped, and a signal handler of Python cannot stop a computation in C. So work that may explode
(symbolic mathematics, regular expressions) runs in `streamrl.consumers.isolated.child`: a process in its own session,
with a clean environment, without streamrl or torch, under limits that the kernel enforces.

| what happens in a call | the caller gets | counted as |
|---|---|---|
| more CPU time than `CallLimits.cpu` in one phase | `ProcessDied` of `cpu`: the request is too expensive | `too_long` |
| more memory than `CallLimits.memory` | `ProcessDied` of `memory`: the request is too expensive | `too_large` |
| no answer within `CallLimits.wall`, with CPU time left | `ProcessDied` of `wall`: the host is busy | `lost` |
| the process is killed from outside, crashes or exits | `ProcessDied` of `signal` or `exit` | `lost` |
| the caller is cancelled | its `CancelledError`; the process is killed | `lost`, unless it was not ready yet |
| the function raises | `CallFailed`; the process goes on | |

CPU time does not depend on other work on the host, and memory that earlier calls left behind does not count. So a
request is always too expensive, or never.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import random
import signal
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal

import orjson

from streamrl.consumers.isolated import child
from streamrl.cores import usable_cores
from streamrl.errors import ConfigError, RewardUnavailable, StreamrlError, WireError
from streamrl.restarts import Deaths, RestartPolicy

logger = logging.getLogger(__name__)

Cause = Literal["cpu", "memory", "wall", "signal", "exit"]

_LONGEST_REPLY: Final = 1 << 20
START_SECONDS: Final = 60.0
"""Longest time until a new process can be asked."""
_END_SECONDS: Final = 5.0
_WINDOW: Final = 60.0
_DEATHS_PER_PROCESS: Final = 60
_MOST_PROCESSES: Final = 4
_INHERITED: Final = ("PATH", "LD_LIBRARY_PATH", "TMPDIR")


@dataclass(frozen=True, slots=True)
class CallLimits:
    """Limits of one call. A new process replaces one after `calls` calls, because libraries keep caches."""

    cpu: float  # seconds of CPU time of each phase that the function names
    wall: float  # seconds until the answer; well above `cpu`, since it also ends calls on a busy host
    memory: int  # bytes of address space of a new process, with its libraries and one call
    calls: int = 5000


class CallFailed(StreamrlError):
    """The function in the process raised. The message is the type and text of its error."""


class ProcessDied(StreamrlError):
    """The process ended before it answered. `phase`: the last one that its function named; empty: none yet."""

    def __init__(self, message: str, cause: Cause, phase: str = "") -> None:
        super().__init__(message)
        self.args = (message, cause, phase)
        self.cause = cause
        self.phase = phase

    @property
    def too_expensive(self) -> bool:
        """The request used up its CPU time or memory, so it would do so again on any host."""
        return self.cause in {"cpu", "memory"}


class _Unprepared(RewardUnavailable):
    """A process started, but its function cannot be imported or prepared."""


@dataclass(slots=True)
class ProcessCounts:
    started: int = 0
    too_long: int = 0
    too_large: int = 0
    lost: int = 0


class ProcessPool:
    """Processes with one function, each of which answers one call at a time. For one event loop.

    Processes are started on demand and kept. After a death the next start waits up to a second; after 60 deaths per
    process within a minute, none is started for a minute.

    Args:
        name: of the owner, for messages and logs.
        script: a module whose `prepare(settings)` returns the function (see `isolated.child`).
        settings: for `prepare`; any JSON.
        size: largest number of processes.
        limits: of each call.
    """

    def __init__(self, name: str, script: Path, settings: Any, size: int, limits: CallLimits) -> None:
        self.counts = ProcessCounts()
        self._name = name
        self._order = {
            "script": str(script),
            "settings": settings,
            "memory": limits.memory,
            "cpu": limits.cpu,
            "calls": limits.calls,
        }
        self._limits = limits
        self._slots = asyncio.Semaphore(size)
        self._deaths = Deaths(RestartPolicy(_DEATHS_PER_PROCESS * size, _WINDOW, backoff=0.05, max_backoff=1.0))
        self._idle: list[_Process] = []
        self._busy: set[_Process] = set()
        self._ending: list[_Process] = []
        self._not_before = 0.0
        self._closed = False

    async def open(self) -> None:
        """Start the first process, so that missing packages show before the first call.

        `ConfigError`: its function cannot be imported or prepared. A full or busy host is only a warning.
        """
        async with self._slots:
            try:
                self._idle.append(await self._start())
            except _Unprepared as error:
                raise ConfigError(error.message, error.hint) from error
            except RewardUnavailable as error:
                logger.warning("no process for now", extra={"reward": self._name, "why": error.message})

    async def call(self, request: Any) -> Any:
        """Return the function's result for `request`. Waits for a free process; safe to cancel.

        Raises:
            ProcessDied: the process ended before it answered.
            CallFailed: the function raised.
            RewardUnavailable: no process can be started now.
        """
        data = orjson.dumps(request)
        async with self._slots:
            process = await self._take()
            self._busy.add(process)
            try:
                self._check_open()
                return await process.ask(data)
            except ProcessDied as died:
                extra = {"reward": self._name, "pid": process.pid, "cause": died.cause, "phase": died.phase}
                logger.warning("process died of a call", extra=extra)
                raise
            finally:
                self._busy.discard(process)
                self._put_back(process)

    async def close(self) -> None:
        """End all processes, also busy ones, and wait until they are gone. A repeat does nothing."""
        self._closed = True
        for process in self._busy:
            process.kill()
        everyone = [*self._busy, *self._idle, *self._ending]
        self._idle.clear()
        self._ending.clear()
        await asyncio.gather(*(process.gone() for process in everyone))

    async def _take(self) -> _Process:
        while self._idle:
            process = self._idle.pop()
            if process.alive:
                return process
            self.counts.lost += 1
        return await self._start()

    def _check_open(self) -> None:
        if self._closed:
            raise RewardUnavailable(f"{self._name} is closed")

    async def _start(self) -> _Process:
        self._check_open()
        pause = self._not_before - time.monotonic()
        if pause > self._deaths.policy.max_backoff:
            raise RewardUnavailable(
                f"{self._name}: {self._deaths.recent} of its processes died within {_WINDOW:g} s;"
                f" none is started for {pause:.0f} s",
                "see `process died of a call` in the log of the worker",
            )
        await asyncio.sleep(max(0.0, pause))
        self._ending = [process for process in self._ending if process.alive]
        self._deaths.started()
        try:
            path = [entry for entry in sys.path if Path(entry).is_absolute()]
            process = await _Process.start(self._name, {**self._order, "path": path}, self._limits)
        except StreamrlError:
            self._died()
            raise
        self._deaths.ready(time.monotonic())
        self.counts.started += 1
        return process

    def _put_back(self, process: _Process) -> None:
        if process.state == "ready" and not self._closed:
            self._idle.append(process)
            return
        self._ending.append(process)
        process.kill()
        if process.state in {"ready", "worn"}:
            return
        if process.state == "cpu":
            self.counts.too_long += 1
        elif process.state == "memory":
            self.counts.too_large += 1
        else:
            self.counts.lost += 1
        self._died()

    def _died(self) -> None:
        now = time.monotonic()
        pause = self._deaths.died(now, random.random())  # noqa: S311 (jitter, no secret)
        self._not_before = max(self._not_before, now + (_WINDOW if pause is None else pause))


class _Process:
    """One process. `state`: `ready`, `asked` during a call, `worn` if it ends by itself, or its cause of death."""

    def __init__(self, name: str, process: asyncio.subprocess.Process, limits: CallLimits) -> None:
        self.pid = process.pid
        self.state: Literal["ready", "asked", "worn"] | Cause = "ready"
        self._killed = False
        self._name = name
        self._process = process
        self._limits = limits

    @classmethod
    async def start(cls, name: str, order: Mapping[str, Any], limits: CallLimits) -> _Process:
        try:
            process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-I", "-B", child.__file__),
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.DEVNULL,
                start_new_session=True,
                limit=_LONGEST_REPLY,
                cwd="/",
                env={key: os.environ[key] for key in _INHERITED if key in os.environ} | {"LC_ALL": "C.UTF-8"},
            )
        except OSError as error:
            raise RewardUnavailable(f"{name}: no process can be started: {error}") from error
        started = cls(name, process, limits)
        try:
            await started._get_ready(order)
        except BaseException:
            started.kill()
            await started.gone()
            raise
        return started

    async def _get_ready(self, order: Mapping[str, Any]) -> None:
        hint = f"it may need more than {self._limits.memory >> 20} MiB of memory"
        try:
            async with asyncio.timeout(START_SECONDS):
                await self._write(orjson.dumps(order))
                reply = await self._read()
        except TimeoutError as error:
            raise RewardUnavailable(f"{self._name}: its process is not ready within {START_SECONDS:g} s") from error
        except (EOFError, OSError) as error:
            raise RewardUnavailable(f"{self._name}: its process ends as soon as it is started", hint) from error
        if "error" in reply:
            why = str(reply["error"])
            raise _Unprepared(
                f"{self._name}: its process cannot be prepared: {why}", hint if "MemoryError" in why else ""
            )

    @property
    def alive(self) -> bool:
        return self._process.returncode is None

    async def ask(self, request: bytes) -> Any:
        """The function's result; raises as `ProcessPool.call`. Cancellation leaves `state` at `asked`."""
        self.state = "asked"
        phase = ""
        try:
            async with asyncio.timeout(self._limits.wall):
                await self._write(request)
                while "phase" in (reply := await self._read()):
                    phase = str(reply["phase"])
        except TimeoutError as error:
            raise self._dead(f"no answer within {self._limits.wall:g} s", "wall", phase) from error
        except (EOFError, OSError) as error:
            code = await self.gone()
            if code == -signal.SIGPROF:
                raise self._dead(f"more than {self._limits.cpu:g} s of CPU time", "cpu", phase) from error
            if code < 0:
                raise self._dead(f"ended by {signal.Signals(-code).name}", "signal", phase) from error
            raise self._dead(f"ended with exit code {code}", "exit", phase) from error
        if "memory" in reply:
            raise self._dead(f"more than {self._limits.memory >> 20} MiB of memory", "memory", phase)
        self.state = "worn" if "last" in reply else "ready"
        if "error" in reply:
            raise CallFailed(f"{self._name}: {reply['error']}")
        return reply["result"]

    def kill(self) -> None:
        """Kill its process group. Only once, since another process may get its id later."""
        if not self._killed:
            self._killed = True
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.pid, signal.SIGKILL)

    async def gone(self) -> int:
        """Wait until it has ended, and kill it if that takes long; return its exit code (negative: signal)."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        for _ in range(2):
            try:
                async with asyncio.timeout(_END_SECONDS):
                    return await self._process.wait()
            except TimeoutError:
                pass
            finally:
                self.kill()
        logger.error("process cannot be killed", extra={"reward": self._name, "pid": self.pid})
        return -signal.SIGKILL

    def _dead(self, why: str, cause: Cause, phase: str) -> ProcessDied:
        self.state = cause
        where = f" in phase {phase}" if phase else ""
        return ProcessDied(f"{self._name}: {why}{where}", cause, phase)

    async def _write(self, data: bytes) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(data + b"\n")
        await self._process.stdin.drain()

    async def _read(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        try:
            line = await self._process.stdout.readuntil()
        except asyncio.LimitOverrunError as error:
            raise WireError(f"{self._name}: its process answers with more than {_LONGEST_REPLY} bytes") from error
        reply: dict[str, Any] = orjson.loads(line)
        return reply


def usual_processes() -> int:
    """One per core that this process may use, at most 4."""
    return min(_MOST_PROCESSES, usable_cores())
