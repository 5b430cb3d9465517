"""`streamrl engines`: environments and checks of engine servers, and the servers of a run."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import shutil
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final, Literal

import typer

from streamrl.commands import output
from streamrl.commands.options import JsonOption
from streamrl.config.base import ServerKind
from streamrl.errors import ExitCode, UsageError, need_packages

if TYPE_CHECKING:
    from streamrl.producers.engine_check import Finding

_SERVES: Final = frozenset({"ready", "leaving"})

app = typer.Typer(no_args_is_help=True, add_completion=False)


@app.command("install")
def install(
    kind: Annotated[ServerKind, typer.Argument(metavar="vllm|sglang", help="Which engine.")],
    cpu: Annotated[
        bool | None,
        typer.Option("--cpu/--gpu", help="For which kind of machine; left out: --gpu if there is an NVIDIA GPU."),
    ] = None,
    into: Annotated[
        Path | None, typer.Option("--into", metavar="DIR", help="Folder of the environment; .engines/KIND if left out.")
    ] = None,
) -> int:
    """Make the virtual environment of an engine. A repeat leaves a whole one as it is.

    Progress goes to stderr, the folder to stdout.
    """
    from streamrl.servers.environments import computes_on_cpu, default_folder
    from streamrl.servers.installation import install as make

    folder = (into if into is not None else default_folder(kind)).expanduser().absolute()
    make(kind, folder, cpu=computes_on_cpu("auto") if cpu is None else cpu, say=output.note)
    if into is not None:
        output.note(f"runs use it with  engine.environment: {folder}")
    output.write(str(folder))
    return 0


@app.command("check")
def check(
    kind: Annotated[Literal[ServerKind, "hf"], typer.Argument(metavar="vllm|sglang|hf", help="Which engine.")],
    environment: Annotated[
        Path | None,
        typer.Option("--environment", metavar="DIR", help="Environment of its servers; .engines/KIND if left out."),
    ] = None,
    json: JsonOption = False,
) -> int:
    """Start an engine on a tiny model, sample, and update its weights. Exit code 1 if something fails.

    The files of the check are removed afterwards, unless something fails.
    """
    from streamrl.servers import environments

    if kind != "hf":
        environment = environments.find_environment(environment, kind, key="--environment")
    elif environment is not None:
        raise UsageError("hf runs in this process and has no environment", "leave out --environment")
    need_packages("the check", "torch", "transformers", "safetensors")
    from streamrl.producers.engine_check import check_engine

    logging.getLogger("streamrl").setLevel(logging.CRITICAL)  # a finding says what failed

    async def found() -> list[Finding]:
        findings = []
        async for finding in check_engine(kind, folder, environment):
            findings.append(finding)
            if not json:
                output.write(f"{finding.verdict:6}  {finding.name:23}  {finding.detail}")
        return findings

    if not json:
        output.write(f"{kind} in {environment or 'this process'}")
    folder = Path(tempfile.mkdtemp(prefix=f"streamrl-check-{kind}-"))
    with contextlib.ExitStack() as left:
        left.callback(shutil.rmtree, folder, ignore_errors=True)
        findings = asyncio.run(found())
        failed = any(finding.verdict == "failed" for finding in findings)
        if failed:
            left.pop_all()  # the log that a finding names is in it
    if json:
        data: dict[str, Any] = {
            "kind": kind,
            "environment": None if environment is None else str(environment),
            "ok": not failed,
            "findings": [{"name": each.name, "verdict": each.verdict, "detail": each.detail} for each in findings],
        }
        output.write_json("streamrl.engines.check/1", data)
    return int(ExitCode.FAILURE if failed else ExitCode.OK)
