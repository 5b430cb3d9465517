"""`streamrl clean`: remove what killed processes of a stopped run left behind."""

from __future__ import annotations

import asyncio

from streamrl.commands import output
from streamrl.commands.options import JsonOption, RunOption
from streamrl.commands.rundir import RunDirectory, find_run, live
from streamrl.errors import Refused
from streamrl.monitor.snapshot import take
from streamrl.queues.keys import BEAT_TTL
from streamrl.runtime.launch import supervisor_lock, sweep


def clean(run: RunOption = None, json: JsonOption = False) -> int:
    """Remove what killed processes of a stopped run left behind: shared memory, temporary files, a Redis server.

    What the run needs to be resumed stays. Exit code 78 while roles of the run are alive.
    """
    target = find_run(run)
    with supervisor_lock(target.path):
        asyncio.run(_refuse_while_roles_live(target))
        removed = asyncio.run(sweep(target.path))
    lines = [f"removed  {what}" for what in removed] or [f"nothing to remove in {target.path}"]
    output.answer("streamrl.clean/1", {"removed": removed}, lines, json=json)
    return 0


async def _refuse_while_roles_live(run: RunDirectory) -> None:
    """Refuse while a role is alive; a foreign Redis that does not answer is an error, as roles may be alive."""
    async with live(run) as connection:
        alive = sorted((await take(connection, run.name)).roles) if connection is not None else []
    if alive:
        raise Refused(
            f"roles of the run are alive: {', '.join(alive)}",
            f"stop them first; a killed role counts as alive for {BEAT_TTL:g} s",
        )
