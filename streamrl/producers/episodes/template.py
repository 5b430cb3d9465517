"""Chats by the chat template of a Hugging Face tokenizer.

To extend a chat, it is written with and without the new messages; only the text after the sampled turn becomes ids.
"""

from __future__ import annotations

from contextlib import suppress
from functools import lru_cache
from typing import Any, Final, Literal, TypeAlias, get_args

import numpy as np
import orjson
from typing_extensions import override

from streamrl.errors import DataError
from streamrl.images.encoded import images_of
from streamrl.producers.episodes import probe
from streamrl.producers.episodes.messages import CUT, ControlTokens
from streamrl.producers.episodes.rendering import ChatRenderer, Ids, Message, Messages, Reply, Tools
from streamrl.producers.episodes.tool_formats import format_of, name_calls
from streamrl.producers.tokenizer import Tokenizer

_ArgumentForm: TypeAlias = Literal["object", "words", "text", "content"]
_SENTINEL: Final = "Zebras cross here."
# The next turn of a chat begins with its text, and a group asks for the same: texts are kept, 50 MB of them at most.
_TEXTS: Final = 1024
_LONGEST_TEXT: Final = 8192  # bytes, or characters


class TemplateRenderer(ChatRenderer):
    """A chat template. `DataError` when there is none, `ConfigError` for an unknown tool format."""

    def __init__(self, tokenizer: Tokenizer, tool_format: str = "auto") -> None:
        self._tokenizer = tokenizer
        source = tokenizer.template
        self._thinks = "</think>" in source or "reasoning_content" in source
        self._reasoning_key = "reasoning_content" in source
        self._format = format_of(tool_format, source)
        self._control = ControlTokens(tokenizer.backend, tokenizer.vision.token if tokenizer.vision else "")
        self._dated = "strftime_now" in source
        self._kept_text = lru_cache(_TEXTS)(lambda key: self._write(*orjson.loads(key)))
        self._kept_ids = lru_cache(_TEXTS)(lambda text: np.asarray(tokenizer.plain_ids(text), dtype=np.int32))
        self._form = self._find_form()
        answered = self._text([*probe.QUESTION, {"role": "assistant", "content": _SENTINEL}])
        self._close = answered.rpartition(_SENTINEL)[2]
        self._stops = self._find_stops()
        self.stops = frozenset(self._stops.values())

    @override
    def render(self, messages: Messages, tools: Tools = None) -> list[int]:
        return self._ids(self._expanded(self._text(messages, tools, opened=True), messages))

    @override
    def extend(self, messages: Messages, tools: Tools, ids: Ids, new: Messages, *, sampled: int) -> list[int] | None:
        if not messages or messages[-1]["role"] != "assistant" or not new:
            return None
        if any(message["role"] == "assistant" for message in new):
            return None  # the policy did not sample it, so its ids are not known
        before = self._text(messages[:-1], tools, opened=True)
        held = self._text(messages, tools)
        whole = self._text([*messages, *new], tools, opened=True)
        if not (whole.startswith(before) and whole.startswith(held)):
            return None
        reasoning = str(messages[-1].get("reasoning_content") or "").strip()
        if self._thinks and reasoning not in whole[len(before) :]:
            return None  # the template leaves out what the policy thought
        close = self._closing(held, len(before))
        if close is None:
            return None
        return self._tail_ids(self._expanded(close + whole[len(held) :], new), closed=ids[-1] in self.stops)

    @override
    def parse(self, ids: Ids, tools: Tools = None, *, prompt: Ids = ()) -> Reply:
        ended = len(ids) > 0 and ids[-1] in self.stops
        text = self._tokenizer.decode(ids[:-1] if ended else ids, special=True)
        reasoning, text = self._split_reasoning(text, prompt)
        content, written = self._format(text, tools) if tools else (text, [])
        return Reply(content, reasoning, name_calls(written, ids, prompt))

    def _split_reasoning(self, text: str, prompt: Ids) -> tuple[str, str]:
        if not self._thinks:
            return "", text
        opened = self._tokenizer.decode(prompt[-8:], special=True).rstrip().endswith("<think>")
        thought, end, rest = text.partition("</think>")
        if not (end or opened or text.lstrip().startswith("<think>")):
            return "", text
        return thought.replace("<think>", "", 1).strip(), rest.lstrip("\n")

    def _text(
        self, messages: Messages, tools: Tools = None, *, opened: bool = False, form: _ArgumentForm | None = None
    ) -> str:
        form, key = form or self._form, b""
        if not self._dated:  # what is kept would say yesterday's date after midnight
            with suppress(orjson.JSONEncodeError):  # a number of more than 64 bits
                key = orjson.dumps((messages, tools, opened, form))
        return self._kept_text(key) if 0 < len(key) <= _LONGEST_TEXT else self._write(messages, tools, opened, form)

    def _write(self, messages: Messages, tools: Tools, opened: bool, form: _ArgumentForm) -> str:
        shaped = [self._shape(message, form) for message in self._control.spell_out(messages)]
        return self._tokenizer.chat_text(shaped, tools, opened=opened)

    def _expanded(self, text: str, messages: Messages) -> str:
        """With all tokens of the images of the messages that it is the text of."""
        if self._tokenizer.vision is None:
            return text
        return self._tokenizer.vision.expand(text, [(part["width"], part["height"]) for part in images_of(messages)])

    def _ids(self, text: str) -> list[int]:
        text, *pieces = text.split(CUT)
        ids: list[int] = self._tokenizer.plain_ids(text) if len(text) > _LONGEST_TEXT else self._kept_ids(text).tolist()
        return ids + [token for piece in pieces for token in self._tail_ids(piece, closed=True)]

    def _shape(self, message: Message, form: _ArgumentForm) -> Message:
        reasoning = message.get("reasoning_content")
        if reasoning and self._thinks and not self._reasoning_key:
            message["content"] = f"<think>\n{reasoning}\n</think>\n\n{message['content']}"
        for call in message.get("tool_calls", ()):
            call["function"]["arguments"] = _arguments(call["function"]["arguments"], form)
        if form == "content" and "tool_calls" in message:
            written = [probe.json_text(call["function"]) for call in message.pop("tool_calls")]
            blocks = [f"<tool_call>\n{text}\n</tool_call>" for text in written]
            message["content"] = "\n".join([message["content"], *blocks] if message["content"] else blocks)
        return message

    def _find_form(self) -> _ArgumentForm:
        """How this template gets arguments so that it writes `false`, not `False`; `content`: it knows no calls."""
        form: _ArgumentForm
        for form in get_args(_ArgumentForm):
            try:
                text = self._text(probe.MESSAGES[:2], probe.TOOLS, form=form)
            except DataError:
                continue
            call = text.rpartition("look_up")[2]
            if "false" in call and "False" not in call and '\\"' not in call:
                return form
        return "content"

    def _find_stops(self) -> dict[str, int]:
        backend = self._tokenizer.backend
        stops = {} if backend.eos_token_id is None else {str(backend.eos_token): int(backend.eos_token_id)}
        endings = [self._close]
        with suppress(DataError):  # a template that refuses calls of tools
            endings.append(self._text(probe.MESSAGES[:2], probe.TOOLS).rpartition("false")[2])
        for ending in endings:
            special = [text for text in self._control.ids if text in ending]
            if special:
                last = max(special, key=ending.rfind)
                stops[last] = self._control.ids[last]
        return stops

    def _closing(self, held: str, begin: int) -> str | None:
        at = max((held.rfind(text, begin) for text in self._stops), default=-1)
        if at >= 0:
            return held[at:]
        return self._close if held.endswith(self._close) else None

    def _tail_ids(self, tail: str, *, closed: bool) -> list[int]:
        """Ids of what follows a sampled turn, without the end of that turn when it is `closed` already."""
        if not self._stops:
            return self._ids(tail)
        written = next((text for text in self._stops if tail.startswith(text)), None)
        end = written or next(iter(self._stops))
        ids = self._ids(tail if written else end + tail)  # some tokenizers write a text differently where it begins
        at = ids.index(self._stops[end])
        return ids[at + 1 :] if closed or not written else ids[at:]


def _arguments(arguments: dict[str, Any], form: _ArgumentForm) -> Any:
    if form == "text":
        return probe.json_text(arguments)
    if form == "words":
        plain = (bool, type(None))
        return {key: probe.json_text(value) if isinstance(value, plain) else value for key, value in arguments.items()}
    return arguments
