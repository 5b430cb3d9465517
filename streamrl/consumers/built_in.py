"""The names of the rewards that come along. Each is imported when a run names it, so nobody pays for the others."""

from __future__ import annotations

from typing import Final

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
