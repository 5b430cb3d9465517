"""`streamrl run ROLE`: one role of a run in this process."""

from __future__ import annotations

from pathlib import Path

from streamrl.commands.rundir import find_run


def role(kind: str, chosen: Path | None, index: int) -> int:
    """Run one role until it is finished or stopped; returns the exit code of the child protocol (docs/cli.md)."""
    from streamrl.runtime.roles import serve

    return int(serve(kind, index, find_run(chosen).path))
