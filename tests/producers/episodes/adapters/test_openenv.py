"""An environment of OpenEnv as episodes: a server of the real package is played over its WebSocket."""

from __future__ import annotations

import asyncio
import json
import socket
import subprocess
import urllib.request
from pathlib import Path

import pytest

from streamrl.errors import ConfigError, RetryLater, Unreachable
from streamrl.producers.episodes.adapters import openenv
from streamrl.producers.episodes.adapters.openenv import OpenEnvEpisode
from streamrl.producers.episodes.sampler import EpisodeFailed
from tests.waits import until

from ..episode_kit import Script  # noqa: TID252 (tests are no package)
from .adapter_kit import opened, order_with, played, real_model
from .environments import python_of

pytestmark = pytest.mark.slow
SERVER = Path(__file__).parent / "openenv_server.py"


class Server:
    """The server's address, and how many of its environments have been closed."""

    def __init__(self, url, file):
        self.url = url
        self._file = file

    def closed(self):
        return len(self._file.read_text().splitlines()) if self._file.exists() else 0


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    python, file = python_of("openenv"), tmp_path_factory.mktemp("openenv") / "closed"
    with socket.create_server(("127.0.0.1", 0)) as listening:
        url = f"http://127.0.0.1:{listening.getsockname()[1]}"
        command = [python, SERVER, str(listening.fileno()), str(file)]
        process = subprocess.Popen(command, pass_fds=[listening.fileno()])
    with process:
        try:
            urllib.request.urlopen(f"{url}/health", timeout=60).close()  # waits in the socket's queue
            yield Server(url, file)
        finally:
            process.kill()


def text(prompt):
    return prompt.rpartition("user\n")[2]


async def test_replies_are_fields_of_actions_and_each_step_is_rewarded(server):
    before = server.closed()
    episode = OpenEnvEpisode(
        server.url, field="number", fields={"polite": True}, pattern="<n>(.*?)</n>", observation="text"
    )
    said = ["is it <n>1</n> or <n> 9 </n>?", "<n>2</n>", "I give up", "<n>a</n>", "<n>4</n>"]
    found = await played(episode, said, order_with(seed=4, options={"told": True}))
    assert found.rewards == [-0.25, None, 0.0, 0.0, 1.0]
    assert found.sample.stop == "completed"
    assert found.sample.score.value == 0.0
    assert found.sample.score.parts == {"return": 0.75, "steps": 4.0}
    assert "what is 1 + 2?\n\nguess from 0, it is 4<|im_end|>" in found.prompts[0]
    assert text(found.prompts[1]).startswith("wrong, thank you<|im_end|>")
    assert text(found.prompts[3]).startswith("error: this is no action, written as <n>(.*?)</n><|im_end|>")
    assert "error: this is no action: number: Input should be a valid integer" in text(found.prompts[4])
    assert found.prompts[4].startswith(found.prompts[3])  # one branch, token by token
    await asyncio.to_thread(until, lambda: server.closed() == before + 1, "the environment's end")


async def test_a_reply_may_be_the_whole_action_as_json(server):
    episode = OpenEnvEpisode(server.url, rewards="sum", invalid_reward=-1.0)
    found = await played(episode, ['{"number": 5}', "[5]", '{"number": 4, "polite": true}'], order_with(seed=4))
    assert found.rewards == [None] * 3
    assert found.sample.score.value == -0.25 - 1.0 + 1.0
    assert json.loads(text(found.prompts[1]).partition("<|im_end|>")[0]) == {"text": "wrong"}
    assert "error: this is no action; write it as JSON" in found.prompts[2]


async def test_samples_of_a_group_get_one_seed_and_play_beside_each_other(server):
    episode = OpenEnvEpisode(server.url, field="number", observation="text")
    async with opened(episode, ["4"] * 9, max_turns=1) as play:
        order = order_with(line=5, options={"told": True, "low": 90})
        three = await asyncio.gather(*(play(order) for _ in range(3)))
        other = await play(order_with(line=6, options={"told": True, "low": 90}))
    assert len({found.prompts[-1] for found in [*three]}) == 1
    prompts = max((found.prompts for found in three), key=len)
    assert prompts[0] == prompts[2]
    assert other.prompts[3] != prompts[0]
    assert {found.sample.stop for found in three} == {"max_turns"}


async def test_a_model_that_thinks_longer_than_the_server_waits_for_a_pong(server, monkeypatch):
    said = Script.generate

    async def slowly(self, request):
        await asyncio.sleep(0.7)
        return await said(self, request)

    monkeypatch.setattr(Script, "generate", slowly)
    found = await played(OpenEnvEpisode(server.url, field="number"), ["2", "4"], order_with(seed=4))
    assert found.rewards == [None, 1.0]


async def test_what_goes_wrong_fails_the_sample_and_says_so(server):
    before = server.closed()
    async with opened(OpenEnvEpisode(server.url, field="number"), ["13", "99", "1"], tool_deadline=0.5) as play:
        with pytest.raises(EpisodeFailed, match="the environment answers EXECUTION_ERROR: the dice are gone"):
            await play()
        with pytest.raises(EpisodeFailed, match=r"a step of OpenEnvEpisode took longer than 0\.5 s"):
            await play()
        with pytest.raises(EpisodeFailed, match="the environment answers EXECUTION_ERROR"):
            await play(order_with(options={"low": "x"}))
    await asyncio.to_thread(until, lambda: server.closed() == before + 3, "the end of all environments")


async def test_a_server_without_room_is_named_and_the_prompt_handed_back(server, monkeypatch):
    monkeypatch.setattr(openenv, "PATIENCE", 0.7)
    async with opened(OpenEnvEpisode(server.url, field="number"), ["99"] * 9) as play:
        tasks = [asyncio.create_task(play()) for _ in range(4)]
        done, rest = await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION)
        for task in rest:
            task.cancel()
        await asyncio.gather(*rest, return_exceptions=True)
    with pytest.raises(RetryLater, match="CAPACITY_REACHED"):
        next(iter(done)).result()


async def test_a_wrong_address_or_field_ends_the_run_at_its_start(server):
    with pytest.raises(ConfigError, match=r"the action of the environment .* has no guess") as caught:
        await OpenEnvEpisode(server.url, field="guess").open()
    assert "there are: metadata, number, polite" in str(caught.value.hint)
    with pytest.raises(ConfigError, match=r"the observation of the environment .* has no board"):
        await OpenEnvEpisode(server.url, observation="board").open()
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    with pytest.raises(Unreachable, match="Connection refused"):
        await OpenEnvEpisode(f"http://127.0.0.1:{port}").open()


async def test_a_real_model_plays(server, tmp_path):
    episode = OpenEnvEpisode(server.url, field="number", observation="text")
    async with real_model(episode, tmp_path, max_turns=4) as (sampler, tokenizer):
        sample = await sampler.sample(order_with(seed=4))
    assert sample.stop == "max_turns"
    assert [turn.reward for turn in sample.turns if turn.sampled] == [0.0] * 4  # it never writes a number
    assert len(sample.token_logprobs) == len(sample.token_ids)
    del tokenizer
