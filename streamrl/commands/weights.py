"""`streamrl weights`: the versions of the weights of a run. Every command line reads this; it imports nothing heavy."""

from __future__ import annotations

from typing import Annotated

import typer

from streamrl.commands.options import JsonOption, RunOption
from streamrl.errors import UsageError

weights_app = typer.Typer(no_args_is_help=True, help="Versions of the weights: list, show, keep.")
VersionArgument = Annotated[
    str, typer.Argument(metavar="VERSION", help="Its number (`weights ls`), or newest: of those whose files are here.")
]


@weights_app.command("ls")
def ls(
    run: RunOption = None,
    everything: Annotated[bool, typer.Option("--all", help="Also those whose files are gone.")] = False,
    json: JsonOption = False,
) -> int:
    """List versions, newest first: step, size, share of changed values, where they are, which replicas have them.

    A version is there until newer ones come; a pinned one is kept until `weights unpin`. Sizes are those of the files:
    a delta has only the values that changed since the version before.
    """
    from streamrl.commands.versions import ls as command

    return command(run, everything=everything, json=json)


@weights_app.command("show")
def show(version: VersionArgument, run: RunOption = None, json: JsonOption = False) -> int:
    """Show one version with its files and tensors. 2 when there never was one."""
    from streamrl.commands.versions import show as command

    return command(run, version, json=json)


@weights_app.command("pin")
def pin(version: VersionArgument, run: RunOption = None, json: JsonOption = False) -> int:
    """Keep a version: copy it to RUN_DIR/pinned, whole and durable, on the host of the learner.

    The copy is plain safetensors files, in the type that versions travel in (weights.dtype). A version can be pinned
    only while its files are there: the newest two, and with deltas all since the last full one. A repeat does nothing.
    """
    from streamrl.commands.versions import pin as command

    return command(run, version, json=json)


@weights_app.command("unpin")
def unpin(version: VersionArgument, run: RunOption = None, json: JsonOption = False) -> int:
    """Remove the pinned copy of a version. 2 when it is not pinned."""
    from streamrl.commands.versions import unpin as command

    return command(run, version, json=json)


@weights_app.command("rollback", hidden=True)
def rollback(_version: VersionArgument = "", _run: RunOption = None) -> int:
    """Refused: a run does not go back to earlier weights."""
    raise UsageError(
        "weights rollback is gone: a running learner does not go back to earlier weights",
        "`streamrl export --checkpoint STEP --out DIR`, and start a new run with model.path DIR",
    )
