"""What `streamrl reward servers` does: reads and changes the list that reward workers follow."""

from __future__ import annotations

import asyncio
import difflib
from pathlib import Path
from typing import Any, Final
from urllib.parse import urlparse

from streamrl.commands import output
from streamrl.commands.rundir import RunDirectory, find_run, ledgers, ledgers_to_look
from streamrl.config import RewardModelConfig
from streamrl.consumers.models.servers import RewardServer, RewardServers
from streamrl.errors import ExitCode, UsageError

LIST_SCHEMA: Final = "streamrl.reward.servers/1"
CHANGE_SCHEMA: Final = "streamrl.reward.servers.change/1"
_DOWN: Final = "down"


def ls(chosen: Path | None, model: str | None, *, json: bool) -> int:
    """List the servers: those of the configuration, those that roles started, those that people added.

    Raises:
        UsageError: no such model.
    """
    run = find_run(chosen)
    if model is not None:
        _expect_model(run, model)
    rows = [row for row in asyncio.run(_rows(run)) if model in {None, row["model"]}]
    code = ExitCode.FAILURE if any(row["state"] == _DOWN for row in rows) else ExitCode.OK
    if json:
        output.write_json(LIST_SCHEMA, {"servers": rows})
        return code
    if not rows:
        output.note("no servers: this run has no reward_models")
        return code
    lines = [
        ("MODEL", "SERVER", "STATE", "URL"),
        *((row["model"], row["name"], row["state"], row["url"]) for row in rows),
    ]
    widths = [max(len(cell) for cell in column) for column in zip(*lines, strict=True)]
    for line in lines:
        output.write("  ".join(f"{cell:{width}}" for cell, width in zip(line, widths, strict=True)).rstrip())
    return code


async def _rows(run: RunDirectory) -> list[dict[str, Any]]:
    """State is `listed` (somebody else's: the workers know how it is), `ready`, `asleep`, `down` (ours), `removed`."""
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


def change(chosen: Path | None, model: str, server: str, *, present: bool, json: bool) -> int:
    """Add a server to a reward model, or take one away.

    Raises:
        UsageError: no such model, no URL, or no such server.
    """
    run = find_run(chosen)
    _expect_model(run, model)
    models = run.config.reward_models
    name = server.rstrip("/")
    ours = set(_ours(model, models[model]))
    if name not in ours:
        _expect_url(server)

    async def enlist() -> bool:
        async with ledgers(run) as opened:
            servers = RewardServers(opened)
            known = {row.name for row in await servers.present(model, models[model].url)}
            removed = await servers.removed(model)
            if not present and name not in known | removed | ours:
                raise UsageError(f"no server {server} answers for {model}", "`streamrl reward servers ls` shows them")
            return await servers.enlist(model, name, present=present)

    changed = asyncio.run(enlist())
    if json:
        output.write_json(CHANGE_SCHEMA, {"model": model, "server": name, "present": present, "changed": changed})
        return 0
    done = "added" if present else "removed"
    output.write(f"{name} {done}" if changed else f"{name} was {done} before")
    return 0


def _ours(model: str, config: RewardModelConfig) -> list[str]:
    """Roles that are servers of a model."""
    return [f"reward_model.{model}.{number}" for number in range(config.servers if config.managed else 0)]


def _expect_model(run: RunDirectory, model: str) -> None:
    models = run.config.reward_models
    if model not in models:
        close = difflib.get_close_matches(model, list(models), n=1)
        hint = f"did you mean {close[0]}?" if close else f"known: {', '.join(models) or 'none'}"
        raise UsageError(f"this run has no reward model {model}", hint)


def _expect_url(server: str) -> None:
    parts = urlparse(server)
    if parts.scheme not in {"http", "https"} or not parts.hostname:
        raise UsageError(f"{server!r} is no URL of a server", "write http://HOST:PORT")
    if parts.username or parts.password:
        raise UsageError(
            "a URL with a password would be shown to everybody", "reward_models.NAME.api_key_file names the key"
        )
