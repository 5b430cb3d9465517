"""Three turns that show what a template or an engine does: a call with `false`, thinking, a second question.

The ids that an episode would record are compared with those of the whole chat, by the same renderer or by an engine
that renders for itself.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from streamrl.errors import DataError

if TYPE_CHECKING:
    from streamrl.producers.episodes.rendering import ChatRenderer, Message, ToolSchema

TOOLS: Final[list[ToolSchema]] = [
    {
        "type": "function",
        "function": {
            "name": "look_up",
            "description": "Look a word up.",
            "parameters": {
                "type": "object",
                "properties": {"word": {"type": "string"}, "deep": {"type": "boolean"}},
                "required": ["word"],
            },
        },
    }
]
MESSAGES: Final[list[Message]] = [
    {"role": "user", "content": "What is a zebra?"},
    {
        "role": "assistant",
        "content": "",
        "reasoning_content": "The word is in a book.",
        "tool_calls": [
            {
                "id": "call_0",
                "type": "function",
                "function": {"name": "look_up", "arguments": '{"word": "zebra", "deep": false}'},
            }
        ],
    },
    {"role": "tool", "tool_call_id": "call_0", "content": "an animal with stripes"},
    {"role": "assistant", "content": "An animal.", "reasoning_content": "The book says so."},
    {"role": "user", "content": "What does it eat?"},
]
"""A chat of an episode: the policy writes the second and the fourth message, and goes on at the end."""
QUESTION: Final = MESSAGES[:1]
_UNTOOLED: Final = [MESSAGES[0], *MESSAGES[3:]]
_AROUND: Final = 6


@dataclass(frozen=True, slots=True)
class Findings:
    """What the probe has shown.

    `stable`: each turn can be extended. `why` is for people: the first turn that cannot, or the first token at which
    the recorded chat and the whole rendering differ; empty when they are the same.
    """

    stable: bool
    why: str = ""


def examine(renderer: ChatRenderer, decode: Callable[[Sequence[int]], str] | None = None) -> Findings:
    """Record the probe as an episode does, and compare it with the rendering of the whole chat at each turn.

    The policy is taken to write what the renderer writes for its messages, up to the first end of a turn. For a
    template that refuses tools, the probe is without them.

    Raises:
        DataError: the template refuses any chat of several turns.
    """
    try:
        return _examine(renderer, MESSAGES, TOOLS, decode)
    except DataError:
        return _examine(renderer, _UNTOOLED, None, decode)


def _examine(
    renderer: ChatRenderer,
    messages: Sequence[Message],
    tools: Sequence[ToolSchema] | None,
    decode: Callable[[Sequence[int]], str] | None,
) -> Findings:
    ids = renderer.render(messages[:1], tools)
    why = ""
    for turn in range(1, len(messages), 2):
        held, new = messages[: turn + 1], messages[turn + 1 : turn + 2]
        whole = renderer.render([*held, *new], tools)
        sampled = _turn_of(whole, len(ids), renderer.stops)
        ids = [*ids, *sampled]
        added = renderer.extend(held, tools, ids, new, sampled=len(sampled))
        if added is None:
            where = first_difference(ids, whole[: len(ids)], decode)
            after = f"a message of role {new[0]['role']} changes what stands before it"
            return Findings(False, f"{after}: {where}" if where else after)
        ids = [*ids, *added]
        why = why or first_difference(ids, whole, decode)
    return Findings(True, why)


def first_difference(
    ours: Sequence[int], theirs: Sequence[int], decode: Callable[[Sequence[int]], str] | None = None
) -> str:
    """Say in words where two renderings of a chat part, with the text around it; empty when they are the same."""
    shorter = min(len(ours), len(theirs))
    at = next((place for place in range(shorter) if ours[place] != theirs[place]), shorter)
    if at == len(ours) == len(theirs):
        return ""
    return f"token {at}: recorded {_around(ours, at, decode)}, rendered {_around(theirs, at, decode)}"


def json_text(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


def _turn_of(whole: Sequence[int], begin: int, stops: frozenset[int]) -> list[int]:
    """The ids of the turn that begins there, its end included; a template that writes no end gets one."""
    for place in range(begin, len(whole)):
        if whole[place] in stops:
            return list(whole[begin : place + 1])
    return [min(stops, default=whole[-1])]


def _around(ids: Sequence[int], at: int, decode: Callable[[Sequence[int]], str] | None) -> str:
    if at >= len(ids):
        return "its end"
    shown = list(ids[max(0, at - _AROUND) : at + _AROUND])
    return f"{ids[at]} in {decode(shown)!r}" if decode else f"{ids[at]}"
