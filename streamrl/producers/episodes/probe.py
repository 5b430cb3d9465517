"""Three turns that show what a template does: a call with `false`, thinking, a second question."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any, Final

from streamrl.errors import DataError
from streamrl.producers.episodes.rendering import ChatRenderer, Message, ToolSchema, assistant

_PROPERTIES: Final = {"word": {"type": "string"}, "deep": {"type": "boolean"}}
_PARAMETERS: Final = {"type": "object", "properties": _PROPERTIES, "required": ["word"]}
_LOOK_UP: Final = {"name": "look_up", "description": "Look a word up.", "parameters": _PARAMETERS}
TOOLS: Final[list[ToolSchema]] = [{"type": "function", "function": _LOOK_UP}]
MESSAGES: Final[list[Message]] = [
    {"role": "user", "content": "What is a zebra?"},
    assistant("", [("call_0", "look_up", '{"word": "zebra", "deep": false}')], "The word is in a book."),
    {"role": "tool", "tool_call_id": "call_0", "content": "an animal with stripes"},
    assistant("An animal.", [], "The book says so."),
    {"role": "user", "content": "What does it eat?"},
]
"""A chat of an episode: the policy writes the second and the fourth message, and goes on at the end."""
QUESTION: Final = MESSAGES[:1]
_UNTOOLED: Final = [MESSAGES[0], *MESSAGES[3:]]


def examine(renderer: ChatRenderer) -> str:
    """Record the probe as an episode does; the first turn that cannot be extended, in words. Empty: all can."""
    try:
        return _examine(renderer, MESSAGES, TOOLS)
    except DataError:
        return _examine(renderer, _UNTOOLED, None)


def _examine(renderer: ChatRenderer, messages: Sequence[Message], tools: Sequence[ToolSchema] | None) -> str:
    ids = renderer.render(messages[:1], tools)
    for turn in range(1, len(messages), 2):
        held, new = messages[: turn + 1], messages[turn + 1 : turn + 2]
        sampled = _turn_of(renderer.render([*held, *new], tools), len(ids), renderer.stops)
        ids = [*ids, *sampled]
        added = renderer.extend(held, tools, ids, new, sampled=len(sampled))
        if added is None:
            return f"a message of role {new[0]['role']} changes what stands before it"
        ids = [*ids, *added]
    return ""


def json_text(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


def _turn_of(whole: Sequence[int], begin: int, stops: frozenset[int]) -> list[int]:
    """The ids of the turn that begins there, its end included; a template that writes no end gets one."""
    for place in range(begin, len(whole)):
        if whole[place] in stops:
            return list(whole[begin : place + 1])
    return [min(stops, default=whole[-1])]
