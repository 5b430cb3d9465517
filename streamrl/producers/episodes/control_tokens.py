"""Control tokens that a tool or an environment spells out stay text: otherwise its answer could forge a turn.

Where such a text begins, it gets a mark after its first character. Before a text becomes ids it is cut at its marks,
and no piece spells a control token.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, Final

from streamrl.producers.episodes.messages import spell_out
from streamrl.producers.episodes.rendering import Message

CUT: Final = "\ufdd0"
"""Unicode will never assign it."""


class ControlTokens:
    """Those of one tokenizer of transformers; `ids` has them by their text."""

    def __init__(self, backend: Any) -> None:
        added = backend.added_tokens_decoder
        self.ids = {token.content: int(number) for number, token in added.items() if token.special}
        texts = "|".join(re.escape(text) for text in self.ids if len(text) > 1)
        self._first = re.compile(f"(?=(?:{texts or '(?!)'}))(.)", re.DOTALL)

    def spell_out(self, messages: Sequence[Mapping[str, Any]]) -> list[Message]:
        """`messages.spell_out`, with marks in what tools say, and after the first reply also in what users say."""
        spelled = spell_out(messages)
        replied = False
        for message in spelled:
            replied = replied or message["role"] == "assistant"
            if message["role"] == "tool" or (replied and message["role"] == "user"):
                message["content"] = self._first.sub(rf"\1{CUT}", message["content"].replace(CUT, ""))
        return spelled


class CuttingTokenizer:
    """A tokenizer of transformers whose `encode` cuts texts at their marks, for code that encodes by itself."""

    __call__ = None  # it would encode, too

    def __init__(self, backend: Any) -> None:
        self._backend = backend

    def __getattr__(self, name: str) -> Any:
        return getattr(self._backend, name)

    def encode(self, text: str, **options: Any) -> list[int]:
        return [token for piece in text.split(CUT) for token in self._backend.encode(piece, **options)]
