"""`streamrl down`: ends a run from any machine that reaches its Redis."""

from __future__ import annotations

import asyncio
import time
from typing import Annotated, Final

import typer

from streamrl.commands import output
from streamrl.commands.options import AnywhereOption
from streamrl.commands.rundir import KnownRun, find_anywhere, supervised
from streamrl.errors import ExitCode, Refused, Unreachable
from streamrl.queues.supervision import Supervision, parsed
from streamrl.runtime.launch import supervisor_lock

_POLL: Final = 0.2
_AUDIT_SECONDS: Final = 30.0
"""Seconds beyond all deadlines of the run, for a supervisor on a busy machine."""


def down(
    run: AnywhereOption = None,
    now: Annotated[bool, typer.Option("--now", help="End all roles at once, as a second Ctrl-C of `up` does.")] = False,
) -> int:
    """End a run as the first Ctrl-C of `up` does: the roles finish what they hold. `up --resume` goes on later.

    Exit code 0 as soon as the supervisor has ended, also if none was there; 78 if it does not end in time.
    """
    return asyncio.run(_down(find_anywhere(run), haste=2 if now else 1))


async def _down(run: KnownRun, haste: int) -> int:
    async with supervised(run) as found:
        if found is None:
            output.note(f"run {run.name} has no living supervisor; roles without one end by themselves")
            return ExitCode.OK
        supervision, said = found
        await supervision.ask_end(said["id"], haste)
        where = f"process {said['pid']} on {said['host']}"
        output.note(f"run {run.name}: {where} was asked to end it")
        supervisor = run.config.supervisor
        patience = supervisor.drain_deadline + supervisor.term_grace + _AUDIT_SECONDS
        if await _ended(supervision, said["id"], patience, own_redis=run.config.redis.url is None):
            await _released(run, time.monotonic() + _AUDIT_SECONDS)
            output.note(f"run {run.name} has ended; go on with: streamrl up --resume")
            return ExitCode.OK
    raise Refused(f"run {run.name} has not ended after {patience:.0f} s ({where})", "streamrl down --now")


async def _released(run: KnownRun, deadline: float) -> None:
    """Wait until the supervisor, if it is on this machine, has left the run directory, so that `up` can follow."""
    while run.path is not None and time.monotonic() < deadline:
        try:
            with supervisor_lock(run.path):
                return
        except Refused:
            await asyncio.sleep(_POLL)


async def _ended(supervision: Supervision, supervisor: str, patience: float, *, own_redis: bool) -> bool:
    """Wait until that supervisor is gone; a Redis of the run's own ends with it."""
    deadline = time.monotonic() + patience
    with output.ProgressLine() as progress:
        while time.monotonic() < deadline:
            try:
                said = await supervision.supervisor()
            except Unreachable:
                if own_redis:
                    return True
                raise
            if said is None or said.get("id") != supervisor:
                return True
            states = parsed(said, "states") or {}
            left = [name for name, state in states.items() if state.get("state") not in {"stopped", "failed"}]
            progress.show(f"waiting for {', '.join(left)}")
            await asyncio.sleep(_POLL)
    return False
