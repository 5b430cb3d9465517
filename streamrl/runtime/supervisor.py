"""Supervises a whole run on one machine: starts the roles, restarts dead ones, drains in the order of the data.

The order is that of `plan.ROLE_KINDS`.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import math
import os
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from enum import IntEnum
from pathlib import Path
from typing import Final, Literal

from streamrl.config import RunConfig
from streamrl.errors import ExitClass, ExitCode, classify
from streamrl.monitor.roles import RoleStates
from streamrl.queues import embedded
from streamrl.queues.supervision import Asked
from streamrl.runtime import checkup
from streamrl.runtime.control import RemoteControl
from streamrl.runtime.events import DrainStage, Event, EventPump, Notice, OnEvent, RoleGone, StateChanged
from streamrl.runtime.instance import RoleState
from streamrl.runtime.launch import supervisor_lock, sweep
from streamrl.runtime.logs import log_to_file
from streamrl.runtime.placement.local import LocalPlacement
from streamrl.runtime.placement.placement import Placement
from streamrl.runtime.placement.ray import RayPlacement
from streamrl.runtime.plan import ROLE_KINDS, UnitSpec, plan, unit_of
from streamrl.runtime.roles import stop_signals
from streamrl.runtime.unit import KILL_SECONDS, Unit
from streamrl.runtime.worker_group import WorkerGroup
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
    config: RunConfig,
    run_dir: Path,
    on_event: OnEvent,
    *,
    units: Sequence[UnitSpec] | None = None,
    on: Literal["local", "ray"] = "local",
) -> RunOutcome:
    """Run all roles of a run, here or on a Ray cluster, until it is finished, stopped by a signal, or failed.

    Must be called in the main thread: it handles SIGINT, SIGTERM, SIGHUP and SIGQUIT. The first drains, the second
    sends SIGTERM to all, the third SIGKILL. However it ends, no process and no shared memory of the run is left; if
    this process is killed, its children notice and end. `on_event` is called in a thread of its own. Refused if another
    supervisor runs this run.
    """
    log = run_dir / "logs" / "supervisor.jsonl"
    with (
        supervisor_lock(run_dir),
        log_to_file("supervisor", log, config.supervisor.log_bytes),
        RoleStates(run_dir) as states,
        EventPump(on_event) as pump,
    ):
        allow_many_files()
        # On another node another directory is the current one.
        specs = plan(config, run_dir.resolve()) if units is None else units
        control = RemoteControl(config, run_dir, on, states.roles)

        def send(event: Event) -> None:
            if isinstance(event, StateChanged):
                states.note(event.role, event.known)
            elif isinstance(event, RoleGone):
                states.forget(event.role)
            pump.send(event)
            control.note(event)

        async with control.alone(send):
            # In a thread, because a cluster may answer late, and the claim has to be renewed meanwhile.
            placement = await asyncio.to_thread(_open_placement, on, config, run_dir, specs)
            try:
                supervisor = Supervisor(config, run_dir, specs, placement, send)
                with _signals(supervisor.hurry):
                    await sweep(run_dir)
                    async with control.serving(supervisor):
                        return await supervisor.run()
            finally:
                placement.close()
                await embedded.remove_socket(run_dir)
                release_memory(run_dir)


def _open_placement(on: str, config: RunConfig, run_dir: Path, specs: Sequence[UnitSpec]) -> Placement:
    return LocalPlacement(run_dir, config) if on == "local" else RayPlacement.open(config, run_dir, specs)


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
        placement: Placement,
        send: Callable[[Event], None],
    ) -> None:
        self._run = config
        self._config = config.supervisor
        self._run_dir = run_dir
        self._placement = placement
        self._send = send
        self._haste = Haste.NONE
        self._hurried = asyncio.Event()
        self._ending = asyncio.Event()
        self._hard_end = math.inf
        self._outcome: RunOutcome | None = None
        self._tasks = asyncio.TaskGroup()
        self._running: dict[Unit, asyncio.Task[None]] = {}
        self._leaving: set[Unit] = set()
        self.groups: dict[str, WorkerGroup] = {}
        for spec in specs:
            self._group(spec.group).add(self._unit(spec))

    @property
    def units(self) -> list[Unit]:
        """Those that are leaving included."""
        return [*(unit for group in self.groups.values() for unit in group.members), *self._leaving]

    async def run(self) -> RunOutcome:
        async with self._tasks:
            for unit in self.units:
                self._start(unit)
            await self._ending.wait()
            await self._drain()
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
        code = ExitCode.INTERRUPTED if number == signal.SIGINT else ExitCode.TERMINATED
        self._hurry(Haste(min(self._haste + 1, Haste.KILL)), name, code)

    def be_asked(self, asked: Asked) -> None:
        """Do what people asked for over Redis. A repeat changes nothing."""
        if asked.end > self._haste:
            self._hurry(Haste(min(asked.end, Haste.KILL)), "`streamrl down`", ExitCode.TERMINATED)
        for name, count in asked.counts.items():
            if name in self.groups and self._outcome is None:
                self._resize(self.groups[name], count)

    def be_followed(self, reason: str) -> None:
        """Another supervisor has the run, because this one was silent in Redis for too long: end, with all roles."""
        if self._outcome is None:
            self._send(Notice(reason, error=True))
            self._end(RunOutcome(ExitCode.FAILURE, finished=False, reason=reason))

    def members(self) -> list[str]:
        """Names of all processes that the run is to have now."""
        return [name for group in self.groups.values() for unit in group.members for name in unit.spec.processes]

    def _hurry(self, haste: Haste, by: str, code: ExitCode) -> None:
        self._haste = haste
        if self._outcome is None:
            self._end(RunOutcome(ExitCode.OK, finished=False, reason=f"stopped by {by}"))
        if haste > Haste.DRAIN and self._outcome is not None and self._outcome.exit_code == ExitCode.OK:
            self._outcome = replace(self._outcome, exit_code=code, reason=f"cut short by {by}")
        if haste is Haste.TERMINATE:
            self._hard_end = min(self._hard_end, asyncio.get_running_loop().time() + self._config.term_grace)
            self._send(Notice("stopping now: SIGTERM to all roles", hint="Ctrl-C again to kill"))
        elif haste is Haste.KILL:
            self._send(Notice("killing all roles"))
            for unit in self.units:
                unit.request_stop("killed")
                unit.signal(signal.SIGKILL)
        self._hurried.set()

    def _group(self, name: str) -> WorkerGroup:
        return self.groups.setdefault(name, WorkerGroup(name))

    def _unit(self, spec: UnitSpec) -> Unit:
        health = None if spec.heartbeats else checkup.of_redis(self._run, self._run_dir)
        return Unit(spec, self._config, self._run_dir, self._placement, self._send, checkup=health)

    def _start(self, unit: Unit) -> None:
        self._running[unit] = self._tasks.create_task(self._run_unit(unit), name=unit.spec.name)

    async def _run_unit(self, unit: Unit) -> None:
        await unit.run(after=self._of(unit.spec.starts_after), waits_for=self._of(unit.spec.waits_for))
        instance = unit.instance
        if unit in self._leaving:
            self._leaving.discard(unit)
            self._placement.release(unit.spec)
            for name in unit.spec.processes:
                self._send(RoleGone(name))
        elif self._outcome is not None:
            return
        elif instance.state is RoleState.FAILED:
            reason = f"{unit.spec.name} {instance.reason}"
            self._end(RunOutcome(_exit_code(instance.exit_code), finished=False, reason=reason))
            self._send(Notice(f"{unit.spec.name} failed for good: {instance.reason}", error=True))
        elif ROLE_KINDS[unit.spec.kind].ends_run:
            self._end(RunOutcome(ExitCode.OK, finished=True, reason="finished"))

    def _resize(self, group: WorkerGroup, count: int) -> None:
        """Add members, or drain the newest; each takes up or leaves its work as at any start or end."""
        before = len(group.members)
        while len(group.members) > count:
            unit = group.remove()
            self._leaving.add(unit)
            drain = self._drain_stage([unit], asyncio.get_running_loop().time() + self._config.drain_deadline)
            self._tasks.create_task(drain, name=f"retire {unit.spec.name}")
        while len(group.members) < count:
            used = {unit.spec.name for unit in self.units}
            index = next(index for index in itertools.count() if f"{group.name}.{index}" not in used)
            unit = self._unit(unit_of(self._run, self._run_dir, group.name, [index]))
            group.add(unit)
            self._start(unit)
        if before != count:
            self._send(Notice(f"{group.name}: {count} instead of {before}, as asked"))

    def _of(self, kinds: frozenset[str]) -> list[Unit]:
        return [unit for unit in self.units if unit.spec.kind in kinds]

    def _end(self, outcome: RunOutcome) -> None:
        if self._outcome is None:
            self._outcome = outcome
        self._haste = max(self._haste, Haste.DRAIN)
        self._hurried.set()
        self._ending.set()

    async def _drain(self) -> None:
        """End all units in the order of the data, each stage within its share of the deadline."""
        loop = asyncio.get_running_loop()
        started, share = loop.time(), 0.0
        for name, group in self.groups.items():
            if name not in _STAYS_UP:
                group.all(Unit.forbid_restart)
        for kind, known in ROLE_KINDS.items():
            share += known.drain_share
            stage = [unit for unit in self.units if unit.spec.kind == kind and not self._running[unit].done()]
            if stage:
                await self._drain_stage(stage, started + share * self._config.drain_deadline)

    async def _drain_stage(self, stage: Sequence[Unit], deadline: float) -> None:
        loop = asyncio.get_running_loop()
        names = tuple(name for unit in stage for name in unit.spec.processes)
        seconds = max(0.0, deadline - loop.time())
        advice = "Ctrl-C stops now" if self._haste >= Haste.DRAIN else "Ctrl-C drains the run"
        self._send(DrainStage(names, round(seconds, 1), advice))
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
            _, left_behind = await asyncio.wait([self._running[unit] for unit in stage], timeout=_KILL_DEADLINE)
            for task in left_behind:
                task.cancel()

    async def _all_ended(self, stage: Sequence[Unit], deadline: float, at_most: Haste) -> bool:
        """Wait until the units of a stage have ended; False at the deadline or when the haste exceeds `at_most`."""
        loop = asyncio.get_running_loop()
        pending = {self._running[unit] for unit in stage if not self._running[unit].done()}
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
