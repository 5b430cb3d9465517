"""From the values of all rewards to the one score of a response. Pure functions.

```
value of a reward -> normalise -> clip -> gate                             a closed gate: the value is scoring.gated
                                       -> sum, product or min of the rewards without a gate -> clip of the score
                                                                                   -> + penalty of a long response
```
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from streamrl import wire
from streamrl.config.rewards import Bounds, Normalisation, OverlongConfig, ScoringConfig
from streamrl.consumers.plugins import LoadedReward
from streamrl.consumers.reward import Score, finite

OVERLONG = "overlong"
"""Part of a score: the penalty of a long response."""


class Composition:
    def __init__(self, rewards: Sequence[LoadedReward], scoring: ScoringConfig, longest: int | None = None) -> None:
        self._rewards = tuple(rewards)
        self._scoring = scoring
        self._longest = longest

    def passes(self, reward: LoadedReward, score: Score) -> bool:
        gate = reward.spec.gate
        return gate is None or shaped(reward, score.value) >= gate

    def score(self, scores: Mapping[str, Score], tokens: int) -> wire.SampleScore:
        """Combine values; `ValueError` or `ArithmeticError` if the result is not finite.

        `scores` are by name of the reward, without the rewards behind a closed gate. The score has a part for each
        reward and its parts as `name/part`. A normalised or clipped reward also has `name/raw`, a gate `name/passed`
        (1 or 0), and `overlong` is the penalty.
        """
        parts: dict[str, float] = {}
        values: list[tuple[str, float, float]] = []
        passed = True
        for reward in self._rewards:
            score = scores.get(reward.name)
            if score is None:
                continue
            value = shaped(reward, score.value)
            parts[reward.name] = value
            if reward.spec.normalise is not None or reward.spec.clip is not None:
                parts[f"{reward.name}/raw"] = score.value
            if reward.spec.gate is not None:
                passed = value >= reward.spec.gate
                parts[f"{reward.name}/passed"] = float(passed)
            elif reward.spec.weight:
                values.append((reward.name, value, reward.spec.weight))
            parts.update({f"{reward.name}/{name}": part for name, part in score.parts.items()})
        value = self._combined(values) if passed else self._scoring.gated
        if self._scoring.overlong is not None and self._longest is not None:
            parts[OVERLONG] = overlong_penalty(tokens, self._longest, self._scoring.overlong)
            value += parts[OVERLONG]
        detail = "\n".join(f"{name}: {score.detail}" for name, score in scores.items() if score.detail)
        return wire.SampleScore(value=finite(value, "the whole"), parts=parts, detail=detail)

    def _combined(self, values: Sequence[tuple[str, float, float]]) -> float:
        match self._scoring.combine:
            case "sum":
                value = finite(sum(weight * part for _, part, weight in values), "the weighted sum")
            case "product":
                value = finite(math.prod(power(*part) for part in values), "the product")
            case "min":
                value = min(part for _, part, _ in values)
        return value if self._scoring.clip is None else clipped(value, self._scoring.clip)


def shaped(reward: LoadedReward, value: float) -> float:
    if reward.spec.normalise is not None:
        value = normalised(value, reward.spec.normalise)
    return value if reward.spec.clip is None else clipped(value, reward.spec.clip)


def normalised(value: float, how: Normalisation) -> float:
    value = finite((value - how.mean) / how.std, "the normalised value")
    match how.squash:
        case "sigmoid":
            return 0.5 * (1 + math.tanh(value / 2))  # 1 / (1 + exp(-value)) would overflow
        case "tanh":
            return math.tanh(value)
        case "none":
            return value


def clipped(value: float, bounds: Bounds) -> float:
    return min(max(value, bounds[0]), bounds[1])


def power(name: str, value: float, weight: float) -> float:
    """`value ** weight`; `ValueError` if that is not a real number."""
    if (value < 0 and not weight.is_integer()) or (value == 0 and weight < 0):
        raise ValueError(f"{name} is {value:g}, which has no power {weight:g} (its weight in a product)")
    return float(value**weight)


def overlong_penalty(tokens: int, longest: int, config: OverlongConfig) -> float:
    """The soft penalty of DAPO (arXiv:2503.14476, equation 13) of a response of so many tokens, 0 to `-penalty`."""
    over = tokens - (longest - config.buffer)
    return -config.penalty * clipped(over / config.buffer, (0, 1)) if over > 0 else 0.0
