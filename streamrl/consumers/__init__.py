"""Rewards: what a plug-in implements, the rules that come along, and the worker that scores samples with them."""

from streamrl.consumers.reward import Reward, RewardPrompt, RewardSample, Score

__all__ = ["Reward", "RewardPrompt", "RewardSample", "Score"]
