"""`streamrl run ROLE`: one role of a run in this process."""

from __future__ import annotations

import difflib
from typing import Annotated, Final, Literal

import typer

from streamrl.commands.options import AnywhereOption
from streamrl.commands.rundir import RunDirectory, join_run
from streamrl.errors import UsageError

Kind = Literal["redis", "feeder", "engine", "rollout", "reward", "reward_model", "learner", "recorder", "player"]

_NUMBERED: Final = frozenset({"redis", "learner", "recorder", "player", "feeder"})


def run_role(
    role: Annotated[Kind, typer.Argument(help="Which role.")],
    run: AnywhereOption = None,
    index: Annotated[
        str,
        typer.Option("--index", metavar="N|auto", help="Number of the replica, worker or rank; auto: the first free."),
    ] = "0",
    model: Annotated[
        str | None, typer.Option("--model", metavar="NAME", help="Which of reward_models; for role reward_model.")
    ] = None,
    until_finished: Annotated[
        bool,
        typer.Option("--until-finished", help="End with 143 or 130, not 0, if stopped before the run is finished."),
    ] = False,
) -> int:
    """Run one role in this process. `streamrl up` and schedulers start roles with this command.

    On a machine without the run directory, `--run redis://HOST:PORT#NAME` makes one of what the run has published.
    The process ends with the exit code of the role (page Command line of the documentation).
    """
    from streamrl.runtime.plan import use_cores
    from streamrl.runtime.roles import run as run_to_its_end

    number = None if index == "auto" else int(index) if index.isdecimal() else None
    if number is None and index != "auto":
        raise UsageError(f"--index {index} is no number", "write --index 0, or --index auto")
    if number is None and role in _NUMBERED:
        raise UsageError(f"role {role} cannot take any number", "write --index 0, for a learner its rank")
    target = join_run(run)
    if model is not None and role != "reward_model":
        raise UsageError(f"role {role} has no --model", "leave it out: it belongs to role reward_model")
    name = f"{role}.{_served(target, model)}" if role == "reward_model" else role
    if run is not None and "://" in run:
        use_cores(target.config, name, 0, alone=True)  # the host of a role that joins is its own
    run_to_its_end(name, number, target.path, until_finished=until_finished)


def _served(run: RunDirectory, model: str | None) -> str:
    """The reward model to serve; may be left out if streamrl starts servers of only one."""
    known = [name for name, of in run.config.reward_models.items() if of.managed]
    if model is None and len(known) == 1:
        return known[0]
    if model in known:
        return str(model)
    close = difflib.get_close_matches(model or "", known, n=1)
    hint = f"did you mean {close[0]}?" if close else f"known: {', '.join(known) or 'none'}"
    if model is None:
        raise UsageError("name the reward model with --model", hint)
    raise UsageError(f"--model {model} is not a reward model of this run whose servers streamrl starts", hint)
