"""Rewards of the tests of `streamrl rescore` and of dead letters."""

from __future__ import annotations

import asyncio

from streamrl.consumers import GroupReward, Score


def opposite(sample, by: float = 1.0) -> float:
    """High where the answer is wrong."""
    if sample.text == "5" and sample.group_id == 5:
        raise ValueError("five is\x1b[2J not for me")
    return by * float(sample.text != sample.prompt.answer)


def verl_like(data_source, solution_str, ground_truth, extra_info=None):
    """A function with the signature of verl."""
    return {"score": float(solution_str == ground_truth), "seen": 1.0}


class Longest(GroupReward):
    """Compares the responses to one prompt."""

    async def score_group(self, samples):
        await asyncio.sleep(0)
        most = max(len(sample.tokens) for sample in samples)
        return [Score(float(len(sample.tokens) == most), {"of": float(len(samples))}) for sample in samples]


async def refuses(sample) -> float:
    """Scores what is not bad."""
    if sample.text == "bad":
        raise ValueError("I do not like this")
    return 1.0


class Refusing(GroupReward):
    """As `refuses`, for whole groups."""

    async def score_group(self, samples):
        return [await refuses(sample) for sample in samples]
