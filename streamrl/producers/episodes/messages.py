"""OpenAI messages as templates read them: text and images, and arguments of calls as objects.

Control tokens that a tool or an environment spells out stay text, else its answer could forge a turn: each gets a mark
after its first character, and a text is cut at its marks before it becomes ids. So does the token of an image, whoever
writes it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any, Final, NoReturn

from streamrl.errors import DataError
from streamrl.images.encoded import is_image
from streamrl.producers.episodes.rendering import Message

_TEXTS: Final = {**dict.fromkeys(("text", "input_text", "output_text"), "text"), "refusal": "refusal"}
CUT: Final = "\ufdd0"  # Unicode will never assign it


def spell_out(messages: Sequence[Mapping[str, Any]]) -> list[Message]:
    """The messages with text and images for content (else DataError), and arguments of calls as objects, not text."""
    return [_spell(dict(message)) for message in messages]


def json_object(text: str) -> dict[str, Any] | None:
    """The JSON object that a policy wrote; None for anything that is not one or cannot be written again."""
    try:
        found = json.loads(text, parse_constant=_no_constant)
        json.dumps(found, ensure_ascii=False).encode()  # half a surrogate pair has no UTF-8
    except (ValueError, RecursionError):
        return None
    return found if isinstance(found, dict) else None


def text_of(content: object) -> str:
    """The text of a message's content, without images of inside; `DataError` when it holds something else."""
    if content is None or isinstance(content, str):
        return content or ""
    if not isinstance(content, Sequence):
        raise DataError(f"the content of a message is text or a list of parts, not {type(content).__name__}")
    return "".join(_part(part) for part in content)


def content_of(content: object) -> str | list[dict[str, Any]]:
    """As `text_of`, but a list of parts where there are images as they are inside (`EncodedImage.part`)."""
    if not isinstance(content, list) or not any(map(is_image, content)):
        return text_of(content)
    return [part if is_image(part) else {"type": "text", "text": _part(part)} for part in content]


def _part(part: object) -> str:
    if isinstance(part, str):
        return part
    if is_image(part):
        return ""
    kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
    text = part.get(_TEXTS.get(str(kind), "")) if isinstance(part, Mapping) else None
    if isinstance(text, str):
        return text
    raise DataError(f"a message has a part of type {kind!r}, this model takes text", "leave it out of the messages")


def _spell(message: Message) -> Message:
    if not isinstance(message.get("role"), str):
        raise DataError("a message has no role")
    content = message.get("content")
    message["content"] = text_of(content) if message["role"] == "assistant" else content_of(content)
    calls, left = message.pop("tool_calls", None) or [], []
    for call in calls:
        function = dict(call.get("function") or {})
        arguments = function.get("arguments") or {}
        if isinstance(arguments, str):
            found = json_object(arguments)
            if found is None or not function.get("name"):  # as it was sampled: a template would fail on it or change it
                message["content"] += ("\n" if message["content"] else "") + arguments
                continue
            arguments = found
        left.append({"id": call.get("id", ""), "type": "function", "function": {**function, "arguments": arguments}})
    if left:
        message["tool_calls"] = left
    return message


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is no JSON")


class ControlTokens:
    """Those of one tokenizer of transformers; `ids` has them by their text, `image` is that of an image."""

    def __init__(self, backend: Any, image: str = "") -> None:
        self._image = image
        added = backend.added_tokens_decoder
        self.ids = {token.content: int(number) for number, token in added.items() if token.special}
        texts = "|".join(re.escape(text) for text in self.ids if len(text) > 1)
        self._first = re.compile(f"(?=(?:{texts or '(?!)'}))(.)", re.DOTALL)

    def spell_out(self, messages: Sequence[Mapping[str, Any]]) -> list[Message]:
        """`spell_out`, with marks in what tools say, and after the first reply also in what users say."""
        spelled = spell_out(messages)
        replied = False
        for message in spelled:
            replied = replied or message["role"] == "assistant"
            told = message["role"] == "tool" or (replied and message["role"] == "user")
            content = message["content"]
            if isinstance(content, str):
                message["content"] = self._marked(content, told=told)
            else:
                message["content"] = [
                    {**part, "text": self._marked(part["text"], told=told)} if "text" in part else part
                    for part in content
                ]
        return spelled

    def _marked(self, text: str, *, told: bool) -> str:
        if told:
            return self._first.sub(rf"\1{CUT}", text.replace(CUT, ""))
        return text.replace(self._image, f"{self._image[0]}{CUT}{self._image[1:]}") if self._image else text


class CuttingTokenizer:
    """A tokenizer of transformers whose `encode` cuts texts at their marks, for code that encodes by itself."""

    __call__ = None  # it would encode, too

    def __init__(self, backend: Any) -> None:
        self._backend = backend

    def __getattr__(self, name: str) -> Any:
        return getattr(self._backend, name)

    def encode(self, text: str, **options: Any) -> list[int]:
        return [token for piece in text.split(CUT) for token in self._backend.encode(piece, **options)]
