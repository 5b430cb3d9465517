"""Rewards that compare the responses to one prompt, in every way in which that can go."""

import asyncio
import os
import signal
from pathlib import Path

from streamrl.consumers import GroupReward, Score


class Rank(GroupReward):
    """Place of the response among the others by its length: 0 for the shortest."""

    async def score_group(self, samples):
        lengths = sorted({len(sample.text) for sample in samples})
        return [Score(lengths.index(len(sample.text)), {"of": len(samples)}) for sample in samples]


class ByText(GroupReward):
    """Wrong in the way that the text of one of the responses names."""

    async def score_group(self, samples):
        texts = [sample.text for sample in samples]
        if "raise" in texts:
            raise ValueError("I cannot compare these")
        if "hang" in texts:
            await asyncio.Event().wait()
        if "nan" in texts:
            return [float("nan")] * len(texts)
        if "short" in texts:
            return [1.0] * (len(texts) - 1)
        if "number" in texts:
            return 1.0
        return [1.0] * len(texts)


class ThatNobodyMayAsk(GroupReward):
    """Its answer would be an error of the test."""

    async def score_group(self, samples):
        raise AssertionError(f"asked for {[sample.index for sample in samples]}")


class KillsItsProcess(GroupReward):
    """A poisoned response takes the process with it."""

    async def score_group(self, samples):
        if any(sample.text == "poison" for sample in samples):
            os.kill(os.getpid(), signal.SIGKILL)
        await asyncio.sleep(0.001)
        return [float(sample.index) for sample in samples]


class WaitsInTheMiddle(GroupReward):
    """Writes its process id, then waits until the test lets it go on."""

    async def score_group(self, samples):
        folder = Path(samples[0].prompt.metadata["folder"])
        (folder / f"in-{os.getpid()}").touch()
        while not (folder / "go").exists():  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        return [float(sample.index) for sample in samples]


def sync_rank(sample):
    """A reward of single samples."""
    return float(len(sample.text))
