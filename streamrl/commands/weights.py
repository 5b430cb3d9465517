"""`streamrl weights`: the versions of the weights of a run. Every command line reads this; it imports nothing heavy."""

from __future__ import annotations

from typing import Annotated

import typer

from streamrl.commands.options import JsonOption, RunOption

weights_app = typer.Typer(no_args_is_help=True, help="Versions of the weights: list, show, keep, go back to one.")
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
    from streamrl.commands.rollback import pin as command

    return command(run, version, json=json)


@weights_app.command("unpin")
def unpin(version: VersionArgument, run: RunOption = None, json: JsonOption = False) -> int:
    """Remove the pinned copy of a version. 2 when it is not pinned, 78 while a rollback still needs it."""
    from streamrl.commands.rollback import unpin as command

    return command(run, version, json=json)


@weights_app.command("rollback")
def rollback(
    version: VersionArgument,
    run: RunOption = None,
    wait: Annotated[float, typer.Option(min=0, metavar="SECONDS", help="Longest wait for the learner.")] = 300.0,
    json: JsonOption = False,
) -> int:
    """Go back to the weights of a version: the learner goes on from them and publishes them under a new number.

    The version is pinned first. The learner takes it at the end of its step, begins the moments of AdamW anew, and
    counts steps and versions on: what was trained since is gone from the weights, and is not trained again. With
    weights.dtype bfloat16 the weights come back in that precision.

    0: engines can get the new version. 1: refused, the reason is shown. 3: no learner is running, and the next one will
    do it. 75: not yet done after --wait; the request stays.
    """
    from streamrl.commands.rollback import rollback as command

    return command(run, version, wait=wait, json=json)
