"""`streamrl engines ls|add|remove`: the engine servers of a run, while it goes on or for its next start."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any, Final
from urllib.parse import urlparse

from streamrl.commands import output
from streamrl.commands.rundir import RunDirectory, find_run, ledgers, ledgers_to_look
from streamrl.errors import ConfigError, ExitCode, UsageError
from streamrl.monitor.lines import printable
from streamrl.queues.registry import Enlisted

LIST_SCHEMA: Final = "streamrl.engines/1"
CHANGE_SCHEMA: Final = "streamrl.engines.change/1"
_SERVES: Final = frozenset({"ready", "leaving"})


def ls(chosen: Path | None, *, json: bool) -> int:
    """List the servers of a run with what their replicas say of them."""
    rows = asyncio.run(_rows(find_run(chosen)))
    code = ExitCode.OK if all(row["state"] in _SERVES for row in rows) else ExitCode.FAILURE
    if json:
        output.write_json(LIST_SCHEMA, {"servers": rows})
        return code
    if rows:
        _print(rows)
    else:
        output.note("no engine servers: this run generates in the processes of its replicas")
    return code


def _print(rows: list[dict[str, Any]]) -> None:
    lines = [("SERVER", "STATE", "REPLICA", "WEIGHTS", "RUNNING", "CACHE", "WHY")]
    for row in rows:
        known = bool(row["limit"])
        running = f"{row['in_flight']}/{row['limit']}" if known else "-"
        version = f"v{row['version']}" if row["version"] else "-"
        cache = f"{row['cache_use']:.0%}" if known else "-"
        lines.append((row["name"], row["state"], row["replica"] or "-", version, running, cache, row["why"]))
    widths = [max(len(cell) for cell in column) for column in zip(*lines, strict=True)]
    for line in lines:
        text = "  ".join(f"{cell:{width}}" for cell, width in zip(line, widths, strict=True))
        output.write(printable(text.rstrip()))


def add(chosen: Path | None, url: str, *, json: bool) -> int:
    """Add a server to a run."""
    run = find_run(chosen)
    _expect_servers(run)
    name = url.rstrip("/")
    if not _is_managed(run, name):
        parts = urlparse(name)
        if parts.scheme not in {"http", "https"} or not parts.hostname:
            raise UsageError(f"{url!r} is no URL of a server", "write http://HOST:PORT")
        if parts.username or parts.password:
            raise UsageError("a URL with a password would be shown to everybody", "engine.api_key_file names the key")
    return _change(run, name, present=True, json=json)


def remove(chosen: Path | None, server: str, *, json: bool) -> int:
    """Take a server out of a run."""
    run = find_run(chosen)
    _expect_servers(run)
    name = server.rstrip("/")
    known = {row["name"] for row in asyncio.run(_rows(run))}
    if name not in known and not _is_managed(run, name):
        raise UsageError(f"no server {server} in this run", "`streamrl engines ls` shows them")
    return _change(run, name, present=False, json=json)


def _change(run: RunDirectory, name: str, *, present: bool, json: bool) -> int:
    async def enlist() -> bool:
        async with ledgers(run) as opened:
            return await opened.servers.enlist(name, present=present)

    changed = asyncio.run(enlist())
    if json:
        output.write_json(CHANGE_SCHEMA, {"server": name, "present": present, "changed": changed})
        return 0
    done = "added" if present else "removed"
    output.write(f"{name} {done}" if changed else f"{name} was {done} before")
    return 0


def _expect_servers(run: RunDirectory) -> None:
    if run.config.engine.kind == "hf" and not run.config.engine.url:
        raise ConfigError(
            "this run generates in the processes of its replicas, not in servers",
            "set engine.url to servers started by `streamrl engines serve`, or engine.kind to vllm or sglang",
        )


def _is_managed(run: RunDirectory, name: str) -> bool:
    """Whether it is the name of a server that a replica of this run starts."""
    return name in _managed(run)


def _managed(run: RunDirectory) -> list[str]:
    """The names of the servers that the replicas of this run start."""
    if not run.config.engine.managed:
        return []
    numbers = range(run.config.engine.servers)
    return [f"rollout.{replica}.server{number}" for replica in range(run.config.rollout.replicas) for number in numbers]


async def _rows(run: RunDirectory) -> list[dict[str, Any]]:
    """What is known of every server: those that a replica speaks of, those of the configuration, those added."""
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
    return [row for name, row in rows.items() if row["replica"] or _is_wanted(enlisted.get(name))]


def _is_wanted(entry: Enlisted | None) -> bool:
    return entry is None or entry.present
