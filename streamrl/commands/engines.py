"""`streamrl engines`: environments of engine servers, what they can do, and the servers of a run.

Every command line reads this module: each command imports what it needs itself.
"""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from streamrl.commands.options import JsonOption

engines_app = typer.Typer(no_args_is_help=True, help="Engine servers: environments, checks, members of a run.")


class ServerKind(StrEnum):
    """Engines with an environment of their own."""

    vllm = "vllm"
    sglang = "sglang"


class CheckedKind(StrEnum):
    """Engines that `check` knows."""

    vllm = "vllm"
    sglang = "sglang"
    hf = "hf"


IntoOption = Annotated[
    Path | None, typer.Option("--into", metavar="DIR", help="Folder of the environment; .engines/KIND if left out.")
]


@engines_app.command("install")
def install(
    kind: Annotated[ServerKind, typer.Argument(metavar="vllm|sglang", help="Which engine.")],
    cpu: Annotated[
        bool | None, typer.Option("--cpu/--gpu", help="For which machine; --cpu if left out and no NVIDIA device.")
    ] = None,
    into: IntoOption = None,
) -> int:
    """Make the virtual environment of an engine. Again on half of one: goes on. Again on a whole one: nothing."""
    from streamrl.commands.environment import install as command

    return command(kind.value, into, cpu=cpu)


@engines_app.command("check")
def check(
    kind: Annotated[CheckedKind, typer.Argument(metavar="vllm|sglang|hf", help="Which engine.")],
    json: JsonOption = False,
) -> int:
    """Start an engine on a tiny model, update its weights, and say what it can do. 1 when something fails."""
    from streamrl.commands.enginecheck import check as command

    return command(kind.value, json=json)
