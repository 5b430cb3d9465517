"""Tools of MCP servers that are real processes, over stdio and over HTTP."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from streamrl.errors import ConfigError, Unreachable
from streamrl.producers.episodes.adapters import mcp
from streamrl.producers.episodes.adapters.mcp import MCPEpisode
from streamrl.producers.episodes.sampler import EpisodeFailed

from .adapter_kit import asks, opened, order_with, played, real_model

SERVER = Path(__file__).parent / "mcp_server.py"


class Pids:
    """The processes of a server, as they were started."""

    def __init__(self, path):
        self.path = path

    def command(self, transport="stdio", port=0):
        return [sys.executable, str(SERVER), transport, str(port), str(self.path)]

    def started(self):
        return [int(line) for line in self.path.read_text().split()] if self.path.exists() else []

    def alive(self):
        return [pid for pid in self.started() if Path(f"/proc/{pid}").exists()]


@pytest.fixture
def pids(tmp_path):
    return Pids(tmp_path / "pids")


async def test_tools_of_one_process_answer_or_fail_and_the_model_is_told(pids):
    said = [asks("add", '{"a": 1, "b": 2}'), asks("fall"), asks("add", '{"a": "x"}'), asks("picture"), asks("flood")]
    episode = MCPEpisode(command=pids.command())
    found = await played(episode, [*said, asks("absent"), "done"], max_tool_response=200)
    assert [outcome for _, outcome in found.uses] == ["ok", "error", "error", "error", "ok", "unknown"]
    assert '"name": "add"' in found.prompts[0]
    assert "Add two numbers." in found.prompts[0]
    assert "<tool_response>\n3\n</tool_response>" in found.prompts[1]
    assert "the floor broke" in found.prompts[2]
    assert "validation error" in found.prompts[3]
    assert "this model takes text" in found.prompts[4]
    assert "characters left out]" in found.prompts[5]
    assert found.sample.stop == "completed"
    assert found.sample.score is None
    assert pids.alive() == []


async def test_a_server_outlives_a_call_that_hangs(pids):
    said = [asks("count"), asks("hang"), asks("count"), "done"]
    found = await played(MCPEpisode(command=pids.command()), said, tool_deadline=0.5)
    assert found.uses == [("count", "ok"), ("hang", "timeout"), ("count", "ok")]
    assert "2 in" in found.prompts[3]
    assert pids.alive() == []


async def test_a_process_for_each_sample_ends_with_it_also_when_it_is_cancelled(pids):
    said = [asks("count"), "done", asks("count"), "done", asks("hang")]
    async with opened(MCPEpisode(command=pids.command()), said) as play:
        assert "1 in" in (await play()).prompts[1]
        assert "1 in" in (await play()).prompts[3]
        assert len(pids.started()) == 3  # `open` looked at the tools with the first
        assert pids.alive() == []
        task = asyncio.create_task(play())
        while len(pids.started()) < 5:  # noqa: ASYNC110 (another process, which hangs now)
            await asyncio.sleep(0.01)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert pids.alive() == []


async def test_a_server_that_dies_is_a_tool_error_and_started_for_the_next_episode(pids):
    said = [asks("die"), asks("count"), "done", asks("count"), "done"]
    async with opened(MCPEpisode(command=pids.command()), said) as play:
        found = await play()
        assert found.uses == [("die", "error"), ("count", "error")]
        assert "error: MCPError: Connection closed" in found.prompts[1]
        assert found.sample.stop == "completed"
        assert (await play()).uses == [("count", "ok")]
    assert pids.alive() == []


async def test_only_named_variables_reach_the_server(pids, monkeypatch, caplog):
    caplog.set_level(logging.DEBUG)
    monkeypatch.setenv("MCP_TEST_SECRET", "hush-7")
    monkeypatch.setenv("MCP_TEST_OTHER", "other-8")
    episode = MCPEpisode(command=pids.command(), variables=["MCP_TEST_SECRET"], tools=["secret"])
    found = await played(episode, [asks("secret"), asks("add"), "done"])
    assert "hush-7 None" in found.prompts[1]
    assert found.uses == [("secret", "ok"), ("add", "unknown")]
    ours = [
        record.getMessage() + str(record.__dict__) for record in caplog.records if record.name.startswith("streamrl")
    ]
    assert not [line for line in ours if "hush-7" in line]


async def test_python_is_that_of_the_replica_whatever_the_path_says(pids, tmp_path, monkeypatch):
    (tmp_path / "python").write_text("#!/bin/sh\nexit 1\n")
    (tmp_path / "python").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    found = await played(MCPEpisode(command=["python", *pids.command()[1:]]), [asks("count"), "done"])
    assert found.uses == [("count", "ok")]
    with pytest.raises(Unreachable, match="does not answer"):  # unless the run names its own
        await MCPEpisode(command=["python", *pids.command()[1:]], variables=["PATH"]).open()


def free_port():
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


@contextlib.asynccontextmanager
async def serving(pids, port, transport="http"):
    process = await asyncio.create_subprocess_exec(*pids.command(transport, port))
    try:
        async with asyncio.timeout(60):
            while True:
                with contextlib.suppress(OSError):
                    _, writer = await asyncio.open_connection("127.0.0.1", port)
                    writer.close()
                    break
                await asyncio.sleep(0.02)
        yield process
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        await process.wait()


async def test_over_http_a_dead_server_is_a_tool_error_and_its_successor_is_found(pids, tmp_path, caplog):
    caplog.set_level(logging.INFO)
    (tmp_path / "token").write_text("hush-9\n")
    port = free_port()
    said = [asks("add", '{"a": 1, "b": 2}'), asks("die"), asks("count"), "done", asks("count"), "done"]
    episode = MCPEpisode(url=f"http://127.0.0.1:{port}/mcp?key=hush-10", token_file=str(tmp_path / "token"))
    async with contextlib.AsyncExitStack() as stack:
        process = await stack.enter_async_context(serving(pids, port))
        play = await stack.enter_async_context(opened(episode, said))
        assert (await play()).uses == [("add", "ok"), ("die", "error"), ("count", "error")]
        await asyncio.wait_for(process.wait(), 10)
        with pytest.raises(EpisodeFailed, match="does not answer") as failed:
            await play()
        await stack.enter_async_context(serving(pids, port))
        assert (await play()).uses == [("count", "ok")]
    assert "hush" not in str(failed.value)
    assert "hush" not in caplog.text


async def test_a_server_that_does_not_answer_the_end_of_a_session_holds_no_sample(pids, monkeypatch):
    monkeypatch.setattr(mcp, "_CLOSE_SECONDS", 0.2)
    port = free_port()
    async with serving(pids, port, "deaf"), asyncio.timeout(30):
        found = await played(MCPEpisode(url=f"http://127.0.0.1:{port}/mcp"), [asks("count"), "done"])
        assert (found.uses, found.sample.stop) == ([("count", "ok")], "completed")
    assert len(pids.started()) == 3, "its own, and the ends of two sessions"


@pytest.mark.parametrize(
    ("args", "why"),
    [
        ({"command": ["/nowhere/server"]}, "No such file or directory: '/nowhere/server'"),
        ({"command": [sys.executable, "-c", "raise SystemExit(3)"]}, "does not answer"),
        ({"url": "http://127.0.0.1:9/mcp"}, "does not answer"),
        ({"url": "http://127.0.0.1:9/mcp", "token_file": "/nowhere/token"}, "/nowhere/token cannot be read"),
    ],
)
async def test_a_server_that_cannot_start_ends_the_run_at_its_start(args, why):
    with pytest.raises((ConfigError, Unreachable), match=why):
        await played(MCPEpisode(**args), [])


async def test_a_tool_that_is_not_there_ends_the_run_at_its_start(pids):
    with pytest.raises(ConfigError, match=r"(?s)has no tool subtract.*add, count"):
        await MCPEpisode(command=pids.command(), tools=["add", "subtract"]).open()
    assert pids.alive() == []


async def test_a_server_that_says_nothing_is_given_up_and_ended(pids, monkeypatch):
    monkeypatch.setattr(mcp, "_START_SECONDS", 0.5)
    with pytest.raises(Unreachable, match=r"does not answer: TimeoutError"):
        await MCPEpisode(command=pids.command("never")).open()
    assert pids.alive() == []


@pytest.mark.parametrize(
    ("args", "why"),
    [
        ({}, "a command or a url"),
        ({"command": "python server.py"}, "a command or a url"),
        ({"url": "http://me:hush@host/mcp"}, "token_file"),
        ({"command": ["x"], "variables": ["ABSENT_VARIABLE"]}, "no ABSENT_VARIABLE"),
        ({"command": ["x"], "token_file": "t"}, "variables"),
    ],
)
def test_arguments_that_fit_no_server_are_refused(args, why):
    with pytest.raises(ConfigError, match=why) as refused:
        MCPEpisode(**args)
    assert "hush" not in str(refused.value)


async def test_a_real_model_calls_the_tools_of_a_real_server_of_all_samples(pids, tmp_path):
    port = free_port()
    episode = MCPEpisode(url=f"http://127.0.0.1:{port}/mcp", tools=["add"])
    async with serving(pids, port), real_model(episode, tmp_path / "talker", max_turns=6) as (sampler, tokenizer):
        samples = await asyncio.gather(*(sampler.sample(numbered(at)) for at in range(8)))
    called = [sample for sample in samples if any(turn.tools for turn in sample.turns)]
    texts = [tokenizer.decode(turn.observed_ids) for sample in called for turn in sample.turns if turn.tools]
    outcomes = {use.outcome for sample in called for turn in sample.turns for use in turn.tools}
    assert "ok" in outcomes
    assert any("<tool_response>\n3\n</tool_response>" in text for text in texts)
    assert len(pids.started()) == 1


def numbered(at):
    return replace(order_with(), id=f"rollout.0-{at}")
