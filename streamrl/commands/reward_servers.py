"""`streamrl reward servers`: who answers for the reward models of a run. Every command line reads this."""

from __future__ import annotations

from typing import Annotated

import typer

from streamrl.commands.options import JsonOption, RunOption

reward_servers_app = typer.Typer(no_args_is_help=True, help="Servers of the reward models of a run: list, add, remove.")

ModelArgument = Annotated[str, typer.Argument(metavar="NAME", help="Of the model in reward_models.")]


@reward_servers_app.command("ls")
def ls(
    model: Annotated[str | None, typer.Argument(metavar="NAME", help="Of one model; else of all.")] = None,
    run: RunOption = None,
    json: JsonOption = False,
) -> int:
    """List the servers of reward models. 1 when one that streamrl starts is not there."""
    from streamrl.commands.reward_servers_live import ls as command

    return command(run, model, json=json)


@reward_servers_app.command("add")
def add(
    model: ModelArgument,
    server: Annotated[
        str,
        typer.Argument(metavar="URL|ROLE", help="One that runs already, http://10.0.0.7:8000; a role: ask it again."),
    ],
    run: RunOption = None,
    json: JsonOption = False,
) -> int:
    """Give a reward model one more server, or one that was removed. Workers ask it within two seconds."""
    from streamrl.commands.reward_servers_live import change as command

    return command(run, model, server, present=True, json=json)


@reward_servers_app.command("remove")
def remove(
    model: ModelArgument,
    server: Annotated[str, typer.Argument(metavar="SERVER", help="URL or role, as `reward servers ls` shows it.")],
    run: RunOption = None,
    json: JsonOption = False,
) -> int:
    """Ask a server no more. It ends what it has; one that streamrl started runs on."""
    from streamrl.commands.reward_servers_live import change as command

    return command(run, model, server, present=False, json=json)
