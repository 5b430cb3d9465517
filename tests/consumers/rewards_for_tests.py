"""Rewards that behave in every way a reward can behave, by the text of the response."""

import asyncio
import os
import signal
import time
from pathlib import Path

from streamrl.consumers import Reward, Score
from streamrl.errors import ConfigError, RewardUnavailable


async def by_text(sample):
    """Right, or wrong in the way that the text names."""
    text = sample.text
    if text == "raise":
        raise ValueError("the judge is not amused")
    if text == "hang":
        await asyncio.Event().wait()
    if text == "nan":
        return float("nan")
    if text == "string":
        return "1.0"
    return 1.0 if text == sample.prompt.answer else 0.0


async def kills_its_process(sample):
    if sample.text == "poison":
        os.kill(os.getpid(), signal.SIGKILL)
    await asyncio.sleep(0.001)
    return 1.0


async def waits_in_the_middle(sample):
    """Writes its process id, then waits until the test lets it go on."""
    folder = Path(sample.prompt.metadata["folder"])
    (folder / f"in-{os.getpid()}").touch()
    while not (folder / "go").exists():  # noqa: ASYNC110
        await asyncio.sleep(0.01)
    return Score(1.0, {"late": 1})


async def never_yields(sample):
    if sample.text == "block":
        time.sleep(3600)  # noqa: ASYNC251
    return 1.0


async def away_until(sample):
    """Nobody can score until the test says so."""
    if not (Path(sample.prompt.metadata["folder"]) / "back").exists():
        raise RewardUnavailable("all servers are away")
    return 1.0


async def costs(sample):
    return Score(3.0, {"style": 2.0}, tokens=11)


class NeedsModel(Reward):
    async def open(self, context):
        if "critic" not in context.models:
            raise ConfigError("no model critic", "add it to reward_models")

    async def score(self, sample):
        return 1.0


class Spoilt(Reward):
    """Says things that cannot be written down, as the text asks for; it cannot count either."""

    def counts(self):
        return {"seen": object()}

    async def score(self, sample):
        if sample.text == "raise":
            raise ValueError("unknown \ud83d")
        if sample.text == "part":
            return Score(1.0, {"\ud83d": 1.0})
        if sample.text == "large":
            return Score(1.0, {"x" * 5000: 1.0})
        return 1.0
