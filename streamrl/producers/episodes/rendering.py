"""Chat messages to the ids that a policy reads, and the ids that it sampled back to a message.

Sampled ids are never tokenized again: `ChatRenderer.extend` gives only the ids that new messages add after them. What
cannot be extended (`None`) is rendered as a whole by the caller, who records that as a fork.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol, TypeAlias

Message: TypeAlias = dict[str, Any]
"""An OpenAI chat message: `role`, `content`, and where they apply `tool_calls`, `tool_call_id`, `name`,
`reasoning_content`."""
ToolSchema: TypeAlias = dict[str, Any]
"""An OpenAI function: `{"type": "function", "function": {"name": …, "description": …, "parameters": …}}`."""
Ids: TypeAlias = Sequence[int]
Messages: TypeAlias = Sequence[Mapping[str, Any]]
Tools: TypeAlias = Sequence[ToolSchema] | None
CallStatus: TypeAlias = Literal["ok", "malformed"]


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A call that the policy wrote; `raw` is its text as sampled.

    Of a `malformed` call the `name` is what could be read of it, its `arguments` are empty, and a tool error answers.
    """

    id: str
    name: str
    arguments: dict[str, Any]
    status: CallStatus
    raw: str

    @property
    def arguments_text(self) -> str:
        """The arguments as OpenAI clients want them; the text as sampled when they are malformed."""
        return self.raw if self.status == "malformed" else json.dumps(self.arguments, ensure_ascii=False)


@dataclass(frozen=True, slots=True)
class Reply:
    """A sampled turn in parts: `content` and `reasoning` are without their marks, and without the calls."""

    content: str
    reasoning: str = ""
    calls: tuple[ToolCall, ...] = ()

    @property
    def message(self) -> Message:
        """The turn as an OpenAI assistant message; malformed calls are in it, so that a tool message can answer."""
        calls = [(call.id, call.name, call.arguments_text) for call in self.calls]
        return assistant(self.content, calls, self.reasoning)


def assistant(text: str, calls: Iterable[tuple[str, str, str]], reasoning: str = "") -> Message:
    """An assistant message; `calls` are id, name and JSON arguments."""
    message: Message = {"role": "assistant", "content": text}
    if reasoning:
        message["reasoning_content"] = reasoning
    if called := [{"id": each, "type": "function", "function": {"name": n, "arguments": a}} for each, n, a in calls]:
        message["tool_calls"] = called
    return message


class ChatRenderer(Protocol):
    """Chats of one model. All methods are pure; `stops` are the ids that end a turn of the policy."""

    stops: frozenset[int]

    def render(self, messages: Messages, tools: Tools = None) -> list[int]:
        """The ids of a whole chat, with what opens the next turn at the end. DataError: the messages are refused."""
        ...

    def extend(self, messages: Messages, tools: Tools, ids: Ids, new: Messages, *, sampled: int) -> list[int] | None:
        """Only the ids to append to `ids` for the messages `new`; None: that changes what stands before them (a fork).

        The last `sampled` of `ids` are of the last message. If its length was cut, the result begins with its end.
        """
        ...

    def parse(self, ids: Ids, tools: Tools = None, *, prompt: Ids = ()) -> Reply:
        """A sampled turn in parts; never fails. Without `tools` calls stay text. The `prompt` may open the thinking."""
        ...
