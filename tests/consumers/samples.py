"""Messages as the feeder and the rollout replicas write them."""

from __future__ import annotations

from typing import Any

from streamrl import wire
from streamrl.consumers import RewardSample


def prompt(answer: Any = "4", text: str = "2 + 2 =", **fields: Any) -> wire.Prompt:
    return wire.Prompt(tokens=wire.pack_int32([1, 2, 3]), text=text, answer=answer, line=7, **fields)


def response(text: str = "4", finish: str = "stop", tokens: int = 3) -> wire.Sample:
    return wire.Sample(
        tokens=wire.pack_int32(range(tokens)),
        logprobs=wire.pack_float32([-0.5] * tokens),
        runs=[(0, 1)] if tokens else [],
        finish=finish,  # type: ignore[arg-type]
        text=text,
    )


def seen(text: str = "4", answer: Any = "4", finish: str = "stop", **fields: Any) -> RewardSample:
    return RewardSample.of(prompt(answer, **fields), response(text, finish))
