"""One JSON line per step: what the learner did and who waited for whom."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np

from streamrl.learner.groups import TrainGroup
from streamrl.learner.results import UpdateStats


class StepMeter:
    """Measures from the end of one step to the end of the next; the first step begins with its first groups."""

    def __init__(self) -> None:
        self._began: float | None = None
        self._since = 0.0
        self._computed = 0.0

    def begin(self) -> None:
        """The first groups are there. Later calls do nothing."""
        if self._began is None:
            self._began = self._since = time.monotonic()

    @property
    def idle_fraction(self) -> float:
        """Share of the time since the first groups came in which torch did nothing."""
        total = self._since - self._began if self._began is not None else 0.0
        return 1 - self._computed / total if total else 0.0

    def line(
        self,
        groups: Sequence[TrainGroup],
        stats: UpdateStats,
        ages: Counter[int],
        busy: Sequence[tuple[float, float]],
    ) -> dict[str, Any]:
        """Close the step and describe it.

        Args:
            groups: of the step.
            stats: of its update.
            ages: sampled tokens by staleness in steps.
            busy: intervals of computing since the last line, pairs of `time.monotonic()`.
        """
        now = time.monotonic()
        seconds, self._since = now - self._since, now
        computed = sum(end - start for start, end in busy)
        self._computed += computed
        tokens = sum(group.tokens for group in groups)
        rewards = np.asarray([reward for group in groups for reward in group.rewards])
        sums = stats.trained
        return {
            "loss": stats.loss,
            "reward_mean": float(rewards.mean()),
            "reward_std": float(rewards.std()),
            "groups": len(groups),
            "zero_advantage_groups": sum(group.zero_advantage for group in groups),
            "tokens": tokens,
            "prompt_tokens": sum(group.prompt_tokens for group in groups),
            "ess": sums.ess,
            "mean_squared_log_ratio": sums.mean("squared_log_ratio"),
            "clip_fraction": sums.mean("clipped"),
            "capped_fraction": sums.mean("capped"),
            "kl_k1": sums.mean("kl_k1"),
            "kl_k3": sums.mean("kl_k3"),
            "grad_norm": stats.grad_norm,
            "lr": stats.lr,
            "skipped": stats.skipped,
            "staleness": {str(age): ages[age] for age in sorted(ages)},
            "staleness_mean": sum(age * count for age, count in ages.items()) / max(1, tokens),
            "staleness_max": max(ages, default=0),
            "samples_spanning_versions": sum(group.spanning for group in groups),
            "idle_seconds": max(0.0, seconds - computed),
            "busy": [[round(start, 6), round(end, 6)] for start, end in busy],
            "step_seconds": seconds,
            "tokens_per_second": tokens / max(seconds, 1e-9),
        }


def group_frame(group: TrainGroup, *, epoch: int, step: int, version: int) -> dict[str, Any]:
    """The durable record of one trained group.

    `step` is the step it was trained in (from 1), `version` the version that update made; `staleness` is the greatest
    age of a token in steps, `mean_length` counts sampled tokens.
    """
    ages = group.staleness(step - 1)
    return {
        "gid": group.gid,
        "step": step,
        "epoch": epoch,
        "version": version,
        "rewards": list(group.rewards),
        "staleness": max(ages, default=0),
        "mean_length": group.tokens / max(1, len(group.samples)),
    }
