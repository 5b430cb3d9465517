"""Rewards: what a plug-in implements, the rules that come along, and the worker that scores samples with them."""

from streamrl.consumers.reward import GroupReward, Reward, RewardContext, RewardPrompt, RewardSample, Score
from streamrl.consumers.samples import make_sample
from streamrl.errors import RewardBusy, RewardUnavailable

__all__ = [
    "GroupReward",
    "Reward",
    "RewardBusy",
    "RewardContext",
    "RewardPrompt",
    "RewardSample",
    "RewardUnavailable",
    "Score",
    "make_sample",
]
