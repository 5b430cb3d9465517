"""`streamrl run ROLE`: one role of a run in this process."""

from __future__ import annotations

from pathlib import Path
from typing import NoReturn

from streamrl.commands.rundir import find_run


def role(kind: str, chosen: Path | None, index: int) -> NoReturn:
    """Run one role until it is finished or stopped; the process ends with the code of the child protocol."""
    from streamrl.runtime.roles import run

    run(kind, index, find_run(chosen).path)
