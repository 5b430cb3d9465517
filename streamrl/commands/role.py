"""`streamrl run ROLE`: one role of a run in this process."""

from __future__ import annotations

import difflib
from pathlib import Path
from typing import NoReturn

from streamrl.commands.rundir import RunDirectory, find_run
from streamrl.errors import UsageError


def role(kind: str, chosen: Path | None, index: int, model: str | None) -> NoReturn:
    """Run one role until it is finished or stopped; the process ends with the code of the child protocol.

    Raises:
        UsageError: `model` does not name a reward model whose servers streamrl starts, or the role has none.
    """
    from streamrl.runtime.roles import run

    found = find_run(chosen)
    if kind == "reward_model":
        kind = f"{kind}.{_served(found, model)}"
    elif model is not None:
        raise UsageError(f"role {kind} has no --model", "leave it out: it is of role reward_model")
    run(kind, index, found.path)


def _served(run: RunDirectory, model: str | None) -> str:
    known: list[str] = [name for name, of in run.config["reward_models"].items() if not of["url"]]
    if model is None and len(known) == 1:
        return known[0]
    if model in known:
        return str(model)
    close = difflib.get_close_matches(model or "", known, n=1)
    hint = f"did you mean {close[0]}?" if close else f"known: {', '.join(known) or 'none'}"
    said = "name one with --model" if model is None else f"--model {model}: unknown"
    raise UsageError(f"{said}; reward models of this run whose servers streamrl starts", hint)
