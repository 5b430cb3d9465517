"""`streamrl engines`: environments of engine servers, what they can do, and the servers of a run.

Every command line reads this module: each command imports what it needs itself.
"""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from streamrl.commands.options import JsonOption, RunOption

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
    environment: Annotated[
        Path | None,
        typer.Option("--environment", metavar="DIR", help="Environment of its servers; .engines/KIND if left out."),
    ] = None,
    json: JsonOption = False,
) -> int:
    """Start an engine on a tiny model, update its weights, and say what it can do. 1 when something fails."""
    from streamrl.commands.enginecheck import check as command

    return command(kind.value, environment, json=json)


@engines_app.command("ls")
def ls(run: RunOption = None, json: JsonOption = False) -> int:
    """List the engine servers of a run: state, weights, requests in flight. 1 when one of them cannot serve."""
    from streamrl.commands.engines_live import ls as command

    return command(run, json=json)


@engines_app.command("add")
def add(
    url: Annotated[str, typer.Argument(metavar="URL", help="A server that runs already, e.g. http://10.0.0.7:8000.")],
    run: RunOption = None,
    json: JsonOption = False,
) -> int:
    """Add a server to a run, or one that was removed from it. It gets the newest weights, then prompts."""
    from streamrl.commands.engines_live import add as command

    return command(run, url, json=json)


@engines_app.command("remove")
def remove(
    server: Annotated[str, typer.Argument(metavar="SERVER", help="URL or name, as `engines ls` shows it.")],
    run: RunOption = None,
    json: JsonOption = False,
) -> int:
    """Take a server out of a run. It ends what it has; what takes too long goes on elsewhere."""
    from streamrl.commands.engines_live import remove as command

    return command(run, server, json=json)


@engines_app.command("serve")
def serve(
    model: Annotated[str, typer.Argument(metavar="MODEL", help="Directory or hub name.")],
    *,
    host: Annotated[str, typer.Option("--host", metavar="ADDRESS", help="Any but loopback needs a key.")] = "127.0.0.1",
    port: Annotated[int, typer.Option("--port", min=0, max=65535, help="0: any free one.")] = 8100,
    api_key_file: Annotated[
        Path | None, typer.Option("--api-key-file", metavar="FILE", help="Key that every request must bear.")
    ] = None,
    overrides: Annotated[
        list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Override one value, e.g. engine.slots=64.")
    ] = None,
) -> int:
    """Serve a model with the Hugging Face engine, for runs with engine.kind hf and engine.url."""
    from streamrl.commands.serve import serve as command

    return command(model, host, port, api_key_file, overrides or [])
