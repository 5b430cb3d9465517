"""OpenAI's `POST /v1/responses`; nothing is stored, so `previous_response_id` is refused. Options are as in chat."""

from __future__ import annotations

import time
from collections.abc import Collection, Iterable, Iterator, Sequence
from itertools import groupby
from typing import Any, Final, Literal

import msgspec
from typing_extensions import override

from streamrl.producers.episodes.endpoint import calls as shared
from streamrl.producers.episodes.messages import text_of
from streamrl.producers.episodes.rendering import Message, assistant
from streamrl.producers.episodes.session import SampledTurn

_SPOKEN: Final = ("message", "function_call", "reasoning")
_OPTIONS: Final[shared.Options] = {
    **shared.HARMLESS,
    "background": (False,),
    "include": ([], ["reasoning.encrypted_content"]),
    "stream_options": None,
    "top_logprobs": (0,),
    "truncation": ("disabled",),
}


class _Item(msgspec.Struct):
    type: Literal["message", "function_call", "function_call_output", "reasoning"] = "message"
    role: Literal["system", "developer", "user", "assistant"] = "user"
    content: shared.Content = None
    call_id: str = ""
    name: str = ""
    arguments: str = "{}"
    output: shared.Content = None

    @property
    def spoken(self) -> bool:
        return self.type in _SPOKEN and (self.type != "message" or self.role == "assistant")


class _Text(msgspec.Struct, forbid_unknown_fields=True):
    format: dict[str, Any] | None = None
    verbosity: Literal["low", "medium", "high"] | None = None


class _Body(shared.CallBody):
    input: str | list[_Item]
    instructions: str | None = None
    tools: list[shared.Function] | None = None
    tool_choice: Any = None
    parallel_tool_calls: bool | None = None
    max_output_tokens: shared.Tokens | None = None
    text: _Text | None = None


class Responses(shared.AgentApi):
    @override
    def read(self, body: bytes, ignored: Collection[str]) -> shared.AgentCall:
        asked = shared.read_call(body, _Body, _OPTIONS, ignored)
        items = [_Item(content=asked.input)] if isinstance(asked.input, str) else asked.input
        opening: list[Message] = [{"role": "system", "content": asked.instructions}] if asked.instructions else []
        messages = opening + _messages(items)
        if not messages:
            raise shared.CallRefused(400, "`input` is empty")
        text = asked.text or _Text()
        shared.refuse("text.verbosity", text.verbosity not in (None, "medium"), ignored)
        return shared.AgentCall(
            messages,
            shared.schemas(asked.tools, ignored),
            asked.model,
            asked.max_output_tokens,
            shared.most_calls(asked.tool_choice, ignored, asked.parallel_tool_calls),
            bool(asked.stream),
            options=asked.options(ignored, json_schema=shared.json_schema(text.format, ignored)),
        )

    @override
    def answer(self, call: shared.AgentCall, turns: Sequence[SampledTurn], name: str) -> dict[str, Any]:
        (turn,) = turns
        text, reasoning, calls = shared.said(turn)
        cut = turn.finish == "length"
        status = "incomplete" if cut else "completed"
        output: list[dict[str, Any]] = []
        if reasoning:
            thought = {"type": "reasoning_text", "text": reasoning}
            output.append({"id": f"rs_{name}", "type": "reasoning", "summary": [], "content": [thought]})
        if text or not calls:
            spoken = {"type": "output_text", "text": text, "annotations": []}
            about = {"type": "message", "role": "assistant", "status": status}
            output.append({"id": f"msg_{name}", **about, "content": [spoken]})
        for index, (call_id, function, arguments) in enumerate(calls):
            asked = {"call_id": call_id, "name": function, "arguments": arguments, "status": "completed"}
            output.append({"id": f"fc_{name}_{index}", "type": "function_call", **asked})
        return {
            "id": f"resp_{name}",
            "object": "response",
            "created_at": int(time.time()),
            "model": call.model,
            "status": status,
            "error": None,
            "incomplete_details": {"reason": "max_output_tokens"} if cut else None,
            "instructions": None,
            "metadata": {},
            "output": output,
            "parallel_tool_calls": call.most_calls is None,
            "tool_choice": "auto",
            "tools": [],
            "usage": {
                "input_tokens": turn.prompt_tokens,
                "input_tokens_details": {"cached_tokens": 0},
                "output_tokens": len(turn.tokens),
                "output_tokens_details": {"reasoning_tokens": 0},
                "total_tokens": turn.prompt_tokens + len(turn.tokens),
            },
            "streamrl": {"turn": turn.number},
        }

    @override
    def events(self, call: shared.AgentCall, answer: dict[str, Any]) -> Iterable[bytes]:
        begun = {**answer, "status": "in_progress", "output": [], "usage": None, "incomplete_details": None}
        told: list[tuple[str, dict[str, Any]]] = [("created", {"response": begun})]
        for index, item in enumerate(answer["output"]):
            told += _item_events(index, item)
        told.append((answer["status"], {"response": answer}))
        for number, (name, data) in enumerate(told):
            kind = f"response.{name}"
            yield shared.event({"type": kind, "sequence_number": number, **data}, kind)


def _messages(items: Sequence[_Item]) -> list[Message]:
    messages: list[Message] = []
    for spoken, group in groupby(items, lambda item: item.spoken):
        if spoken:  # all that the model said in a row was one reply
            messages.append(_reply(list(group)))
            continue
        for item in group:
            if item.type == "function_call_output":
                messages.append(
                    {"role": "tool", "tool_call_id": item.call_id, "content": shared.content_of(item.output)}
                )
            else:
                role = "system" if item.role == "developer" else item.role
                messages.append({"role": role, "content": shared.content_of(item.content)})
    return messages


def _reply(items: Sequence[_Item]) -> Message:
    texts = {kind: "".join(_text(item) for item in items if item.type == kind) for kind in _SPOKEN}
    calls = [(item.call_id, item.name, item.arguments) for item in items if item.type == "function_call"]
    return assistant(texts["message"], calls, texts["reasoning"])


def _text(item: _Item) -> str:
    if item.type == "reasoning" and isinstance(item.content, list):
        return "".join(str(part.get("text", "")) for part in item.content)
    return text_of(item.content)


def _item_events(index: int, item: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    at = {"output_index": index, "item_id": item["id"]}
    if item["type"] == "function_call":
        yield "output_item.added", {"output_index": index, "item": {**item, "arguments": "", "status": "in_progress"}}
        yield "function_call_arguments.delta", {**at, "delta": item["arguments"]}
        yield "function_call_arguments.done", {**at, "name": item["name"], "arguments": item["arguments"]}
    else:
        begun = {**item, "content": []} | ({"status": "in_progress"} if "status" in item else {})
        yield "output_item.added", {"output_index": index, "item": begun}
        kind = "output_text" if item["type"] == "message" else "reasoning_text"
        extra: dict[str, Any] = {"logprobs": []} if item["type"] == "message" else {}
        for number, part in enumerate(item["content"]):
            here = {**at, "content_index": number}
            yield "content_part.added", {**here, "part": {**part, "text": ""}}
            yield f"{kind}.delta", {**here, **extra, "delta": part["text"]}
            yield f"{kind}.done", {**here, **extra, "text": part["text"]}
            yield "content_part.done", {**here, "part": part}
    yield "output_item.done", {"output_index": index, "item": item}
