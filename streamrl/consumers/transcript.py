"""What was said in a sample, as text."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import orjson

from streamrl.consumers.reward import RewardSample
from streamrl.images.encoded import is_shown


def transcript(sample: RewardSample, fence: str = "") -> str:
    """All that was said from the first reply on; of a single reply, its text.

    Calls and results of tools stand between the tags that most models are trained with, `<tool_call>` and
    `<tool_response>`. With a `fence` each message stands between tags that hold it, so that none can pose as another.
    """
    said = sample.completion
    if len(said) == 1:
        return sample.text
    if fence:
        return "\n".join(f"<{one['role']}-{fence}>\n{_text(one)}\n</{one['role']}-{fence}>" for one in said)
    return "\n".join(_tagged("tool_response", _text(one)) if one["role"] == "tool" else _text(one) for one in said)


def _text(message: Mapping[str, Any]) -> str:
    thinking = message.get("reasoning_content")
    calls = [call.get("function") or {} for call in message.get("tool_calls") or ()]
    content = message.get("content")
    pieces = [
        _tagged("think", str(thinking)) if thinking else "",
        _content(content) if content else "",
        *(_tagged("tool_call", _call(function)) for function in calls),
    ]
    return "\n".join(piece for piece in pieces if piece)


def _content(content: Any) -> str:
    if isinstance(content, list):
        return "".join("[image]" if is_shown(part) else _content(_said(part)) for part in content)
    return content if isinstance(content, str) else orjson.dumps(content).decode()


def _said(part: Any) -> Any:
    return part.get("text", part) if isinstance(part, Mapping) else part


def _call(function: Mapping[str, Any]) -> str:
    arguments = function.get("arguments")
    text = arguments if isinstance(arguments, str) else orjson.dumps(arguments).decode()
    return f'{{"name": {orjson.dumps(function.get("name")).decode()}, "arguments": {text}}}'


def _tagged(tag: str, text: str) -> str:
    return f"<{tag}>\n{text}\n</{tag}>"
