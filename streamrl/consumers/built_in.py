"""The names of the rewards that come along. Each is imported when a run names it, so nobody pays for the others."""

from __future__ import annotations

from typing import Final

BUILT_IN: Final[dict[str, str]] = {
    "exact_match": "streamrl.consumers.rules:ExactMatch",
    "number_match": "streamrl.consumers.rules:NumberMatch",
    "gateway": "streamrl.consumers.gateway.reward:GatewayReward",
}
