"""`streamrl clean`: remove what killed processes of a stopped run left behind."""

from __future__ import annotations

import asyncio
from pathlib import Path

from streamrl.commands import output
from streamrl.commands.attach import live_probe
from streamrl.commands.rundir import RunDirectory, find_run
from streamrl.errors import Refused
from streamrl.queues.keys import BEAT_TTL
from streamrl.queues.snapshot import take
from streamrl.runtime.leftovers import sweep
from streamrl.runtime.lock import supervisor_lock


def clean(chosen: Path | None, *, json: bool) -> int:
    """Remove leftovers of a run and list them; what the run needs to go on stays. Always 0.

    Raises:
        Refused: the run is running, under a supervisor here or as roles that somebody else has started.
        Unreachable: the run has a foreign Redis that does not answer, so nobody knows.
    """
    run = find_run(chosen)
    with supervisor_lock(run.path):
        _refuse_while_roles_live(run)
        removed = asyncio.run(sweep(run.path))
    if json:
        output.write_json("streamrl.clean/1", {"removed": removed})
        return 0
    for what in removed:
        output.write(f"removed  {what}")
    if not removed:
        output.write(f"nothing to remove in {run.path}")
    return 0


def _refuse_while_roles_live(run: RunDirectory) -> None:
    probe = live_probe(run)
    if probe is None:
        return
    with probe:
        alive = sorted(take(probe, run.name).roles)
    if alive:
        raise Refused(
            f"roles of the run are alive: {', '.join(alive)}",
            f"stop them first; one that was killed counts as alive for {BEAT_TTL:g} s",
        )
