"""OpenAI's `POST /v1/chat/completions`.

How tokens are sampled belongs to the run. `tool_choice` is not enforced, except that with `none` calls of tools are not
read: they stay text. Of several calls `parallel_tool_calls: false` gives the first.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Iterable
from typing import Annotated, Any, Final, Literal

import msgspec
from typing_extensions import override

from streamrl.producers.episodes.endpoint.calls import (
    IGNORED,
    MODEL,
    AgentApi,
    AgentCall,
    Content,
    Options,
    Tokens,
    assistant,
    event,
    function_schema,
    read_call,
    refuse,
    said,
)
from streamrl.producers.episodes.messages import text_of
from streamrl.producers.episodes.rendering import Message
from streamrl.producers.episodes.session import SampledTurn

_OPTIONS: Final[Options] = {
    **IGNORED,
    "functions": ([],),
    "logit_bias": ({},),
    "logprobs": (False,),
    "modalities": (["text"],),
    "n": (1,),
    "response_format": ({"type": "text"},),
    "stop": ([], ""),
    "top_logprobs": (0,),
}


class _Function(msgspec.Struct):
    name: str
    arguments: str = "{}"


class _Call(msgspec.Struct):
    id: str
    function: _Function


class _Message(msgspec.Struct):
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Content = None
    reasoning_content: str | None = None
    tool_calls: list[_Call] | None = None
    tool_call_id: str | None = None
    name: str | None = None


class _Schema(msgspec.Struct):
    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class _Tool(msgspec.Struct):
    function: _Schema
    type: Literal["function"] = "function"


class _Body(msgspec.Struct):
    messages: Annotated[list[_Message], msgspec.Meta(min_length=1)]
    model: str = MODEL
    tools: list[_Tool] | None = None
    tool_choice: Any = None
    parallel_tool_calls: bool | None = None
    max_tokens: Tokens | None = None
    max_completion_tokens: Tokens | None = None
    stream: bool | None = None
    stream_options: dict[str, Any] | None = None


class ChatCompletions(AgentApi):
    @override
    def read(self, body: bytes, ignored: Collection[str]) -> AgentCall:
        asked = read_call(body, _Body, _OPTIONS, ignored)
        functions = [tool.function for tool in asked.tools or ()]
        refuse("strict", any(function.strict for function in functions), ignored)
        return AgentCall(
            [_message(message) for message in asked.messages],
            [function_schema(each.name, each.description, each.parameters) for each in functions],
            asked.model,
            asked.max_completion_tokens or asked.max_tokens,
            0 if asked.tool_choice == "none" else 1 if asked.parallel_tool_calls is False else None,
            bool(asked.stream),
            bool((asked.stream_options or {}).get("include_usage")),
        )

    @override
    def answer(self, call: AgentCall, turn: SampledTurn, name: str) -> dict[str, Any]:
        text, reasoning, calls = said(turn)
        finish = "length" if turn.finish == "length" else "tool_calls" if calls else "stop"
        return {
            "id": f"chatcmpl-{name}",
            "object": "chat.completion",
            "created": int(time.time()),
            "model": call.model,
            "choices": [{"index": 0, "message": assistant(text, calls, reasoning), "finish_reason": finish}],
            "usage": {
                "prompt_tokens": turn.prompt_tokens,
                "completion_tokens": len(turn.tokens),
                "total_tokens": turn.prompt_tokens + len(turn.tokens),
            },
            "streamrl": {"turn": turn.number},
        }

    @override
    def events(self, call: AgentCall, answer: dict[str, Any]) -> Iterable[bytes]:
        base = {key: answer[key] for key in ("id", "created", "model", "streamrl")}
        base["object"] = "chat.completion.chunk"
        choice = answer["choices"][0]
        message = dict(choice["message"])
        calls = [{"index": index, **tool_call} for index, tool_call in enumerate(message.pop("tool_calls", ()))]
        deltas = [{"role": message.pop("role")}, *({key: value} for key, value in message.items() if value)]
        deltas += [{"tool_calls": [tool_call]} for tool_call in calls]
        for delta in deltas:
            yield event({**base, "choices": [{"index": 0, "delta": delta, "finish_reason": None}]})
        yield event({**base, "choices": [{"index": 0, "delta": {}, "finish_reason": choice["finish_reason"]}]})
        if call.usage:
            yield event({**base, "choices": [], "usage": answer["usage"]})
        yield b"data: [DONE]\n\n"


def _message(given: _Message) -> Message:
    text = text_of(given.content)
    if given.role == "assistant":
        calls = [(call.id, call.function.name, call.function.arguments) for call in given.tool_calls or ()]
        return assistant(text, calls, given.reasoning_content or "")
    message: Message = {"role": "system" if given.role == "developer" else given.role, "content": text}
    if given.role == "tool":
        message["tool_call_id"] = given.tool_call_id or ""
    if given.name:
        message["name"] = given.name
    return message
