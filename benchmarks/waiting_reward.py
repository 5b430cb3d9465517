"""A reward that waits, as one does that asks somebody else."""

from __future__ import annotations

import asyncio

from streamrl.consumers import Reward, RewardSample


class Waiting(Reward):
    """Waits for `seconds` and gives 1."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds

    async def score(self, sample: RewardSample) -> float:
        """Return 1."""
        await asyncio.sleep(self.seconds)
        return float(bool(sample.tokens.size))
