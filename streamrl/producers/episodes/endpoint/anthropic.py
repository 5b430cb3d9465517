"""Anthropic's `POST /v1/messages`, as far as an agent with tools needs it. What is ignored or refused: as in chat."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import Annotated, Any, ClassVar, Final, Literal

import msgspec
import orjson
from typing_extensions import override

from streamrl.producers.episodes.endpoint import calls as shared
from streamrl.producers.episodes.messages import text_of
from streamrl.producers.episodes.rendering import Message, assistant
from streamrl.producers.episodes.session import SampledTurn

_RAW: Final = "malformed_arguments"
_OPTIONS: Final[shared.Options] = {
    **shared.HARMLESS,
    "cache_control": None,
    "mcp_servers": ([],),
    "thinking": ({"type": "disabled"},),
}


class _Message(msgspec.Struct):
    role: Literal["user", "assistant"]
    content: shared.Content


class _Tool(shared.Function):
    parameters: dict[str, Any] | None = msgspec.field(default=None, name="input_schema")


class _Body(shared.CallBody):
    messages: Annotated[list[_Message], msgspec.Meta(min_length=1)]
    system: shared.Content = None
    tools: list[_Tool] | None = None
    tool_choice: dict[str, Any] | None = None
    max_tokens: shared.Tokens | None = None
    stop_sequences: list[str] | None = None


class AnthropicMessages(shared.AgentApi):
    ping: ClassVar[bytes] = shared.event({"type": "ping"}, "ping")

    @override
    def read(self, body: bytes, ignored: Collection[str]) -> shared.AgentCall:
        asked = shared.read_call(body, _Body, _OPTIONS, ignored)
        shared.refuse("prefill", asked.messages[-1].role == "assistant", ignored)
        messages: list[Message] = [{"role": "system", "content": text_of(asked.system)}] if asked.system else []
        for message in asked.messages:
            given = message.content
            parts = given if isinstance(given, list) else [{"type": "text", "text": given or ""}]
            messages += [_spoken(parts)] if message.role == "assistant" else _answers(parts)
        choice = asked.tool_choice or {}
        return shared.AgentCall(
            messages,
            shared.schemas(asked.tools, ignored, "custom"),
            asked.model,
            asked.max_tokens,
            shared.most_calls(choice.get("type"), ignored, not choice.get("disable_parallel_tool_use")),
            bool(asked.stream),
            options=asked.options(ignored, stop=shared.stop_texts("stop_sequences", asked.stop_sequences, ignored)),
        )

    @override
    def answer(self, call: shared.AgentCall, turns: Sequence[SampledTurn], name: str) -> dict[str, Any]:
        (turn,) = turns
        text, reasoning, calls = shared.said(turn)
        content: list[dict[str, Any]] = []
        if reasoning:
            content.append({"type": "thinking", "thinking": reasoning, "signature": ""})
        if text or not calls:
            content.append({"type": "text", "text": text})
        for call_id, function, arguments in calls:
            content.append({"type": "tool_use", "id": call_id, "name": function, "input": _object(arguments)})
        reason = "tool_use" if calls else "stop_sequence" if turn.stopped else "end_turn"
        reason = "max_tokens" if turn.finish == "length" else reason
        return {
            "id": f"msg_{name}",
            "type": "message",
            "role": "assistant",
            "model": call.model,
            "content": content,
            "stop_reason": reason,
            "stop_sequence": turn.stopped if reason == "stop_sequence" else None,
            "usage": {"input_tokens": turn.prompt_tokens, "output_tokens": len(turn.tokens)},
            "streamrl": {"turn": turn.number},
        }

    @override
    def events(self, call: shared.AgentCall, answer: dict[str, Any]) -> Iterable[bytes]:
        begun = {**answer, "content": [], "stop_reason": None, "stop_sequence": None}
        told: list[dict[str, Any]] = [{"type": "message_start", "message": begun}]
        for index, block in enumerate(answer["content"]):
            told += _block_events(index, block)
        ended = {name: answer[name] for name in ("stop_reason", "stop_sequence")}
        told += [{"type": "message_delta", "delta": ended, "usage": answer["usage"]}, {"type": "message_stop"}]
        return (shared.event(data, data["type"]) for data in told)

    @override
    def error(self, refused: shared.CallRefused) -> dict[str, Any]:
        kind = {401: "authentication_error", 413: "request_too_large"}.get(refused.status)
        kind = kind or ("api_error" if refused.status >= 500 else "invalid_request_error")
        # Agents that compact look for these words.
        message = f"prompt is too long: {refused.message}" if refused.code == shared.OVERFLOW else refused.message
        return {"type": "error", "error": {"type": kind, "message": message}}


def _spoken(content: list[dict[str, Any]]) -> Message:
    calls = [
        (str(part.get("id", "")), str(part.get("name", "")), _arguments(part.get("input")))
        for part in content
        if part.get("type") == "tool_use"
    ]
    reasoning = "".join(str(part.get("thinking", "")) for part in content if part.get("type") == "thinking")
    others = [part for part in content if part.get("type") not in ("tool_use", "thinking")]
    return assistant(text_of(others), calls, reasoning)


def _answers(content: list[dict[str, Any]]) -> list[Message]:
    """A message of the user: the results of tools in it come first, each as a message of its own."""
    results: list[Message] = [
        {
            "role": "tool",
            "tool_call_id": str(part.get("tool_use_id", "")),
            "content": shared.content_of(part.get("content")),
        }
        for part in content
        if part.get("type") == "tool_result"
    ]
    others = [part for part in content if part.get("type") != "tool_result"]
    return [*results, {"role": "user", "content": shared.content_of(others)}] if others else results


def _arguments(given: Any) -> str:
    """JSON arguments; those that were malformed go back as they were written."""
    if isinstance(given, dict) and given.keys() == {_RAW}:
        return str(given[_RAW])
    return orjson.dumps(given or {}).decode()


def _object(arguments: str) -> dict[str, Any]:
    """The arguments as an object, which this API wants: malformed ones stand in it as text."""
    try:
        read = orjson.loads(arguments)
    except orjson.JSONDecodeError:
        read = None
    return read if isinstance(read, dict) else {_RAW: arguments}


def _block_events(index: int, block: dict[str, Any]) -> Iterator[dict[str, Any]]:
    if block["type"] == "tool_use":
        begun: dict[str, Any] = {**block, "input": {}}
        delta = {"type": "input_json_delta", "partial_json": orjson.dumps(block["input"]).decode()}
    else:
        name = block["type"]  # text or thinking
        begun, delta = {**block, name: ""}, {"type": f"{name}_delta", name: block[name]}
    yield {"type": "content_block_start", "index": index, "content_block": begun}
    yield {"type": "content_block_delta", "index": index, "delta": delta}
    yield {"type": "content_block_stop", "index": index}
