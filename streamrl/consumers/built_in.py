"""The names of the rewards that come along. Each is imported when a run names it, so nobody pays for the others."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

from streamrl.config import RewardModelConfig, RewardSpec

BUILT_IN: Final[dict[str, str]] = {
    "exact_match": "streamrl.consumers.rules.match:ExactMatch",
    "number_match": "streamrl.consumers.rules.match:NumberMatch",
    "math": "streamrl.consumers.rules.math_answer:MathAnswer",
    "regex": "streamrl.consumers.rules.regex:Regex",
    "json_schema": "streamrl.consumers.rules.json_schema:JsonSchema",
    "format": "streamrl.consumers.rules.format:Format",
    "length": "streamrl.consumers.rules.length:Length",
    "repetition": "streamrl.consumers.rules.repetition:Repetition",
    "code": "streamrl.consumers.rules.code:Code",
    "reward_model": "streamrl.consumers.models.reward:RewardModel",
    "judge": "streamrl.consumers.judge.reward:Judge",
    "gateway": "streamrl.consumers.gateway.reward:GatewayReward",
}
ASKING: Final = frozenset({"reward_model", "judge"})
"""Those that ask a model: `args.model` is its name in `reward_models`."""


def models_asked(
    rewards: Sequence[RewardSpec], models: Mapping[str, RewardModelConfig]
) -> Mapping[str, RewardModelConfig]:
    """The models that some rewards may ask: all, where one of them did not come along, or names no model."""
    named = {str(spec.args.get("model")) for spec in rewards if spec.use in ASKING}
    if not all(spec.use in BUILT_IN for spec in rewards) or not named <= models.keys():
        return models
    return {name: model for name, model in models.items() if name in named}
