"""Messages as the feeder and the rollout replicas write them."""

from __future__ import annotations

from typing import Any

from streamrl import wire
from streamrl.consumers import RewardSample, make_sample


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


def episode(**fields: Any) -> RewardSample:
    """An episode that called a tool. Its last turn says nothing of the tool."""
    call = {"id": "1", "type": "function", "function": {"name": "run", "arguments": '{"code": "2+2"}'}}
    said = [
        {"role": "assistant", "content": "Let me see.", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "1", "content": "4"},
        {"role": "assistant", "content": "It is 4."},
    ]
    return make_sample("It is 4.", prompt="2+2=", answer="4", completion=said, **fields)
