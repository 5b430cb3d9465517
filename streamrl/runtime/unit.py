"""One unit of a run: starts its processes, restarts them when they die, stops them."""

from __future__ import annotations

import asyncio
import logging
import random
import secrets
import signal
from collections.abc import Callable, Coroutine, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from streamrl.config import SupervisorConfig
from streamrl.errors import ExitClass, ExitCode, StreamrlError, classify
from streamrl.restarts import RestartPolicy
from streamrl.runtime.checkup import Checkup
from streamrl.runtime.events import Event, LogLine, StateChanged
from streamrl.runtime.instance import FINAL, Instance, RoleState
from streamrl.runtime.placement.placement import PlacedProcess, Placement
from streamrl.runtime.plan import UnitSpec
from streamrl.runtime.role_log import RoleLog
from streamrl.waits import first_of

logger = logging.getLogger(__name__)

LEAVE_TOGETHER: Final = 15.0
"""Seconds that the other ranks may take to end after rank 0 has finished."""
BETTER_REASON: Final = 1.0
"""Seconds that the other ranks get after one has died: another rank may be about to report the better reason."""
_CHECK_SECONDS: Final = 0.2
"""Seconds between checks of the deadlines of a unit."""
_PROBE_SECONDS: Final = 1.0
"""Seconds between probes of a process that sends no heartbeat."""
KILL_SECONDS: Final = 5.0
"""Seconds until a process is gone after SIGKILL. A process that is stuck in the kernel is left behind."""


class Unit:
    """A unit of the plan, and the owner of its processes.

    `run` is its one task. `request_stop`, `terminate` and `signal` may be called at any time and return at once.
    """

    def __init__(
        self,
        spec: UnitSpec,
        config: SupervisorConfig,
        run_dir: Path,
        placement: Placement,
        send: Callable[[Event], None],
        *,
        checkup: Checkup | None = None,
    ) -> None:
        self.spec = spec
        self.instance = Instance(RestartPolicy.of(config), spec.finishes)
        self.ready = asyncio.Event()
        self._fenced = False
        self._config = config
        self._placement = placement
        self._checkup = checkup  # None: the processes send heartbeats
        self._send = send
        self._stop = asyncio.Event()
        self._killed = asyncio.Event()
        self._logs = {
            name: RoleLog(name, run_dir / "logs" / f"{name}.jsonl", config.log_bytes) for name in spec.processes
        }
        self._processes: dict[str, PlacedProcess] = {}
        self._reported_ready: set[str] = set()
        self._cause = ""
        self._stop_reason = ""
        self._no_restart = False
        self._waits_for: Sequence[Unit] = ()

    async def run(self, *, after: Sequence[Unit] = (), waits_for: Sequence[Unit] = ()) -> None:
        """Start the unit, and again after each death, until its state is final.

        Units in `after` must be ready before the first start; while units in `waits_for` are not ready, the start
        deadline does not run. On cancellation all its processes get SIGKILL.
        """
        self._waits_for = waits_for
        await self._wait_unless_stopped(_all_ready(after))
        while not self._stop.is_set() and self.instance.state not in FINAL:
            self.instance.start()
            self._changed()
            code = await self._run_once()
            self.ready.clear()
            self.instance.died(self._now(), code, self._cause, random.random(), fenced=self._fenced)  # noqa: S311
            self._changed()
            if code != ExitCode.OK:
                self._show_tails()
            if self._no_restart:
                self._stop.set()
            if self.instance.state is RoleState.BACKOFF:
                pause = max(0.0, self.instance.until - self._now())
                await self._wait_unless_stopped(asyncio.sleep(pause))
        if self.instance.state not in FINAL:
            self.instance.drain(self._stop_reason)
            self._changed()

    def request_stop(self, reason: str) -> None:
        """Ask for a drain (SIGTERM). A unit that waits for its start or restart ends at once. A repeat does nothing."""
        if self._stop.is_set():
            return
        self._stop.set()
        self._stop_reason = reason
        if self._processes:
            self.instance.drain(reason)
            self._changed()
        self.signal(signal.SIGTERM)

    def forbid_restart(self) -> None:
        self._no_restart = True
        if not self._processes:
            self.request_stop("the run ends")

    def terminate(self, reason: str) -> None:
        """Ask for a drain, or, if it was asked before, for an end without a drain (a second SIGTERM)."""
        if self._stop.is_set():
            self.signal(signal.SIGTERM)
        else:
            self.request_stop(reason)

    def signal(self, number: int) -> None:
        """Send a signal to the processes; SIGKILL goes to everything in their sessions."""
        if number == signal.SIGKILL:
            self._killed.set()
        for process in self._processes.values():
            if number == signal.SIGKILL:
                process.kill()
            else:
                process.signal(number)

    async def _wait_unless_stopped(self, what: Coroutine[Any, Any, None]) -> None:
        await first_of(what, self._stop.wait())

    async def _run_once(self) -> int:
        """Start the processes and wait until all are gone. Returns the exit code that decides; sets the cause."""
        self._cause, self._fenced = "", False
        self._killed.clear()
        self._reported_ready.clear()
        waits: dict[asyncio.Task[int], str] = {}
        watch: asyncio.Task[None] | None = None
        try:
            await self._spawn(waits)
            # From here on its deadlines run: a placement bounds its own waiting for room.
            watch = asyncio.create_task(self._watch())
            return await self._end(waits)
        except OSError as error:
            self._cause = f"cannot be started: {error}"
            return int(ExitCode.FAILURE)
        finally:
            self.signal(signal.SIGKILL)
            if watch is not None:
                watch.cancel()
                await asyncio.gather(watch, return_exceptions=True)
            if waits:
                await asyncio.wait(waits, timeout=KILL_SECONDS)
                for left_behind in waits:
                    left_behind.cancel()
                await asyncio.gather(*waits, return_exceptions=True)
            self._processes.clear()

    async def _spawn(self, waits: dict[asyncio.Task[int], str]) -> None:
        start = secrets.token_hex(8)
        for position, name in enumerate(self.spec.processes):
            process = await self._placement.start(self.spec, position, start, self._logs[name])
            self._processes[name] = process
            waits[asyncio.create_task(self._copy(name, process))] = name
            self._changed(name)
        if self._stop.is_set():  # a stop was requested while the processes were started
            self.instance.drain(self._stop_reason)
            self.signal(signal.SIGTERM)

    async def _copy(self, name: str, process: PlacedProcess) -> int:
        def on_status(key: str, _value: str) -> None:
            if key == "READY":
                self._ready(name)

        def lines(batch: Sequence[bytes]) -> None:
            for line in batch:
                self._send(LogLine(name, line))

        return await process.wait(on_status, lines)

    async def _end(self, waits: dict[asyncio.Task[int], str]) -> int:
        """Wait for the first process to end, then end the others. Returns the exit code that decides.

        When one rank dies, the other ranks hang in a collective or soon die of it, so they are killed. Rank 0 may work
        alone (last checkpoint, export) after the others have finished. A process that survives SIGKILL is stuck in the
        kernel and is left behind.
        """
        leader = self.spec.processes[0]
        codes: dict[str, int] = {}
        pending = set(waits)
        while pending:
            crashed = any(code != ExitCode.OK for code in codes.values())
            limit = BETTER_REASON if crashed else LEAVE_TOGETHER if leader in codes else None
            done = await self._next_ends(pending, limit)
            if not done:
                break
            pending -= done
            codes |= {waits[task]: task.result() for task in done}
        if not codes:
            self._cause = self._cause or f"{leader}: does not end after SIGKILL"
            return -signal.SIGKILL
        order = {ExitClass.HOPELESS: 0, ExitClass.CRASHED: 1, ExitClass.FINISHED: 2}
        name = min(codes, key=lambda name: order[classify(codes[name])])  # the first of the worst class
        self._explain(name, codes[name])
        return codes[name]

    async def _next_ends(self, pending: set[asyncio.Task[int]], limit: float | None) -> set[asyncio.Task[int]]:
        """The processes that end next; none `limit` seconds later, or `KILL_SECONDS` after SIGKILL."""
        killed = asyncio.create_task(_wait(self._killed))
        either: set[asyncio.Task[Any]] = {*pending, killed}
        try:
            await asyncio.wait(either, timeout=limit, return_when=asyncio.FIRST_COMPLETED)
            if killed.done() and not any(task.done() for task in pending):
                await asyncio.wait(pending, timeout=KILL_SECONDS, return_when=asyncio.FIRST_COMPLETED)
        finally:
            killed.cancel()
        return {task for task in pending if task.done()}

    def _explain(self, name: str, code: int) -> None:
        fenced = [one for one, process in self._processes.items() if process.fenced]
        self._fenced = bool(fenced)
        if fenced and code == ExitCode.OK:
            name = fenced[0]  # the other ranks ended because it told them to
        process = self._processes[name]
        said = process.fenced or process.error
        ended = f"killed by {_signal_name(-code)}" if code < 0 else f"exit {code}"
        who = f"{name}: " if len(self.spec.processes) > 1 else ""
        self._cause = self._cause or f"{who}{ended}{f': {said}' if said else ''}"

    def _ready(self, name: str) -> None:
        self._reported_ready.add(name)
        if len(self._reported_ready) == len(self.spec.processes) and self.instance.state is RoleState.STARTING:
            self.instance.ready(self._now())
            self.ready.set()
            self._changed()

    async def _watch(self) -> None:
        started = self._now()
        if self._checkup is None:
            await self._check_deadlines(started)
            return
        try:
            await self._checkup.ready()
        except StreamrlError as error:
            self._give_up(error.message)
            return
        for name in self.spec.processes:
            self._ready(name)
        probing = asyncio.create_task(self._probe(self._checkup))
        try:
            await self._check_deadlines(started)
        finally:
            probing.cancel()
            await asyncio.gather(probing, return_exceptions=True)

    async def _probe(self, checkup: Checkup) -> None:
        for process in self._processes.values():
            process.beat_at = self._now()
        while True:
            if await checkup.answers():
                for process in self._processes.values():
                    process.beat_at = self._now()
            await asyncio.sleep(_PROBE_SECONDS)

    async def _check_deadlines(self, started: float) -> None:
        checked_at = self._now()
        deadline = max(self._config.start_deadline, self.spec.start_seconds)
        while True:
            await asyncio.sleep(_CHECK_SECONDS)
            now = self._now()
            if (paused := now - checked_at - _CHECK_SECONDS) > 1.0:
                # The supervisor itself was stopped (Ctrl-Z, a suspended machine): a missing heartbeat proves nothing.
                started += paused
                for process in self._processes.values():
                    process.beat_at = None if process.beat_at is None else now
            checked_at = now
            if not all(unit.ready.is_set() for unit in self._waits_for):
                started = now
            if self.instance.state is RoleState.STARTING and now - started > deadline:
                self._give_up(f"not ready within {deadline:g} s")
                return
            if self.instance.state is RoleState.READY and (silent := self._silent(now)):
                self._give_up(silent)
                return

    def _silent(self, now: float) -> str:
        """Name the process whose heartbeat is overdue, in words for people; empty: none."""
        checkup = self._checkup
        limit = self._config.liveness_deadline if checkup is None else checkup.silence
        for name, process in self._processes.items():
            seconds = now - process.beat_at if process.beat_at is not None else 0.0
            if seconds > limit:
                how = "event loop silent" if checkup is None else "no answer"
                return f"{name}: {how} for {seconds:.0f} s"
        return ""

    def _give_up(self, cause: str) -> None:
        """Kill a unit that hangs, after its stacks (SIGUSR1) or the checkup's findings went to its log."""
        self._cause = cause
        logger.warning("unit hangs", extra={"unit": self.spec.name, "why": cause})
        for name, process in self._processes.items():
            if self._checkup is None:
                process.signal(signal.SIGUSR1)
            else:
                line = self._logs[name].note("hangs", why=cause, **self._checkup.describe(process.pid))
                self._send(LogLine(name, line))
        asyncio.get_running_loop().call_later(1.0, self._kill_these, dict(self._processes))

    def _kill_these(self, processes: Mapping[str, PlacedProcess]) -> None:
        for name, process in processes.items():
            if self._processes.get(name) is process:
                self._killed.set()
                process.kill()

    def _show_tails(self) -> None:
        for name, log in self._logs.items():
            for line in list(log.tail)[-20:]:
                self._send(LogLine(name, line, tail=True))
            log.tail.clear()

    def _changed(self, only: str | None = None) -> None:
        instance = self.instance
        pause = max(0.0, instance.until - self._now()) if instance.state is RoleState.BACKOFF else None
        for name in self.spec.processes:
            if only in {None, name}:
                process = self._processes.get(name)
                event = StateChanged(
                    name,
                    instance.state,
                    instance.reason,
                    instance.restarts,
                    process.pid if process else None,
                    instance.exit_code,
                    pause,
                )
                self._send(event)
                logger.info("state", extra={"unit": name, "state": event.state.value, "why": event.reason})

    @staticmethod
    def _now() -> float:
        return asyncio.get_running_loop().time()


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


async def _wait(event: asyncio.Event) -> None:
    await event.wait()


async def _all_ready(units: Sequence[Unit]) -> None:
    for unit in units:
        await unit.ready.wait()
