"""`streamrl reward servers`: reads and changes the list of servers that reward workers follow."""

from __future__ import annotations

import asyncio
import difflib
from typing import Annotated, Any, Final
from urllib.parse import urlparse

import typer

from streamrl.commands import output
from streamrl.commands.options import JsonOption, RunOption, change_line, expect_server_url
from streamrl.commands.rundir import RunDirectory, find_run, ledgers, ledgers_to_look
from streamrl.config import RewardModelConfig
from streamrl.errors import ExitCode, UsageError
from streamrl.queues.reward_servers import RewardServer, RewardServers

_DOWN: Final = "down"


app = typer.Typer(no_args_is_help=True, help="Servers of the reward models of a run: list, add, remove.")
ModelArgument = Annotated[str, typer.Argument(metavar="NAME", help="Name of the model in reward_models.")]


@app.command("ls")
def ls(
    model: Annotated[str | None, typer.Argument(metavar="NAME", help="Only servers of this model.")] = None,
    run: RunOption = None,
    json: JsonOption = False,
) -> int:
    """List the servers of reward models. Exit code 1 if a server that streamrl starts is down."""
    target = find_run(run)
    if model is not None:
        _expect_model(target, model)
    rows = [row for row in asyncio.run(_rows(target)) if model in {None, row["model"]}]
    code = ExitCode.FAILURE if any(row["state"] == _DOWN for row in rows) else ExitCode.OK
    if not rows and not json:
        output.note("no servers: this run has no reward_models")
    cells = [(row["model"], row["name"], row["state"], row["url"]) for row in rows]
    table = output.columns([("MODEL", "SERVER", "STATE", "URL"), *cells]) if rows else ()
    output.answer("streamrl.reward.servers/1", {"servers": rows}, table, json=json)
    return code


async def _rows(run: RunDirectory) -> list[dict[str, Any]]:
    """Servers that others run are `listed`; servers that streamrl starts are `ready`, `asleep` or `down`."""
    rows = []
    async with ledgers_to_look(run) as opened:
        servers = RewardServers(opened)
        for model, config in run.config.reward_models.items():
            present = {server.name: server for server in await servers.present(model, config.url)}
            removed = await servers.removed(model)
            for name in dict.fromkeys([*_ours(model, config), *present, *sorted(removed)]):
                server = present.get(name)
                url = server.url if server is not None else name if urlparse(name).scheme else ""
                rows.append({"model": model, "name": name, "state": _state(server, name in removed), "url": url})
    return rows


def _state(server: RewardServer | None, removed: bool) -> str:
    if removed:
        return "removed"
    if server is None:
        return _DOWN
    return "listed" if server.name == server.url else "ready" if server.awake else "asleep"


@app.command("add")
def add(
    model: ModelArgument,
    server: Annotated[
        str,
        typer.Argument(
            metavar="URL|ROLE",
            help="URL of a running server, e.g. http://10.0.0.7:8000; or a role that was removed.",
        ),
    ],
    run: RunOption = None,
    json: JsonOption = False,
) -> int:
    """Add a server, or put a removed one back. Workers use it within two seconds."""
    return _change(find_run(run), model, server, present=True, json=json)


@app.command("remove")
def remove(
    model: ModelArgument,
    server: Annotated[str, typer.Argument(metavar="SERVER", help="URL or role, as `reward servers ls` shows it.")],
    run: RunOption = None,
    json: JsonOption = False,
) -> int:
    """Take a server out of use. It finishes its requests; a server that streamrl started keeps running."""
    return _change(find_run(run), model, server, present=False, json=json)


def _change(run: RunDirectory, model: str, server: str, *, present: bool, json: bool) -> int:
    _expect_model(run, model)
    models = run.config.reward_models
    name = server.rstrip("/")
    ours = set(_ours(model, models[model]))
    if name not in ours:
        expect_server_url(server, "reward_models.NAME.api_key_file names the key")

    async def enlist() -> bool:
        async with ledgers(run) as opened:
            servers = RewardServers(opened)
            known = {row.name for row in await servers.present(model, models[model].url)}
            removed = await servers.removed(model)
            if not present and name not in known | removed | ours:
                raise UsageError(f"no server {server} answers for {model}", "`streamrl reward servers ls` shows them")
            return await servers.enlist(model, name, present=present)

    changed = asyncio.run(enlist())
    data = {"model": model, "server": name, "present": present, "changed": changed}
    output.answer(
        "streamrl.reward.servers.change/1", data, [change_line(name, present=present, changed=changed)], json=json
    )
    return 0


def _ours(model: str, config: RewardModelConfig) -> list[str]:
    return [f"reward_model.{model}.{number}" for number in range(config.servers if config.managed else 0)]


def _expect_model(run: RunDirectory, model: str) -> None:
    models = run.config.reward_models
    if model not in models:
        close = difflib.get_close_matches(model, list(models), n=1)
        hint = f"did you mean {close[0]}?" if close else f"known: {', '.join(models) or 'none'}"
        raise UsageError(f"this run has no reward model {model}", hint)
