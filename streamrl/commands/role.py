"""`streamrl run ROLE`: one role of a run in this process."""

from __future__ import annotations

import difflib
from enum import StrEnum
from typing import Annotated

import typer

from streamrl.commands.options import RunOption
from streamrl.commands.rundir import RunDirectory, find_run
from streamrl.errors import UsageError


class Kind(StrEnum):
    """Roles that `run` starts."""

    redis = "redis"
    feeder = "feeder"
    rollout = "rollout"
    reward = "reward"
    reward_model = "reward_model"
    learner = "learner"
    recorder = "recorder"
    player = "player"


def run_role(
    role: Annotated[Kind, typer.Argument(help="Which role.")],
    run: RunOption = None,
    index: Annotated[int, typer.Option("--index", min=0, help="Number of the replica, worker or rank.")] = 0,
    model: Annotated[
        str | None, typer.Option("--model", metavar="NAME", help="Which of reward_models; for role reward_model.")
    ] = None,
) -> int:
    """Run one role in this process: what the supervisor, Ray or Kubernetes start.

    The process ends with the exit code of the role (docs/reference/cli.md).
    """
    from streamrl.runtime.roles import run as run_to_its_end

    target = find_run(run)
    kind = role.value
    if role is Kind.reward_model:
        kind = f"{kind}.{_served(target, model)}"
    elif model is not None:
        raise UsageError(f"role {kind} has no --model", "leave it out: it belongs to role reward_model")
    run_to_its_end(kind, index, target.path)


def _served(run: RunDirectory, model: str | None) -> str:
    """The reward model to serve; it can be left out if there is only one whose servers streamrl starts."""
    known = [name for name, of in run.config.reward_models.items() if of.managed]
    if model is None and len(known) == 1:
        return known[0]
    if model in known:
        return str(model)
    close = difflib.get_close_matches(model or "", known, n=1)
    hint = f"did you mean {close[0]}?" if close else f"known: {', '.join(known) or 'none'}"
    if model is None:
        raise UsageError("name the reward model with --model", hint)
    raise UsageError(f"--model {model} is no reward model of this run whose servers streamrl starts", hint)
