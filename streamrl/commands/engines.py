"""`streamrl engines`: environments and checks of engine servers, the servers of a run, and a server of our own."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import shutil
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final, Literal

import typer

from streamrl.commands import output
from streamrl.commands.options import JsonOption, RunOption, change_line, expect_server_url
from streamrl.commands.rundir import RunDirectory, find_run, ledgers, ledgers_to_look
from streamrl.config.base import ServerKind
from streamrl.errors import ConfigError, ExitCode, Unreachable, UsageError, need_packages

if TYPE_CHECKING:
    from streamrl.producers.engine_check import Finding

_SERVES: Final = frozenset({"ready", "leaving"})
# Keys that a run file must have and a server does not use; small values, so that the checks of sizes pass.
_UNUSED: Final = (
    "max_staleness=0",
    "learner.groups_per_step=1",
    "checkpoint.every=1",
    "sampling.group_size=2",
    "sampling.max_new_tokens=1",
)

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
    model: Annotated[
        str | None,
        typer.Option("--model", metavar="MODEL", help="Directory or hub name whose chat template is examined too."),
    ] = None,
    json: JsonOption = False,
) -> int:
    """Start an engine on a tiny model, update its weights, and say what it can do. Exit code 1 if something fails.

    The files of the check are removed afterwards, unless something fails.
    """
    from streamrl.servers import environments

    if kind != "hf":
        environment = environments.find_environment(environment, kind, key="--environment")
    elif environment is not None:
        raise UsageError("hf runs in this process and has no environment", "leave out --environment")
    need_packages("the check", "torch", "transformers", "safetensors")
    from streamrl.producers.engine_check import Examination

    logging.getLogger("streamrl").setLevel(logging.CRITICAL)  # the check kills and refuses things on purpose

    def heard(finding: Finding) -> None:
        if not json:
            output.write(f"{finding.verdict:6}  {finding.name:28}  {finding.detail}")

    if not json:
        output.write(f"{kind} in {environment or 'this process'}")
    folder = Path(tempfile.mkdtemp(prefix=f"streamrl-check-{kind}-"))
    with contextlib.ExitStack() as left:
        left.callback(shutil.rmtree, folder, ignore_errors=True)
        findings = asyncio.run(Examination(kind, folder, heard, model, environment=environment).run())
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


@app.command("ls")
def ls(run: RunOption = None, json: JsonOption = False) -> int:
    """List the engine servers of a run: state, weights, requests in flight. Exit code 1 if one of them cannot serve."""
    rows = asyncio.run(_rows(find_run(run)))
    code = ExitCode.OK if all(row["state"] in _SERVES for row in rows) else ExitCode.FAILURE
    if not rows and not json:
        output.note("no engine servers: this run generates in the processes of its replicas")
    output.answer("streamrl.engines/1", {"servers": rows}, _table(rows) if rows else (), json=json)
    return code


def _table(rows: list[dict[str, Any]]) -> Iterator[str]:
    lines = [("SERVER", "STATE", "REPLICA", "WEIGHTS", "RUNNING", "CACHE", "WHY")]
    for row in rows:
        known = bool(row["limit"])
        running = f"{row['in_flight']}/{row['limit']}" if known else "-"
        version = f"v{row['version']}" if row["version"] else "-"
        cache = f"{row['cache_use']:.0%}" if known else "-"
        lines.append((row["name"], row["state"], row["replica"] or "-", version, running, cache, row["why"]))
    return output.columns(lines)


@app.command("add")
def add(
    url: Annotated[str, typer.Argument(metavar="URL", help="A server that is running, e.g. http://10.0.0.7:8000.")],
    run: RunOption = None,
    json: JsonOption = False,
) -> int:
    """Add a server, or put a removed one back. It gets the newest weights, then prompts."""
    target = find_run(run)
    _expect_servers(target)
    name = url.rstrip("/")
    if name not in _managed(target):
        expect_server_url(name, "engine.api_key_file names the key")
    return _change(target, name, present=True, json=json)


@app.command("remove")
def remove(
    server: Annotated[str, typer.Argument(metavar="SERVER", help="URL or name, as `engines ls` shows it.")],
    run: RunOption = None,
    json: JsonOption = False,
) -> int:
    """Take a server out of a run. It finishes its requests; slow ones continue on another server."""
    target = find_run(run)
    _expect_servers(target)
    name = server.rstrip("/")
    known = {row["name"] for row in asyncio.run(_rows(target))}
    if name not in known and name not in _managed(target):
        raise UsageError(f"no server {server} in this run", "`streamrl engines ls` shows them")
    return _change(target, name, present=False, json=json)


@app.command("serve")
def serve(
    model: Annotated[str, typer.Argument(metavar="MODEL", help="Directory or hub name.")],
    *,
    host: Annotated[str, typer.Option("--host", metavar="ADDRESS", help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[
        int, typer.Option("--port", metavar="PORT", min=0, max=65535, help="Port; 0: any free one.")
    ] = 8100,
    api_key_file: Annotated[
        Path | None,
        typer.Option(
            "--api-key-file",
            metavar="FILE",
            help="File with the key that requests must carry; left out: engine.key here, made if missing.",
        ),
    ] = None,
    no_api_key: Annotated[bool, typer.Option("--no-api-key", help="Serve everybody on this host.")] = False,
    overrides: Annotated[
        list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Override one value, e.g. engine.slots=64.")
    ] = None,
) -> int:
    """Serve a model with the Hugging Face engine until SIGTERM, for runs with engine.kind hf and engine.url.

    When the server is ready, its URL and the file of its key are printed to stderr: set engine.api_key_file to it.
    """
    need_packages("the server", "torch", "transformers", "safetensors")
    from streamrl.http import own_key
    from streamrl.listening import take_address
    from streamrl.runfile import load

    config = load(None, [*_UNUSED, f"model.path={model}", *(overrides or [])], environ={}).config
    file = Path("engine.key")
    key = None if no_api_key else own_key("--api-key-file", api_key_file, file)
    shown = "" if no_api_key else f"; its key is in {api_key_file or file}"
    with take_address(host, port, key) as listening:
        from streamrl.producers.serve.serve import serve as run
        from streamrl.runtime.logs import log_as_json

        log_as_json("engine")
        try:
            asyncio.run(
                run(config, listening, key=key, ready=lambda url: output.note(f"serving {model} at {url}{shown}"))
            )
        except Unreachable as error:
            output.note(f"error: {error}")
            sys.stdout.flush()
            os._exit(error.exit_code)  # a thread that hangs in a step would keep the process alive
    return 0


def _change(run: RunDirectory, name: str, *, present: bool, json: bool) -> int:
    async def enlist() -> bool:
        async with ledgers(run) as opened:
            return await opened.servers.enlist(name, present=present)

    changed = asyncio.run(enlist())
    data = {"server": name, "present": present, "changed": changed}
    output.answer("streamrl.engines.change/1", data, [change_line(name, present=present, changed=changed)], json=json)
    return 0


def _expect_servers(run: RunDirectory) -> None:
    if run.config.engine.kind == "hf" and not run.config.engine.url:
        raise ConfigError(
            "this run generates in the processes of its replicas, not in servers",
            "set engine.url to servers started by `streamrl engines serve`, or engine.kind to vllm or sglang",
        )


def _managed(run: RunDirectory) -> list[str]:
    if not run.config.engine.managed:
        return []
    numbers = range(run.config.engine.servers)
    return [f"rollout.{replica}.server{number}" for replica in range(run.config.rollout.replicas) for number in numbers]


async def _rows(run: RunDirectory) -> list[dict[str, Any]]:
    async with ledgers_to_look(run) as opened:
        enlisted, reports = await asyncio.gather(opened.servers.enlisted(), opened.servers.reports())
    nothing = {"state": "down", "version": 0, "in_flight": 0, "limit": 0, "cache_use": 0.0, "lives": 0, "why": ""}
    rows: dict[str, dict[str, Any]] = {}
    urls = [url.rstrip("/") for url in run.config.engine.url]
    for name in [*_managed(run), *urls, *sorted(enlisted)]:
        rows[name] = {"name": name, "replica": "", **nothing}
    for replica, servers in reports.items():
        for name, row in servers.items():
            rows[name] = {"name": name, "replica": replica, **nothing, **row}
    gone = {name for name, entry in enlisted.items() if not entry.present}
    return [row for name, row in rows.items() if row["replica"] or name not in gone]
