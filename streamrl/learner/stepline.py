"""One JSON line per step: what the learner did and who waited for whom."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from streamrl.learner.groups import TrainGroup
from streamrl.learner.results import CriticStats, StepStats


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
        stats: StepStats,
        step: int,
        busy: Sequence[tuple[float, float]],
        read: Sequence[int],
    ) -> dict[str, Any]:
        """Close the step and describe it (docs/reference/metrics.md).

        Args:
            groups: of the step.
            stats: of its updates.
            step: its number, from 1.
            busy: intervals of computing since the last line, pairs of `time.monotonic()`.
            read: lengths of the responses that were read since the last line, trained or not.
        """
        now = time.monotonic()
        seconds, self._since = now - self._since, now
        computed = sum(end - start for start, end in busy)
        self._computed += computed
        tokens = sum(group.tokens for group in groups)
        return {
            **_groups(groups, step),
            **_learnt(stats),
            "length_read": float(np.mean(read)) if read else None,
            "lengths_read": histogram(read),
            "idle_seconds": max(0.0, seconds - computed),
            "busy": [[round(start, 6), round(end, 6)] for start, end in busy],
            "step_seconds": seconds,
            "tokens_per_second": tokens / max(seconds, 1e-9),
        }


def _groups(groups: Sequence[TrainGroup], step: int) -> dict[str, Any]:
    """What the groups of a step were."""
    tokens = sum(group.tokens for group in groups)
    rewards = np.asarray([reward for group in groups for reward in group.rewards])
    lengths = [len(sample.tokens) for group in groups for sample in group.samples]
    ages: Counter[int] = sum((group.staleness(step - 1) for group in groups), Counter())
    return {
        "reward_mean": float(rewards.mean()),
        "reward_std": float(rewards.std()),
        "groups": len(groups),
        "zero_advantage_groups": sum(group.flat for group in groups),
        "zero_variance_groups": sum(group.zero_variance for group in groups),
        "tokens": tokens,
        "prompt_tokens": sum(group.prompt_tokens for group in groups),
        "length_trained": float(np.mean(lengths)),
        "lengths_trained": histogram(lengths),
        "staleness": {str(age): ages[age] for age in sorted(ages)},
        "staleness_mean": sum(age * count for age, count in ages.items()) / max(1, tokens),
        "staleness_max": max(ages, default=0),
        "samples_spanning_versions": sum(group.spanning for group in groups),
    }


def _learnt(stats: StepStats) -> dict[str, Any]:
    """What the updates of a step did."""
    sums = stats.trained
    return {
        "loss": stats.loss,
        "updates": stats.updates,
        "ess": sums.ess,
        "response_ess": sums.response_ess,
        "mean_squared_log_ratio": sums.mean("squared_log_ratio"),
        "clip_fraction": sums.mean("clipped"),
        "capped_fraction": sums.mean("capped"),
        "masked_fraction": sums.mean("masked"),
        "masked_by_staleness": sums.masked_by_age,
        "kl_k1": sums.mean("kl_k1"),
        "kl_k3": sums.mean("kl_k3"),
        "kl_reference": sums.mean("kl_reference"),
        "kl_coefficient": stats.kl_coefficient,
        "entropy": sums.mean("entropy"),
        "grad_norm": stats.grad_norm,
        "lr": stats.lr,
        "skipped": stats.skipped,
        **(_criticised(stats.critic) if stats.critic else {}),
    }


def _criticised(critic: Sequence[CriticStats]) -> dict[str, Any]:
    """What the updates of the critic did; means over the updates."""

    def mean(values: Iterable[float]) -> float:
        return sum(values) / len(critic)

    return {
        "critic_loss": mean(stats.sums.mean("loss") for stats in critic),
        "critic_clip_fraction": mean(stats.sums.mean("clipped") for stats in critic),
        "critic_explained_variance": mean(stats.sums.explained_variance for stats in critic),
        "critic_value": mean(stats.sums.mean("values") for stats in critic),
        "critic_return": mean(stats.sums.mean("returns") for stats in critic),
        "critic_grad_norm": mean(stats.grad_norm for stats in critic),
        "critic_lr": mean(stats.lr for stats in critic),
    }


def histogram(lengths: Sequence[int]) -> dict[str, int]:
    """Responses by length: the upper end of the bucket, a power of two, and how many are in it."""
    counts = Counter(1 << max(0, length - 1).bit_length() for length in lengths)
    return {str(bound): counts[bound] for bound in sorted(counts)}


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
