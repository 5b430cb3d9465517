"""Runs where trl is installed: scores one group with trl's own reward functions, through the adapter and directly."""

from __future__ import annotations

import json
import sys
from typing import Any

from trl.rewards import get_repetition_penalty_reward, get_soft_overlong_punishment, think_format_reward

from streamrl import wire
from streamrl.config import RunConfig
from streamrl.consumers import RewardSample
from streamrl.consumers.plugins import load_rewards

punish = get_soft_overlong_punishment(max_completion_len=10, soft_punish_cache=4)
repeat = get_repetition_penalty_reward(ngram_size=2)

TEXTS = ["<think>a</think>b", "no thought", "<think>open"]
TOKENS = [[1, 2, 3, 1, 2, 3], [5] * 8, list(range(12))]


def group() -> list[RewardSample]:
    """Three responses to one chat prompt."""
    messages = [{"role": "user", "content": "Why?"}]
    prompt = wire.Prompt(tokens=wire.pack_int32([1]), messages=messages, text="Why?")
    samples = [
        wire.Sample(
            tokens=wire.pack_int32(tokens),
            logprobs=wire.pack_float32([-1.0] * len(tokens)),
            runs=[(0, 1)],
            finish="stop",
            text=text,
        )
        for text, tokens in zip(TEXTS, TOKENS, strict=True)
    ]
    return [RewardSample.of(prompt, sample, 0, index) for index, sample in enumerate(samples)]


def main() -> None:
    """Print, by name of the function, both lists of scores."""
    completions = [[{"role": "assistant", "content": text}] for text in TEXTS]
    direct: dict[str, Any] = {
        "trl.rewards:think_format_reward": think_format_reward(completions),
        "rewards_side:punish": punish(completion_ids=TOKENS),
        "rewards_side:repeat": repeat(completion_ids=TOKENS),
    }
    rewards = [{"use": use, "adapter": "trl"} for use in direct]
    config = RunConfig.model_validate({"rewards": rewards, "plugin_paths": [sys.path[0]]})
    adapted = [[reward.call(sample).value for sample in group()] for reward in load_rewards(config)]
    print(json.dumps({"direct": list(direct.values()), "adapted": adapted}))


if __name__ == "__main__":
    main()
