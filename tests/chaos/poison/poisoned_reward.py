"""The rewards of the chaos runs: exact match, and what the prompt's `poison` says."""

import os
import signal

from streamrl.consumers import GroupReward, Reward, Score


class Poisoned(Reward):
    """1 when the response is the answer."""

    async def score(self, sample) -> Score:
        return poisoned(sample)


class PoisonedGroup(GroupReward):
    """The same, for all responses to a prompt together."""

    async def score_group(self, samples) -> list[Score]:
        return [poisoned(sample) for sample in samples]


def poisoned(sample) -> Score:
    fault = sample.prompt.metadata.get("poison")
    if fault == "kill reward":
        os.kill(os.getpid(), signal.SIGKILL)
    if fault == "break reward":
        raise RuntimeError("played: the reward fails on this prompt")
    if fault == "nan reward":
        return Score(float("nan"))
    return Score(float(sample.text == sample.prompt.answer))
