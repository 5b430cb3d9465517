"""`streamrl engines ls|add|remove` on a run with a Redis of its own."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from streamrl.queues import embedded, open_ledgers

from .run_kit import cli, data_of, make_run

ROW = {"state": "ready", "version": 7, "in_flight": 3, "limit": 16, "cache_use": 0.25, "lives": 2, "why": ""}


async def run(*arguments: str):
    return await asyncio.to_thread(cli, "engines", *arguments)


async def rows(run_dir: Path, code: int) -> dict[str, dict]:
    done = await run("ls", "--run", str(run_dir), "--json")
    assert done.returncode == code, done.stderr
    return {row["name"]: row for row in data_of(done.stdout, "streamrl.engines/1")["servers"]}


async def change(command: str, server: str, run_dir: Path) -> bool:
    done = await run(command, server, "--run", str(run_dir), "--json")
    assert done.returncode == 0, done.stderr
    return data_of(done.stdout, "streamrl.engines.change/1")["changed"]


@pytest.fixture
async def started(tmp_path: Path) -> AsyncIterator[Path]:
    """A run with two servers of its own, of which a replica has spoken."""
    run_dir = tmp_path / "started"
    config = make_run(run_dir, "engine.kind=vllm", "engine.servers=2")
    async with embedded.running(config.redis, run_dir), open_ledgers(config, run_dir) as ledgers:
        await ledgers.servers.report(
            "rollout.0",
            {"rollout.0.server0": ROW, "rollout.0.server1": {**ROW, "state": "waiting", "why": "it was\x1b[2J killed"}},
        )
        yield run_dir


async def test_ls_shows_what_replicas_say_and_whether_all_can_serve(started: Path):
    found = await rows(started, 1)
    assert found["rollout.0.server0"] == {"name": "rollout.0.server0", "replica": "rollout.0", **ROW}
    assert found["rollout.0.server1"]["state"] == "waiting"
    text = (await run("ls", "--run", str(started))).stdout
    heading, first, second = text.splitlines()
    assert heading.split() == ["SERVER", "STATE", "REPLICA", "WEIGHTS", "RUNNING", "CACHE", "WHY"]
    assert first.split() == ["rollout.0.server0", "ready", "rollout.0", "v7", "3/16", "25%"]
    assert second.index("waiting") == heading.index("STATE")
    assert "killed" in text
    assert "\x1b" not in text


async def test_add_and_remove_are_said_once(started: Path):
    assert await change("add", "http://10.0.0.7:8000/", started)
    assert not await change("add", "http://10.0.0.7:8000", started)
    assert (await rows(started, 1))["http://10.0.0.7:8000"]["state"] == "down"
    assert await change("remove", "http://10.0.0.7:8000", started)
    assert "http://10.0.0.7:8000" not in await rows(started, 1)
    assert await change("remove", "rollout.0.server1", started)
    assert not await change("remove", "rollout.0.server1", started)
    assert await change("add", "rollout.0.server1", started)
    assert "removed" in (await run("remove", "rollout.0.server0", "--run", str(started))).stdout


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (("add", "10.0.0.7:8000"), 2, "http://HOST:PORT"),
        (("add", "http://me:secret@host:1"), 2, "api_key_file"),
        (("remove", "http://unknown:1"), 2, "engines ls"),
    ],
)
async def test_bad_input(started: Path, arguments: tuple[str, ...], code: int, message: str):
    done = await run(*arguments, "--run", str(started))
    assert done.returncode == code
    assert message in done.stderr


async def test_servers_of_the_configuration_are_shown_before_any_replica_speaks(tmp_path: Path):
    config = make_run(tmp_path / "r", "engine.kind=sglang", "engine.url=[http://a:1/, http://b:1]")
    async with embedded.running(config.redis, tmp_path / "r"):
        assert set(await rows(tmp_path / "r", 1)) == {"http://a:1", "http://b:1"}
        assert await change("remove", "http://b:1", tmp_path / "r")
        assert set(await rows(tmp_path / "r", 1)) == {"http://a:1"}


async def test_servers_that_a_stopped_run_would_start_are_down(tmp_path: Path):
    make_run(tmp_path / "r", "engine.kind=vllm", "engine.servers=2")
    found = await rows(tmp_path / "r", 1)
    assert {name: row["state"] for name, row in found.items()} == {
        "rollout.0.server0": "down",
        "rollout.0.server1": "down",
    }


async def test_a_run_without_servers_has_none_to_add_to(live_run: Path):
    assert await rows(live_run, 0) == {}
    for command in ("add", "remove"):
        done = await run(command, "http://a:1", "--run", str(live_run))
        assert (done.returncode, "engine.kind" in done.stderr) == (78, True)
