"""Tasks of verifiers v1 as episodes. `test_verifiers.py` runs this file by the interpreter of `.adapters/verifiers`."""

from __future__ import annotations

import asyncio
import json
import stat
import sys

import pytest
import verifiers.v1 as vf

from streamrl.errors import DataError, PluginError, Unreachable
from streamrl.producers.episodes.adapters.verifiers import VerifiersEpisode
from streamrl.producers.episodes.sampler import EpisodeFailed

from .adapter_kit import asks, opened, order_with, played, real_model

NULL = {"harness": {"id": "null"}}
STAND_IN = f"""#!/bin/sh
case "$*" in
*--help*) echo "  --script" ;;
"python find"*) echo {sys.executable} ;;
esac
"""


@pytest.fixture(scope="module", autouse=True)
def uv(tmp_path_factory):
    """A program that finds here what uv would download; the harness and its program are those of the package."""
    folder = tmp_path_factory.mktemp("uv")
    (folder / "uv").write_text(STAND_IN)
    (folder / "uv").chmod(stat.S_IRWXU)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PATH", str(folder), prepend=":")
        yield


def sums(**config):
    return VerifiersEpisode("sums-v1", config=config, agent=NULL)


async def test_a_task_is_played_with_its_tools_and_scored_by_its_rewards():
    said = [asks("add", '{"a": 1, "b": 2}'), "3", *[asks("add", '{"a": 1, "b": 1}')] * 2]
    async with opened(sums(tools=True), said, max_turns=2) as play:
        found = await play(order_with(answer="3", system_prompt="be brief"))
        assert found.sample.score.value == 0.5 + 0.25
        assert found.sample.score.parts == {"right": 0.5, "brief": 0.25, "turns": 2.0}
        assert found.sample.stop == "completed"
        assert '"name": "add"' in found.prompts[0]
        assert "be brief" in found.prompts[0]
        assert "what is 1 + 2?" in found.prompts[0]
        assert "<tool_response>\n3\n</tool_response>" in found.prompts[1]
        assert found.prompts[1].startswith(found.prompts[0])
        cut = (await play()).sample
        assert cut.stop == "max_turns"
        assert cut.score.parts == {"right": 0.0, "brief": 0.25, "turns": 2.0}


async def test_a_line_is_a_task_as_the_package_writes_it():
    taskset = vf.load_taskset(vf.taskset_config_type("sums-v1")(id="sums-v1"))
    task = json.loads([*taskset][1].data.model_dump_json())
    found = await played(sums(), ["1"], order_with(line=task["idx"], text=task.pop("prompt"), **task))
    assert "what is 0 + 1?" in found.prompts[0]
    assert found.sample.score.value == 0.75


async def test_what_goes_wrong_fails_the_sample_and_says_so():
    async with opened(sums(), ["3", Unreachable("the engine is gone")]) as play:
        with pytest.raises(EpisodeFailed, match=r"TaskError: .*the scales are broken"):
            await play(order_with(fault="reward"))
        with pytest.raises(Unreachable, match="the engine is gone"):
            await play()
        with pytest.raises(DataError, match=r"line 7 of the data set is no SumsData: 1 validation error"):
            await play(order_with(answer=None))


async def test_a_wrong_taskset_or_harness_ends_the_run_at_its_start():
    with pytest.raises(PluginError, match=r"VerifiersEpisode cannot be opened: .*taskset 'chess-v1' not found"):
        await played(VerifiersEpisode("chess-v1"), [])
    with pytest.raises(PluginError, match="harness 'chess' not found"):
        await played(VerifiersEpisode("sums-v1", agent={"harness": {"id": "chess"}}), [])


async def test_a_real_model_plays(tmp_path):
    async with real_model(sums(tools=True), tmp_path, max_turns=64) as (sampler, _):
        orders = [order_with(answer="it is three") for _ in range(2)]
        orders = [type(order)(order.prompt, id=f"r-{at}") for at, order in enumerate(orders)]
        samples = await asyncio.gather(*map(sampler.sample, orders))
        assert sampler.figures()["forks"] == 0
    assert {sample.stop for sample in samples} == {"completed"}
    assert all(sample.score.value >= 0.5 for sample in samples)
    longest = max(samples, key=lambda sample: len(sample.turns))
    assert len(longest.turns) >= 4, "no sample called a tool"
    assert [turn.parent for turn in longest.turns[1:]] == [*range(len(longest.turns) - 1)]
    assert sum(turn.sampled for turn in longest.turns) == len(longest.token_ids) == len(longest.token_logprobs)
