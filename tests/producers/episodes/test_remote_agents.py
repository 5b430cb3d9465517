"""Programs that fetch tasks: what they are given, how they end, and what becomes of a task that nobody plays."""

from __future__ import annotations

import asyncio
import contextlib
import socket

import aiohttp
import pytest
from pydantic import ValidationError

from streamrl.producers.episodes.endpoint import tasks
from streamrl.producers.episodes.sampler import EpisodeFailed, EpisodeSampler, episode_of
from streamrl.producers.sampler import CannotNow

from .chat_kit import HERMES, make_tokenizer
from .episode_kit import Script, config_of, order_of

TOKENIZER = make_tokenizer(HERMES, eos="<|im_end|>")
TOKEN = "a-token-for-programs"


def free_port():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        return taken.getsockname()[1]


class Program:
    """A program on another host: it knows an address and a token, and nothing else."""

    def __init__(self, session, url):
        self._session, self._url = session, url

    async def post(self, path, body=None, key=TOKEN, base=None):
        headers = {"Authorization": f"Bearer {key}"}
        async with self._session.post((base or self._url) + path, json=body or {}, headers=headers) as answer:
            return answer.status, await answer.json()

    async def fetch(self, wait=20):
        status, given = await self.post("/streamrl/task", {"wait": wait})
        assert status == 200, given
        return given


@contextlib.asynccontextmanager
async def remote(tmp_path, texts=("six",), **episode):
    (tmp_path / "token").write_text(TOKEN)
    port = free_port()
    agent = {"remote": True, "port": port - 3, "token_file": str(tmp_path / "token"), "answer": True}
    config = config_of({"agent": agent, **episode})
    sampler = EpisodeSampler(config, Script(TOKENIZER, texts), TOKENIZER, episode_of(config, "agent.3"), "agent.3")
    async with sampler, aiohttp.ClientSession() as session, asyncio.timeout(20):
        yield sampler, Program(session, f"http://127.0.0.1:{port}/v1")


async def test_a_program_fetches_a_task_plays_it_and_says_that_it_has_finished(tmp_path):
    async with remote(tmp_path) as (sampler, program):
        assert (await program.post("/streamrl/task", key="wrong"))[0] == 401
        assert (await program.fetch(wait=1))["task"] is None
        assert sampler.capacity(8) == 0, "no program has asked"
        fetching = asyncio.create_task(program.fetch())
        making = asyncio.create_task(sampler.sample(order_of(TOKENIZER)))
        given = await fetching
        assert set(given["task"]) == {"text", "messages", "metadata", "line", "evaluation", "answer"}
        assert sampler.capacity(8) == 1, "it plays"
        key = given["api_key"]
        asked = {"model": "policy", "messages": given["task"]["messages"]}
        status, said = await program.post("/chat/completions", asked, key, given["base_url"])
        assert (status, said["choices"][0]["message"]["content"]) == (200, "six")
        await program.post("/streamrl/reward", {"reward": 0.5}, key)
        assert (await program.post("/streamrl/done", key=key))[0] == 200
        sample = await making
        assert (sample.score.value, sample.text) == (0.5, "six")
        assert (await program.post("/streamrl/done", key=key))[0] == 410


async def test_without_a_token_file_the_run_makes_a_token_for_its_owner_alone(tmp_path):
    port = free_port()
    config = config_of({"agent": {"remote": True, "port": port}})
    statuses = []
    async with EpisodeSampler(
        config, Script(TOKENIZER, ()), TOKENIZER, episode_of(config, "agent.0", tmp_path), "agent.0"
    ):
        token = tmp_path / "agent.token"
        assert token.stat().st_mode & 0o777 == 0o600
        async with aiohttp.ClientSession() as session:
            program = Program(session, f"http://127.0.0.1:{port}/v1")
            for key in ("", token.read_text().strip()):
                statuses.append((await program.post("/streamrl/task", {"wait": 1}, key))[0])
    assert statuses == [401, 200]


async def test_a_program_that_fails_or_vanishes_fails_the_attempt(tmp_path):
    async with remote(tmp_path, deadline=2.0, shares={"start": 0.1}) as (sampler, program):
        making = asyncio.create_task(sampler.sample(order_of(TOKENIZER)))
        await program.post("/streamrl/done", {"error": "no browser"}, (await program.fetch())["api_key"])
        with pytest.raises(EpisodeFailed, match="the program says: no browser"):
            await making
        making = asyncio.create_task(sampler.sample(order_of(TOKENIZER)))
        await program.fetch()
        with pytest.raises(EpisodeFailed, match="has made no call"):
            await making


async def test_without_programs_the_prompt_is_handed_back_however_short_its_deadline(tmp_path, monkeypatch):
    monkeypatch.setattr(tasks, "PATIENCE", 0.6)
    async with remote(tmp_path, deadline=0.2) as (sampler, _):
        with pytest.raises(CannotNow, match="no program has asked"):
            await sampler.sample(order_of(TOKENIZER))


def test_what_is_measured_after_the_run_finds_no_programs(tmp_path):
    with pytest.raises(ValidationError, match=r"evaluation\.final_prompts are measured after the run"):
        config_of(
            {"agent": {"remote": True, "port": 1}},
            data={"held_out": str(tmp_path / "held_out.jsonl")},
            evaluation={"final_prompts": 4},
        )


@pytest.mark.parametrize(
    ("agent", "message"),
    [
        ({}, "set one of them"),
        ({"command": "x", "remote": True}, "set one of them"),
        ({"remote": True}, "need a port"),
        ({"command": "x", "port": 1}, "set remote"),
    ],
)
def test_an_agent_is_a_command_or_remote(agent, message):
    with pytest.raises(ValidationError, match=message):
        config_of({"agent": agent})
