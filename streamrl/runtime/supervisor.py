"""Supervises a whole run on one machine: starts the roles, restarts dead ones, drains in the order of the data.

The order is that of `plan.ROLE_KINDS`.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import os
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from enum import IntEnum
from pathlib import Path
from typing import Final

from streamrl.config import RunConfig
from streamrl.errors import ExitClass, ExitCode, classify
from streamrl.runtime.events import DrainStage, Event, EventPump, Notice, OnEvent
from streamrl.runtime.instance import RoleState
from streamrl.runtime.launch import supervisor_lock, sweep
from streamrl.runtime.logs import log_to_file
from streamrl.runtime.plan import ROLE_KINDS, UnitSpec, plan
from streamrl.runtime.process import Lifeline
from streamrl.runtime.roles import stop_signals
from streamrl.runtime.unit import KILL_SECONDS, Unit
from streamrl.weight_sync.files import allow_many_files, release_memory

logger = logging.getLogger(__name__)

_STAYS_UP: Final = frozenset({"redis"})
_KILL_DEADLINE: Final = 6 * KILL_SECONDS
"""Seconds until a unit has ended after SIGKILL, or has given its processes up."""
_ASKED: Final = frozenset(
    {int(ExitCode.OK), int(ExitCode.INTERRUPTED), int(ExitCode.TERMINATED), -signal.SIGTERM, -signal.SIGKILL}
)
"""Exit codes of a role that was asked to end, or killed after that."""


class Haste(IntEnum):
    """How fast to end the run. Each signal raises it by one."""

    NONE = 0
    DRAIN = 1
    """Stage after stage in the order of the data."""
    TERMINATE = 2
    """SIGTERM to all roles at once, SIGKILL after `supervisor.term_grace`, Redis last."""
    KILL = 3
    """SIGKILL to everything."""


@dataclass(frozen=True, slots=True)
class RunOutcome:
    """How a supervised run ended; `restarts` counts restarts by unit.

    `exit_code` for the shell: 0 finished or drained after the first signal, 1 a role failed for good (78 and 73 if
    configuration or disk is the reason), 130 or 143 if a second signal cut the drain short.
    """

    exit_code: ExitCode
    finished: bool
    reason: str
    restarts: dict[str, int] = field(default_factory=dict)


async def supervise(
    config: RunConfig, run_dir: Path, on_event: OnEvent, *, units: Sequence[UnitSpec] | None = None
) -> RunOutcome:
    """Run all roles of a run on this machine until it is finished, stopped by a signal, or failed.

    Must be called in the main thread: it handles SIGINT, SIGTERM, SIGHUP and SIGQUIT. The first drains, the second
    sends SIGTERM to all, the third SIGKILL. However it ends, no process and no shared memory of the run is left; if
    this process is killed, its children notice and end. `on_event` is called in a thread of its own. Refused if another
    supervisor runs this run.
    """
    log = run_dir / "logs" / "supervisor.jsonl"
    with (
        supervisor_lock(run_dir),
        log_to_file("supervisor", log, config.supervisor.log_bytes),
        EventPump(on_event) as pump,
    ):
        allow_many_files()
        lifeline = Lifeline()
        try:
            supervisor = Supervisor(
                config, run_dir, plan(config, run_dir) if units is None else units, lifeline, pump.send
            )
            with _signals(supervisor.hurry):
                await sweep(run_dir)
                return await supervisor.run()
        finally:
            lifeline.close()
            release_memory(run_dir)
            if pump.broken is not None:
                logger.error("the reader of events failed", exc_info=pump.broken)


@contextlib.contextmanager
def _signals(hurry: Callable[[int], None]) -> Iterator[None]:
    loop = asyncio.get_running_loop()
    terminals = [stream.fileno() for stream in (sys.stdout, sys.stderr) if stream and stream.isatty()]

    def take(number: int) -> None:
        if number == signal.SIGHUP:
            _detach_terminals(terminals)
        hurry(number)

    numbers = stop_signals()
    for number in numbers:
        loop.add_signal_handler(number, take, number)
    try:
        yield
    finally:
        for number in numbers:
            loop.remove_signal_handler(number)


def _detach_terminals(terminals: Sequence[int]) -> None:
    """Send all output to /dev/null, because every write to a closed terminal fails."""
    nowhere = os.open(os.devnull, os.O_WRONLY | os.O_CLOEXEC)
    for terminal in terminals:
        os.dup2(nowhere, terminal)
    os.close(nowhere)


class Supervisor:
    def __init__(
        self,
        config: RunConfig,
        run_dir: Path,
        specs: Sequence[UnitSpec],
        lifeline: Lifeline,
        send: Callable[[Event], None],
    ) -> None:
        self.units = [Unit(spec, config.supervisor, run_dir, lifeline, send) for spec in specs]
        self._config = config.supervisor
        self._send = send
        self._haste = Haste.NONE
        self._hurried = asyncio.Event()
        self._hard_end = math.inf
        self._outcome: RunOutcome | None = None

    async def run(self) -> RunOutcome:
        async with asyncio.TaskGroup() as tasks:
            running = {
                tasks.create_task(
                    unit.run(after=self._of(unit.spec.starts_after), waits_for=self._of(unit.spec.waits_for)),
                    name=unit.spec.name,
                ): unit
                for unit in self.units
            }
            await self._watch(running)
            await self._drain({unit: task for task, unit in running.items()})
        if self._outcome is None:
            raise AssertionError("the drain began without an outcome")
        outcome = self._final(self._outcome)
        failed = outcome.exit_code != ExitCode.OK  # the reason was sent already, and is shown again at the very end
        text = "run finished" if outcome.finished else "run ended" if failed else f"run ended: {outcome.reason}"
        self._send(Notice(text, error=failed))
        return outcome

    def hurry(self, number: int) -> None:
        """The first signal drains, the second terminates, the third kills."""
        name = signal.Signals(number).name
        self._haste = Haste(min(self._haste + 1, Haste.KILL))
        if self._haste is Haste.DRAIN:
            self._end(RunOutcome(ExitCode.OK, finished=False, reason=f"stopped by {name}"))
        elif self._outcome is not None and self._outcome.exit_code == ExitCode.OK:
            code = ExitCode.INTERRUPTED if number == signal.SIGINT else ExitCode.TERMINATED
            self._outcome = replace(self._outcome, exit_code=code, reason=f"cut short by {name}")
        if self._haste is Haste.TERMINATE:
            self._hard_end = min(self._hard_end, asyncio.get_running_loop().time() + self._config.term_grace)
            self._send(Notice("stopping now: SIGTERM to all roles", hint="Ctrl-C again to kill"))
        elif self._haste is Haste.KILL:
            self._send(Notice("killing all roles"))
            for unit in self.units:
                unit.request_stop("killed")
                unit.signal(signal.SIGKILL)
        self._hurried.set()

    def _of(self, kinds: frozenset[str]) -> list[Unit]:
        return [unit for unit in self.units if unit.spec.kind in kinds]

    def _end(self, outcome: RunOutcome) -> None:
        if self._outcome is None:
            self._outcome = outcome
        self._haste = max(self._haste, Haste.DRAIN)
        self._hurried.set()

    async def _watch(self, running: dict[asyncio.Task[None], Unit]) -> None:
        hurried = asyncio.create_task(self._hurried.wait())
        pending: set[asyncio.Task[None] | asyncio.Task[bool]] = {*running, hurried}
        try:
            while self._outcome is None:
                done, pending = await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)
                for task in done:
                    if task is not hurried:
                        task.result()  # a bug in a unit's task ends the supervisor, and with it everything
                        self._unit_ended(running[task])  # type: ignore[index]
        finally:
            hurried.cancel()

    def _unit_ended(self, unit: Unit) -> None:
        instance = unit.instance
        if instance.state is RoleState.FAILED:
            self._end(
                RunOutcome(_exit_code(instance.exit_code), finished=False, reason=f"{unit.spec.name} {instance.reason}")
            )
            self._send(Notice(f"{unit.spec.name} failed for good: {instance.reason}", error=True))
        elif ROLE_KINDS[unit.spec.kind].ends_run:
            self._end(RunOutcome(ExitCode.OK, finished=True, reason="finished"))

    async def _drain(self, running: dict[Unit, asyncio.Task[None]]) -> None:
        """End all units in the order of the data, each stage within its share of the deadline."""
        loop = asyncio.get_running_loop()
        started, share = loop.time(), 0.0
        for unit in self.units:
            if unit.spec.kind not in _STAYS_UP:
                unit.forbid_restart()
        for kind, known in ROLE_KINDS.items():
            share += known.drain_share
            stage = {unit: running[unit] for unit in self.units if unit.spec.kind == kind and not running[unit].done()}
            if stage:
                await self._drain_stage(stage, started + share * self._config.drain_deadline)

    async def _drain_stage(self, stage: dict[Unit, asyncio.Task[None]], deadline: float) -> None:
        loop = asyncio.get_running_loop()
        names = tuple(name for unit in stage for name in unit.spec.processes)
        seconds = max(0.0, deadline - loop.time())
        self._send(DrainStage(names, round(seconds, 1)))
        for unit in stage:
            unit.request_stop("run ends")
        if await self._all_ended(stage, deadline, Haste.DRAIN):
            return
        if self._haste is Haste.DRAIN:
            self._send(Notice(f"{', '.join(names)} did not end in time: stopping hard", error=True))
        for unit in self.units:
            if unit in stage or (self._haste >= Haste.TERMINATE and unit.spec.kind not in _STAYS_UP):
                unit.terminate("run ends now")
        hard_end = min(loop.time() + self._config.term_grace, self._hard_end)
        if not await self._all_ended(stage, hard_end, Haste.TERMINATE):
            for unit in stage:
                unit.signal(signal.SIGKILL)
            _, left_behind = await asyncio.wait(stage.values(), timeout=_KILL_DEADLINE)
            for task in left_behind:
                task.cancel()

    async def _all_ended(self, stage: dict[Unit, asyncio.Task[None]], deadline: float, at_most: Haste) -> bool:
        """Wait until the units of a stage have ended; False at the deadline or when the haste exceeds `at_most`."""
        loop = asyncio.get_running_loop()
        pending = set(stage.values())
        while pending and self._haste <= at_most and loop.time() < deadline:
            self._hurried.clear()
            hurried = asyncio.create_task(self._hurried.wait())
            await asyncio.wait({*pending, hurried}, timeout=deadline - loop.time(), return_when=asyncio.FIRST_COMPLETED)
            hurried.cancel()
            pending = {task for task in pending if not task.done()}
        return not pending

    def _final(self, outcome: RunOutcome) -> RunOutcome:
        """Add the restarts. A learner that could not save at its end makes the end a failure."""
        restarts = {unit.spec.name: unit.instance.restarts for unit in self.units}
        outcome = replace(outcome, restarts=restarts)
        for unit in self.units:
            code = unit.instance.exit_code
            ends_run = ROLE_KINDS[unit.spec.kind].ends_run
            if ends_run and outcome.exit_code == ExitCode.OK and code not in {None, *_ASKED}:
                reason = f"{outcome.reason}, but {unit.spec.name} {unit.instance.reason}"
                outcome = replace(outcome, exit_code=_exit_code(code), reason=reason)
        return outcome


def _exit_code(code: int | None) -> ExitCode:
    if code is not None and classify(code) is ExitClass.HOPELESS and code in {ExitCode.CONFIG, ExitCode.CANNOT_CREATE}:
        return ExitCode(code)
    return ExitCode.FAILURE
