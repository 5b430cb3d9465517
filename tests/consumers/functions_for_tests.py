"""Reward functions as people have them for verl and TRL, with nothing of streamrl in them."""

from __future__ import annotations

import functools
import re

import numpy as np


def gsm8k(data_source, solution_str, ground_truth, extra_info=None, method="strict"):
    found = re.search(r"#### (-?[0-9.,]+)", solution_str)
    return float(found is not None and found.group(1) == ground_truth) if method == "strict" else 0.5


def detailed(data_source, solution_str, ground_truth, extra_info, **kwargs):
    extra_info["mine"] = True  # verl's functions may do this
    right = solution_str == ground_truth
    return {
        "score": np.float32(2 * right - 1),
        "acc": right,
        "pred": solution_str,
        "source": data_source,
        "nothing": None,
        "length": np.int64(len(solution_str)),
        "turns": extra_info["num_turns"],
        "split": extra_info.get("split"),
        "index": extra_info.get("index", -1),
    }


async def judged(data_source, solution_str, ground_truth, extra_info, reward_router_address=None, **kwargs):
    return {"score": float(solution_str == ground_truth), "router": float(reward_router_address is not None)}


def verl_true(data_source, solution_str, ground_truth, extra_info):
    return solution_str == ground_truth


def verl_batch(data_sources, solution_strs, ground_truths, extra_infos, bonus=0.0):
    longest = max(map(len, solution_strs))
    return [{"score": bonus + len(text) / longest, "n": len(extra_infos)} for text in solution_strs]


def used_a_tool(data_source, solution_str, ground_truth, extra_info):
    return float("<tool_response>\n4\n</tool_response>" in solution_str and '{"code": "2+2"}' in solution_str)


def verl_without_score(data_source, solution_str, ground_truth, extra_info):
    return {"reward": 1.0}


def verl_none(data_source, solution_str, ground_truth, extra_info):
    return None


class Scorer:
    """An object that is called, as some keep models in them."""

    async def __call__(self, data_source, solution_str, ground_truth, extra_info):
        return 7


partial = functools.partial(gsm8k, method="loose")


# --- TRL --------------------------------------------------------------------------------------------------------------


def reward_len(completions, **kwargs):
    return [-abs(20 - len(completion)) for completion in completions]


def think_format(completions, **kwargs):
    contents = [completion[0]["content"] for completion in completions]
    return [1.0 if re.match(r"^<think>.*?</think>", content, re.DOTALL) else 0.0 for content in contents]


def correct(prompts, completions, answer, **kwargs):
    return [2.0 if right in completion else 0.0 for completion, right in zip(completions, answer, strict=True)]


def best_of_group(prompts, completions, completion_ids, difficulty, log_metric=None, log_extra=None, **kwargs):
    longest = max(map(len, completion_ids))
    log_metric("longest", longest)
    log_extra("texts", completions)
    return np.asarray([len(ids) == longest for ids in completion_ids])


def share(completions, num_generations, **kwargs):
    return [completions.count(completion) / num_generations for completion in completions]


async def sometimes(completions, **kwargs):
    return [None if completion == "skip" else 1.0 for completion in completions]


def roles(completions, log_metric, **kwargs):
    (said,) = completions
    for role in {message["role"] for message in said}:
        log_metric(role, sum(message["role"] == role for message in said))
    return [len(said)]


def old_style(prompts, completions):
    return [float(len(prompt)) for prompt in prompts]


def stateful(completions, trainer_state, **kwargs):
    return [trainer_state.global_step] * len(completions)


def one_for_all(completions, **kwargs):
    return [1.0]


def scalar(completions, **kwargs):
    return 1.0


def foreign(sample):
    return 1.0
