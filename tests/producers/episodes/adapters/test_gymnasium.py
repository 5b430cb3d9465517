"""Environments of Gymnasium as episodes: real ones of the package, and ones that go wrong."""

from __future__ import annotations

import asyncio
import sys
import threading
from typing import ClassVar

import gymnasium
import pytest

from streamrl.errors import ConfigError, DataError
from streamrl.producers.episodes.adapters.gymnasium import GymnasiumEpisode
from streamrl.producers.episodes.sampler import EpisodeFailed

from .adapter_kit import opened, order_with, played, real_model

WORDS = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789 .,'"


class Guess(gymnasium.Env):
    """Says whether the hidden number is above or below; the seed hides it."""

    action_space = gymnasium.spaces.Text(20, charset=WORDS)
    observation_space = gymnasium.spaces.Text(200, charset=WORDS)
    made: ClassVar[list[Guess]] = []
    stuck = threading.Event()
    stepping = threading.Event()

    def __init__(self):
        self.threads = [threading.current_thread()]
        self.closed = False
        self.made.append(self)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.threads.append(threading.current_thread())
        self.hidden = int(self.np_random.integers(1000)) if not options else options["hidden"]
        return f"guess {self.hidden}", {}

    def step(self, action):
        self.threads.append(threading.current_thread())
        if action == "fall":
            raise ValueError("the floor broke")
        if action == "hang":
            self.stepping.set()
            self.stuck.wait(60)
        guess = int(action)
        if guess == self.hidden:
            return "yes", 1.0, True, False, {}
        return "above" if self.hidden > guess else "below", -0.125, False, False, {}

    def close(self):
        self.threads.append(threading.current_thread())
        self.closed = True


@pytest.fixture(autouse=True)
def guess():
    gymnasium.register("Guess-v0", entry_point=Guess, disable_env_checker=True)
    Guess.made.clear()
    Guess.stuck.clear()
    Guess.stepping.clear()
    yield
    Guess.stuck.set()
    del gymnasium.registry["Guess-v0"]


async def test_rewards_of_steps_are_rewards_of_turns():
    found = await played(GymnasiumEpisode("Guess-v0"), ["3", "9", "5"], order_with(options={"hidden": 5}))
    assert found.rewards == [-0.125, -0.125, 1.0]
    assert found.sample.score.value == 0.0  # the learner adds the rewards of turns to it
    assert found.sample.score.parts == {"return": 0.75, "steps": 3.0}
    assert found.sample.stop == "completed"
    assert "what is 1 + 2?\n\nguess 5<|im_end|>" in found.prompts[0]
    assert found.prompts[1].startswith(found.prompts[0] + "3")
    assert found.prompts[2].endswith("user\nbelow<|im_end|>\n<|im_start|>assistant\n")


async def test_the_sum_of_the_steps_may_be_the_score_also_at_a_limit():
    episode = GymnasiumEpisode("Guess-v0", rewards="sum")
    found = await played(episode, ["3", "9"], order_with(options={"hidden": 5}), max_turns=2)
    assert (found.sample.score.value, found.rewards, found.sample.stop) == (-0.25, [None, None], "max_turns")
    assert Guess.made[-1].closed


async def test_samples_of_a_line_see_one_instance_and_other_lines_others():
    async with opened(GymnasiumEpisode("Guess-v0"), ["1"] * 40, max_turns=1) as play:
        for order in [order_with(1), order_with(1), order_with(2), order_with(1, evaluation=True)]:
            await play(order)
        await play(order_with(3, seed=11))
        await play(order_with(4, seed=11))
    one, again, other, held_out, given, same = [each.hidden for each in Guess.made[1:]]
    assert one == again
    assert len({one, other, held_out, given}) == 4
    assert given == same


async def test_one_thread_makes_steps_and_closes_an_environment():
    await played(GymnasiumEpisode("Guess-v0"), ["5"], order_with(options={"hidden": 5}))
    threads = Guess.made[-1].threads
    assert len(threads) == 4
    assert len(set(threads)) == 1
    assert threads[0] is not threading.main_thread()


async def test_an_error_of_a_step_fails_the_sample_with_its_cause_and_closes():
    with pytest.raises(EpisodeFailed, match="GymnasiumEpisode failed: ValueError: the floor broke"):
        await played(GymnasiumEpisode("Guess-v0"), ["3", "fall"], order_with(options={"hidden": 5}))
    assert Guess.made[-1].closed


async def test_a_step_that_hangs_fails_the_sample_and_close_waits_for_it(monkeypatch):
    monkeypatch.setattr("streamrl.producers.episodes.environment._CLOSE_SECONDS", 0.05)
    with pytest.raises(EpisodeFailed, match=r"a step of GymnasiumEpisode took longer than 0\.2 s"):
        await played(GymnasiumEpisode("Guess-v0"), ["hang"], tool_deadline=0.2)
    instance = Guess.made[-1]
    assert not instance.closed
    Guess.stuck.set()
    await asyncio.to_thread(instance.threads[0].join, 10)
    assert instance.closed


async def test_cancelling_closes_after_the_step_that_runs():
    async with opened(GymnasiumEpisode("Guess-v0"), ["hang"]) as play:
        task = asyncio.create_task(play())
        assert await asyncio.to_thread(Guess.stepping.wait, 10)
        task.cancel()
        Guess.stuck.set()
        with pytest.raises(asyncio.CancelledError):
            await task
    assert Guess.made[-1].closed


async def test_a_reply_that_is_no_action_does_not_step():
    episode = GymnasiumEpisode(
        "FrozenLake-v1",
        kwargs={"is_slippery": False, "render_mode": "ansi"},
        actions=["left", "down", "right", "up"],
        pattern="<move>(.*?)</move>",
        observation="render",
        invalid_reward=-0.5,
    )
    moves = ["down", "Down", "right", "right", "down", "right"]
    found = await played(episode, ["I jump", *(f"I go <move> {move} </move>" for move in moves)])
    assert found.rewards == [-0.5, 0.0, 0.0, 0.0, 0.0, 0.0, 1.0]
    assert found.sample.stop == "completed"
    assert "SFFF\nFHFH\nFFFH\nHFFG" in found.prompts[0]
    assert "\x1b" not in found.prompts[0]  # colours of a terminal
    assert "the actions are left, down, right, up, written as <move>(.*?)</move>" in found.prompts[1]


async def test_a_truncated_environment_ends_with_its_limit():
    episode = GymnasiumEpisode("FrozenLake-v1", kwargs={"max_episode_steps": 2, "is_slippery": False})
    found = await played(episode, ["0", "0"])
    assert (len(found.rewards), found.sample.stop) == (2, "max_turns")


@pytest.mark.parametrize(
    ("episode", "why"),
    [
        ({"environment": "Guess-v9"}, "cannot be opened: VersionNotFound: Environment version `v9`"),
        ({"environment": "absent_module:Guess-v0"}, "cannot be opened: .*absent_module"),
        ({"environment": "Guess-v0", "actions": ["up"]}, "there is no action for up"),
        ({"environment": "FrozenLake-v1", "actions": {"up": 4}}, "there is no action for up"),
        ({"environment": "FrozenLake-v1", "observation": "render"}, "renders no text and no image"),
        ({"environment": "Pendulum-v1"}, "the policy writes Text or Discrete"),
    ],
)
async def test_what_cannot_work_ends_the_run_at_its_start(episode, why):
    with pytest.raises(ConfigError, match=why):
        await played(GymnasiumEpisode(**episode), [])


def test_a_missing_package_is_named_with_its_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "gymnasium", None)
    monkeypatch.setattr("streamrl.errors.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"(?s)needs gymnasium.*pip install 'streamrl\[gymnasium\]'"):
        GymnasiumEpisode("Guess-v0")


async def test_a_real_model_plays(tmp_path):
    episode = GymnasiumEpisode("FrozenLake-v1", kwargs={"is_slippery": False}, invalid_reward=-1.0)
    async with real_model(episode, tmp_path / "talker", max_turns=3) as (sampler, tokenizer):
        sample = await sampler.sample(order_with())
    sampled = [turn for turn in sample.turns if turn.sampled]
    assert [turn.reward for turn in sampled] == [-1.0] * 3
    assert sum(turn.sampled for turn in sampled) == len(sample.token_ids)
    assert sample.stop == "max_turns"
    answer = tokenizer.decode(sample.turns[2].observed_ids)
    assert "error: this is no action; the actions are Discrete(4)" in answer


async def test_a_line_that_the_environment_refuses_fails_its_samples_only():
    async with opened(GymnasiumEpisode("Guess-v0"), ["5"]) as play:
        with pytest.raises((EpisodeFailed, DataError), match="KeyError"):
            await play(order_with(options={"hiden": 5}))
        assert (await play(order_with(options={"hidden": 5}))).rewards == [1.0]
    assert all(instance.closed for instance in Guess.made)
