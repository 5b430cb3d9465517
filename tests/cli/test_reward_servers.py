"""`streamrl reward servers ls|add|remove` on a run with a Redis of its own."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from streamrl.queues import embedded, open_ledgers

from .run_kit import cli, data_of, make_run

MODELS = "reward_models={critic: {model: c, servers: 2}, judge: {model: j, url: ['http://a:1', 'http://b:1']}}"


async def call(*arguments: str):
    return await asyncio.to_thread(cli, "reward", "servers", *arguments)


async def rows(run_dir: Path, code: int) -> list[tuple[str, str, str, str]]:
    done = await call("ls", "--run", str(run_dir), "--json")
    assert done.returncode == code, done.stderr
    servers = data_of(done.stdout, "streamrl.reward.servers/1")["servers"]
    return [(row["model"], row["name"], row["state"], row["url"]) for row in servers]


async def change(command: str, model: str, server: str, run_dir: Path) -> bool:
    done = await call(command, model, server, "--run", str(run_dir), "--json")
    assert done.returncode == 0, done.stderr
    return data_of(done.stdout, "streamrl.reward.servers.change/1")["changed"]


@pytest.fixture
async def started(tmp_path: Path) -> AsyncIterator[Path]:
    """A run with two servers of its own, one of which is up and asleep."""
    run_dir = tmp_path / "started"
    config = make_run(run_dir, MODELS)
    async with embedded.running(config.redis, run_dir), open_ledgers(config, run_dir) as ledgers:
        fields = {"url": "http://127.0.0.1:9", "server": "asleep", "host": socket.gethostname()}
        await ledgers.roles.beat("reward_model.critic.0", fields, 100)
        yield run_dir


async def test_ls_shows_who_answers_and_whether_all_of_ours_are_there(started: Path):
    assert await rows(started, 1) == [
        ("critic", "reward_model.critic.0", "asleep", "http://127.0.0.1:9"),
        ("critic", "reward_model.critic.1", "down", ""),
        ("judge", "http://a:1", "listed", "http://a:1"),
        ("judge", "http://b:1", "listed", "http://b:1"),
    ]
    heading, first, *_ = (await call("ls", "--run", str(started))).stdout.splitlines()
    assert heading.split() == ["MODEL", "SERVER", "STATE", "URL"]
    assert first.split() == ["critic", "reward_model.critic.0", "asleep", "http://127.0.0.1:9"]
    of_one = (await call("ls", "judge", "--run", str(started))).stdout.splitlines()[1:]
    assert [line.split()[1] for line in of_one] == ["http://a:1", "http://b:1"]
    assert await change("remove", "critic", "reward_model.critic.1", started)
    assert [(name, state) for _, name, state, _ in await rows(started, 0)] == [
        ("reward_model.critic.0", "asleep"),
        ("reward_model.critic.1", "removed"),
        ("http://a:1", "listed"),
        ("http://b:1", "listed"),
    ]
    assert await change("add", "critic", "reward_model.critic.1", started)  # a role comes back by its name
    assert ("critic", "reward_model.critic.1", "down", "") in await rows(started, 1)


async def test_add_and_remove_are_said_once(started: Path):
    assert await change("add", "judge", "http://c:1/", started)
    assert not await change("add", "judge", "http://c:1", started)
    assert ("judge", "http://c:1", "listed", "http://c:1") in await rows(started, 1)
    assert await change("remove", "judge", "http://c:1", started)
    assert await change("remove", "judge", "http://a:1", started)
    assert not await change("remove", "judge", "http://a:1", started)
    assert [row[1:] for row in await rows(started, 1) if row[0] == "judge"] == [
        ("http://b:1", "listed", "http://b:1"),
        ("http://a:1", "removed", "http://a:1"),
        ("http://c:1", "removed", "http://c:1"),
    ]
    assert await change("add", "judge", "http://a:1", started)
    done = await call("remove", "judge", "http://b:1", "--run", str(started))
    assert done.stdout == "http://b:1 removed\n"


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["add", "critik", "http://c:1"], "did you mean critic?"),
        (["ls", "critik"], "did you mean critic?"),
        (["add", "judge", "c:1"], "not the URL of a server"),
        (["add", "judge", "http://me:pw@c:1"], "shown to everybody"),
        (["remove", "judge", "http://c:1"], "reward servers ls"),
        (["remove", "judge", "reward_model.judge.0"], "not the URL of a server"),
    ],
)
async def test_what_is_no_model_or_no_server_is_refused(started: Path, words: list[str], said: str):
    done = await call(*words, "--run", str(started))
    assert done.returncode == 2
    assert said in done.stderr


async def test_a_run_without_reward_models_says_so(tmp_path: Path):
    make_run(tmp_path / "run")
    done = await call("ls", "--run", str(tmp_path / "run"))
    assert (done.returncode, done.stdout) == (0, "")
    assert "no reward_models" in done.stderr
