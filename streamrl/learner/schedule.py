"""The learning rate as a function of the updates that were made: nothing to save but their number."""

from __future__ import annotations

import math

from streamrl.config.learner import LearnerConfig


def updates_per_step(config: LearnerConfig) -> int:
    """Updates that one step makes: `passes` times `mini_batches`."""
    return config.passes * config.mini_batches


def learning_rate(config: LearnerConfig, updates: int) -> float:
    """Rate of the next update, linear warm-up first, then the schedule.

    The warm-up rises from `lr / warmup` to `lr`. After it, with x from 0 at its end to 1 after `steps` steps, the rate
    is `lr` (constant), `lr (1 - (1 - floor) x)` (linear), or `lr (floor + (1 - floor) (1 + cos(pi x)) / 2)` (cosine,
    Loshchilov and Hutter, arXiv 1608.03983, without restarts). Later updates have the rate of the floor.

    Args:
        config: `lr`, `schedule`, `lr_floor`, `warmup_steps` and `steps`; steps are turned into updates.
        updates: made so far, at least 0.
    """
    each = updates_per_step(config)
    warmup = config.warmup_steps * each
    if updates < warmup:
        return config.lr * (updates + 1) / warmup
    if config.schedule == "constant" or config.steps is None:
        return config.lr
    span = config.steps * each - warmup
    passed = min(1.0, (updates - warmup) / span) if span > 0 else 1.0
    share = 1 - passed if config.schedule == "linear" else (1 + math.cos(math.pi * passed)) / 2
    return config.lr * (config.lr_floor + (1 - config.lr_floor) * share)
