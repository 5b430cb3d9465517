"""OpenAI's `POST /v1/chat/completions`."""

from __future__ import annotations

import time
from collections.abc import Collection, Iterable, Sequence
from typing import Annotated, Any, Final, Literal

import msgspec
from typing_extensions import override

from streamrl.producers.episodes.endpoint import calls as shared
from streamrl.producers.episodes.messages import text_of
from streamrl.producers.episodes.rendering import Message, assistant
from streamrl.producers.episodes.session import SampledTurn

_OPTIONS: Final[shared.Options] = shared.HARMLESS | {"functions": ([],), "logit_bias": ({},), "modalities": (["text"],)}


class _Function(msgspec.Struct):
    name: str
    arguments: str = "{}"


class _Call(msgspec.Struct):
    id: str
    function: _Function


class _Message(msgspec.Struct):
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: shared.Content = None
    reasoning_content: str | None = None
    tool_calls: list[_Call] | None = None
    tool_call_id: str | None = None
    name: str | None = None


class _Tool(msgspec.Struct):
    function: shared.Function
    type: Literal["function"] = "function"


class _Body(shared.CallBody):
    messages: Annotated[list[_Message], msgspec.Meta(min_length=1)]
    tools: list[_Tool] | None = None
    tool_choice: Any = None
    parallel_tool_calls: bool | None = None
    max_tokens: shared.Tokens | None = None
    max_completion_tokens: shared.Tokens | None = None
    stream_options: dict[str, Any] | None = None
    n: Annotated[int, msgspec.Meta(ge=1, le=128)] | None = None
    stop: str | list[str] | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    response_format: dict[str, Any] | None = None


class ChatCompletions(shared.AgentApi):
    @override
    def read(self, body: bytes, ignored: Collection[str]) -> shared.AgentCall:
        asked = shared.read_call(body, _Body, _OPTIONS, ignored)
        shared.refuse("top_logprobs", bool(asked.top_logprobs), ignored, "only those of the sampled tokens are known")
        stop = shared.stop_texts("stop", asked.stop, ignored)
        schema = shared.json_schema(asked.response_format, ignored)
        return shared.AgentCall(
            [_message(message) for message in asked.messages],
            shared.schemas([tool.function for tool in asked.tools or ()], ignored),
            asked.model,
            asked.max_completion_tokens or asked.max_tokens,
            shared.most_calls(asked.tool_choice, ignored, asked.parallel_tool_calls),
            bool(asked.stream),
            bool((asked.stream_options or {}).get("include_usage")),
            asked.options(ignored, stop=stop, json_schema=schema),
            1 if "n" in ignored else asked.n or 1,
            bool(asked.logprobs) and "logprobs" not in ignored,
        )

    @override
    def answer(self, call: shared.AgentCall, turns: Sequence[SampledTurn], name: str) -> dict[str, Any]:
        prompt, sampled = turns[0].prompt_tokens, sum(len(turn.tokens) for turn in turns)
        return {
            "id": f"chatcmpl-{name}",
            "object": "chat.completion",
            "created": int(time.time()),
            "model": call.model,
            "choices": [_choice(index, turn) for index, turn in enumerate(turns)],
            "usage": {"prompt_tokens": prompt, "completion_tokens": sampled, "total_tokens": prompt + sampled},
            "streamrl": {"turn": turns[0].number},
        }

    @override
    def events(self, call: shared.AgentCall, answer: dict[str, Any]) -> Iterable[bytes]:
        base = {key: answer[key] for key in ("id", "created", "model", "streamrl")}
        base["object"] = "chat.completion.chunk"
        for choice in answer["choices"]:
            about = {"index": choice["index"], "finish_reason": None}
            message = dict(choice["message"])
            calls = [{"index": index, **tool_call} for index, tool_call in enumerate(message.pop("tool_calls", ()))]
            deltas = [{"role": message.pop("role")}, *({key: value} for key, value in message.items() if value)]
            deltas += [{"tool_calls": [tool_call]} for tool_call in calls]
            for delta in deltas:
                yield shared.event({**base, "choices": [{**about, "delta": delta}]})
            ended = {key: value for key, value in choice.items() if key != "message"}
            yield shared.event({**base, "choices": [{**ended, "delta": {}}]})
        if call.usage:
            yield shared.event({**base, "choices": [], "usage": answer["usage"]})
        yield b"data: [DONE]\n\n"


def _choice(index: int, turn: SampledTurn) -> dict[str, Any]:
    text, reasoning, calls = shared.said(turn)
    choice: dict[str, Any] = {"index": index, "message": assistant(text, calls, reasoning)}
    choice["finish_reason"] = "length" if turn.finish == "length" else "tool_calls" if calls else "stop"
    choice["streamrl"] = {"turn": turn.number}
    if turn.pieces:
        tokens = zip(turn.pieces, turn.logprobs.tolist(), strict=True)
        content = [{"token": piece, "logprob": logprob, "bytes": _bytes(piece)} for piece, logprob in tokens]
        choice["logprobs"] = {"content": [{**one, "top_logprobs": []} for one in content], "refusal": None}
    return choice


def _bytes(piece: str) -> list[int] | None:
    """Of a token; None if it is a part of a character."""
    return None if "\N{REPLACEMENT CHARACTER}" in piece else list(piece.encode())


def _message(given: _Message) -> Message:
    if given.role == "assistant":
        text = text_of(given.content)
        calls = [(call.id, call.function.name, call.function.arguments) for call in given.tool_calls or ()]
        return assistant(text, calls, given.reasoning_content or "")
    role = "system" if given.role == "developer" else given.role
    message: Message = {"role": role, "content": shared.content_of(given.content)}
    if given.role == "tool":
        message["tool_call_id"] = given.tool_call_id or ""
    if given.name:
        message["name"] = given.name
    return message
