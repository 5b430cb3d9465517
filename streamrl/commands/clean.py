"""`streamrl clean`: remove what killed processes of a stopped run left behind."""

from __future__ import annotations

import asyncio
from pathlib import Path

from streamrl.commands import output
from streamrl.commands.rundir import find_run
from streamrl.runtime.leftovers import sweep
from streamrl.runtime.lock import supervisor_lock


def clean(chosen: Path | None, *, json: bool) -> int:
    """Remove leftovers of a run and list them; what the run needs to go on stays. Always 0.

    Raises:
        Refused: the run is running.
    """
    run = find_run(chosen)
    with supervisor_lock(run.path):
        removed = asyncio.run(sweep(run.path))
    if json:
        output.write_json("streamrl.clean/1", {"removed": removed})
        return 0
    for what in removed:
        output.write(f"removed  {what}")
    if not removed:
        output.write(f"nothing to remove in {run.path}")
    return 0
