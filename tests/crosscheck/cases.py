"""The same algorithm in the words of both: streamrl's loss, options and aggregation, and trl's configuration."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

LONGEST = 12
"""Most tokens of a response: `sampling.max_new_tokens` here, `max_completion_length` there."""
REWARDS = [1.0, 0.0, 0.25, None, 2.0, 2.0, -1.0, 0.5]
"""Of two groups; the fourth response has no score."""
CAP = 1.5
"""Of truncated importance sampling."""


@dataclass(frozen=True, kw_only=True)
class Case:
    """One comparison.

    Attributes:
        loss: name and options of ours.
        aggregate: how ours is aggregated.
        trl: arguments of `GRPOConfig`.
        inputs: optional inputs that trl gets: the old policy's log-probs, unless the step is on-policy; the capped
            ratio of the old policy to the one that sampled, which is the old one otherwise.
        kl: keys of `learner.kl`.
        entropy: coefficient of the bonus.
        correction: keys of `learner.correction`.
    """

    loss: tuple[str, dict[str, Any]]
    aggregate: str
    trl: dict[str, Any]
    inputs: tuple[str, ...] = ("old_per_token_logps",)
    kl: dict[str, Any] = field(default_factory=dict)
    entropy: float = 0.0
    correction: dict[str, Any] = field(default_factory=lambda: {"base": "uncorrected"})


CLIP = {"epsilon": 0.2, "epsilon_high": 0.28}
PPO = ("ppo", {"clip_low": 0.2, "clip_high": 0.28, "dual_clip": None})
GRPO = {"loss_type": "grpo", **CLIP}
DAPO = {"loss_type": "dapo", **CLIP}

CASES = {
    "grpo": Case(loss=PPO, aggregate="sequence_mean", trl=GRPO),
    "grpo, on-policy": Case(loss=PPO, aggregate="sequence_mean", trl=GRPO, inputs=()),
    "grpo, mean over tokens": Case(loss=PPO, aggregate="token_mean", trl=DAPO),
    "dr. grpo": Case(loss=PPO, aggregate="constant_length", trl={"loss_type": "dr_grpo", **CLIP}),
    "grpo, two-sided cap": Case(
        loss=("ppo", {"clip_low": 0.2, "clip_high": 0.28, "dual_clip": 1.5}),
        aggregate="sequence_mean",
        trl={**GRPO, "delta": 1.5},
    ),
    "gspo": Case(
        loss=("gspo", {"clip_low": 0.1, "clip_high": 0.15}),
        aggregate="sequence_mean",
        trl={"loss_type": "grpo", "importance_sampling_level": "sequence", "epsilon": 0.1, "epsilon_high": 0.15},
    ),
    "gspo, bounds of the paper": Case(
        loss=("gspo", {}),
        aggregate="sequence_mean",
        trl={"loss_type": "grpo", "importance_sampling_level": "sequence", "epsilon": 3e-4, "epsilon_high": 4e-4},
    ),
    "cispo": Case(
        loss=("cispo", {"cap": 1.3}), aggregate="token_mean", trl={"loss_type": "cispo", "epsilon_high": 1.3}
    ),
    "cispo, bound of ScaleRL": Case(
        loss=("cispo", {}), aggregate="token_mean", trl={"loss_type": "cispo", "epsilon_high": 5.0}
    ),
    "sapo": Case(loss=("sapo", {}), aggregate="sequence_mean", trl={"loss_type": "sapo"}),
    "sapo, other temperatures": Case(
        loss=("sapo", {"temperature_pos": 2.0, "temperature_neg": 3.0}),
        aggregate="sequence_mean",
        trl={"loss_type": "sapo", "sapo_temperature_pos": 2.0, "sapo_temperature_neg": 3.0},
    ),
    "vespo": Case(loss=("vespo", {}), aggregate="token_mean", trl={"loss_type": "vespo"}),
    "vespo, other shape": Case(
        loss=("vespo", {"k_pos": 1.0, "lambda_pos": 2.0, "k_neg": 2.0, "lambda_neg": 1.5}),
        aggregate="token_mean",
        trl={
            "loss_type": "vespo",
            "vespo_k_pos": 1.0,
            "vespo_lambda_pos": 2.0,
            "vespo_k_neg": 2.0,
            "vespo_lambda_neg": 1.5,
        },
    ),
    "kl in the loss": Case(
        loss=PPO,
        aggregate="token_mean",
        trl={**DAPO, "beta": 0.1, "use_bias_correction_kl": False},
        inputs=("old_per_token_logps", "ref_per_token_logps"),
        kl={"where": "loss", "coefficient": 0.1},
    ),
    "unbiased kl in the loss": Case(
        loss=PPO,
        aggregate="token_mean",
        trl={**DAPO, "beta": 0.1, "use_bias_correction_kl": True},
        inputs=("old_per_token_logps", "ref_per_token_logps"),
        kl={"where": "loss", "coefficient": 0.1, "unbiased": True},
        correction={"base": "bypass", "gates": []},
    ),
    "truncated importance sampling": Case(
        loss=PPO,
        aggregate="token_mean",
        trl={**DAPO, "beta": 0.1, "use_bias_correction_kl": False},
        inputs=("old_per_token_logps", "ref_per_token_logps", "importance_sampling_ratio"),
        kl={"where": "loss", "coefficient": 0.1},
        correction={"base": "decoupled", "gates": [{"use": "tis", "high": CAP}]},
    ),
    "off-policy sequence mask": Case(
        loss=PPO,
        aggregate="token_mean",
        trl={**DAPO, "off_policy_mask_threshold": 0.05},
        correction={"base": "bypass", "gates": [{"use": "opsm", "level": "geometric", "low": math.exp(-0.05)}]},
    ),
    "entropy bonus": Case(loss=PPO, aggregate="token_mean", trl={**DAPO, "entropy_coef": 0.05}, entropy=0.05),
}
