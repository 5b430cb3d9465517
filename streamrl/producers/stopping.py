"""Texts that end a response (`Request.stop`): which token completes one, and what stands before it.

SGLang, for one, misses a text that is written with more tokens than its tokenizer would take.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Final

from streamrl.engine import Completion, first_tokens

_MORE: Final = 4  # tokens besides one for each byte of the longest text: the first are often written differently
_PART: Final = "\N{REPLACEMENT CHARACTER}"  # what is decoded of a part of a character


class StopTexts:
    """The texts that end a response, none of them within its first `after` tokens. `decode` turns tokens into text."""

    def __init__(self, texts: Sequence[str], decode: Callable[[Sequence[int]], str], after: int = 0) -> None:
        self._texts, self._decode, self._after = texts, decode, after
        self._window = max((len(text.encode()) for text in texts), default=0) + _MORE

    def ends(self, tokens: Sequence[int]) -> bool:
        """Whether the last token completes a text; cheap, for each token in turn."""
        window = tokens[-self._window :]
        text = self._decode(window) if len(tokens) > self._after else ""
        return any(stop in text for stop in self._texts) and self._found(text, self._length(window[:-1])) is not None

    def cut(self, completion: Completion) -> Completion:
        if not self._texts:
            return completion
        tokens = completion.tokens.tolist()
        begin = self._length(tokens[: self._after])

        def ended(count: int) -> bool:
            return self._found(self._decode(tokens[:count]), begin) is not None

        if not ended(len(tokens)):
            return completion
        count = 1 + bisect_left(range(1, len(tokens)), True, key=ended)
        return replace(first_tokens(completion, count), finish="stop")

    def before(self, text: str, tokens: Sequence[int]) -> str:
        """The end of a response, or all of it, without the text that the last of its tokens completes, if any."""
        if not self._texts or len(tokens) <= self._after:
            return text
        last = len(self._decode(tokens)) - self._length(tokens[:-1])
        return text[: self._found(text, len(text) - last)]

    def split(self, text: str, tokens: Sequence[int]) -> tuple[str, str]:
        """As `before`, and the text that ended it; empty: none."""
        before = self.before(text, tokens)
        return before, next((stop for stop in self._texts if text.startswith(stop, len(before))), "")

    def _length(self, tokens: Sequence[int]) -> int:
        return len(self._decode(tokens).rstrip(_PART)) if tokens else 0

    def _found(self, text: str, begin: int) -> int | None:
        """Where the text that is complete first starts, of those that end behind `begin`."""
        places = [
            (at + len(stop), at) for stop in self._texts if (at := text.find(stop, max(0, begin + 1 - len(stop)))) >= 0
        ]
        return min(places)[1] if places else None
