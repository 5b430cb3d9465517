"""Environments of SkyRL-Gym as episodes: real ones of the package."""

from __future__ import annotations

import sqlite3

import pytest
import skyrl_gym
from skyrl_gym.envs.base_text_env import BaseTextEnv, BaseTextEnvStepOutput

from streamrl.errors import ConfigError, DataError
from streamrl.producers.episodes.adapters.skyrl_gym import SkyRLGymEpisode
from streamrl.producers.episodes.sampler import EpisodeFailed
from streamrl.wire import NOTHING

from .adapter_kit import TOKENIZER, opened, order_with, played


class Careless(BaseTextEnv):
    """Cuts each action after its first word, and says nothing; `extras` decide what goes wrong."""

    closed = 0

    def __init__(self, env_config=None, extras=None):
        super().__init__()
        self.extras = extras or {}

    def init(self, prompt):
        return [{"role": "system", "content": "be brief"}, *prompt], {}

    def step(self, action):
        if self.extras.get("falls"):
            raise RuntimeError("the shelf fell")
        first = action.split()[0]
        return BaseTextEnvStepOutput(
            observations=[], reward=0.5, done=first == "stop", metadata={}, postprocessed_action=first
        )

    def close(self):
        type(self).closed += 1


@pytest.fixture(autouse=True)
def careless():
    skyrl_gym.register("careless", Careless)
    Careless.closed = 0
    yield
    skyrl_gym.envs.deregister("careless")


async def test_an_environment_of_several_turns_rewards_each():
    episode = SkyRLGymEpisode("gsm8k_multi_turn")
    order = order_with(reward_spec={"method": "rule", "ground_truth": "3"}, extra_info={"max_turns": 3})
    found = await played(episode, ["let me see", "#### 4", "#### 3"], order)
    assert found.rewards == [0.0, pytest.approx(0.2 / 3), 1.0]
    assert found.sample.stop == "completed"
    assert "Now provide only the final numeric answer" in found.prompts[2]
    assert found.prompts[2].startswith(found.prompts[1] + "#### 4")


async def test_the_answer_of_a_line_is_its_ground_truth_and_lines_name_environments():
    async with opened(SkyRLGymEpisode(), ["#### 3", r"Answer: \boxed{3}"]) as play:
        assert (await play(order_with(env_class="gsm8k"))).rewards == [1.0]
        assert (await play(order_with(env_class="aime"))).rewards == [1.0]
        with pytest.raises(DataError, match="line 7 of the data set has env_class 'chess'"):
            await play(order_with(env_class="chess"))


async def test_a_tool_group_of_the_package_answers_and_reads_its_configuration(tmp_path):
    folder = tmp_path / "spider" / "database" / "shop"
    folder.mkdir(parents=True)
    with sqlite3.connect(folder / "shop.sqlite") as database:
        database.execute("create table fruit (name text, price int)")
        database.execute("insert into fruit values ('pear', 3)")
    order = order_with(db_id="shop", data="spider", reward_spec={"ground_truth": "select price from fruit"})
    said = [
        "<think>look</think><sql>select name from fruit</sql>",
        "<think>done</think><solution>select price from fruit</solution>",
    ]
    found = await played(SkyRLGymEpisode("text2sql", config={"db_path": str(tmp_path)}), said, order)
    assert "pear" in found.prompts[1]
    assert (len(found.rewards), found.sample.stop) == (2, "completed")
    assert found.rewards[1] == 1.0  # the environment saw the thinking, which its reward asks for


async def test_what_the_environment_makes_of_a_reply_begins_another_branch():
    found = await played(SkyRLGymEpisode("careless"), ["go on please", "stop"])
    assert "be brief" in found.prompts[0]
    assert "assistant\ngo<|im_end|>" in found.prompts[1]
    assert "on please" not in found.prompts[1]
    turns = found.sample.turns
    assert turns[1].sampled == len(TOKENIZER.plain_ids("go on please<|im_end|>"))
    assert turns[2].parent in (NOTHING, 0, -1)
    assert found.rewards == [0.5, 0.5]
    assert Careless.closed == 1


async def test_an_error_of_a_step_fails_the_sample_with_its_cause_and_closes():
    with pytest.raises(EpisodeFailed, match="SkyRLGymEpisode failed: RuntimeError: the shelf fell"):
        await played(SkyRLGymEpisode("careless"), ["go"], order_with(falls=True))
    assert Careless.closed == 1


async def test_an_environment_that_never_ends_is_ended_by_the_limit_of_turns():
    found = await played(SkyRLGymEpisode("careless"), ["go"] * 9, max_turns=3)
    assert (found.rewards, found.sample.stop) == ([0.5] * 3, "max_turns")
    assert Careless.closed == 1


async def test_an_unknown_environment_ends_the_run_at_its_start():
    with pytest.raises(ConfigError, match="skyrl_gym has no environment chess; there are: aime"):
        await SkyRLGymEpisode("chess").open()
