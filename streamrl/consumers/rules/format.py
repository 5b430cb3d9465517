"""The response consists of tagged parts, in order: `<think>...</think><answer>...</answer>`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar, Final

from streamrl.consumers.reward import Reward, RewardSample, Score
from streamrl.consumers.rules.answers import check_tag

_TAGS: Final = ("think", "answer")


class Format(Reward):
    """1 when the response is made of the given tags, in their order; otherwise 0, or what part of them is right.

    A tag is right when it is opened once and closed once, comes after the tags before it, is not empty, and has
    nothing but white space between itself and the tag (or the begin of the response) before it; the last one also
    nothing after it. Good as a gate: `gate: 1`.

    Args:
        tags: names, in their order.
        opened: the prompt ends with the first opening tag, as the templates of many reasoning models do, so the
            response begins inside of it. It may then be repeated at the begin.
        outside: text between, before and after the tags does no harm.
        empty: so do tags with nothing but white space in them.
        partial: a response that is not right gets the share of the tags that are, instead of 0.
    """

    instant: ClassVar[bool] = True

    def __init__(
        self,
        tags: Sequence[str] = _TAGS,
        opened: bool = False,
        outside: bool = False,
        empty: bool = False,
        partial: bool = False,
    ) -> None:
        if isinstance(tags, str) or not tags or len(set(tags)) != len(tags):
            raise ValueError("tags is a list of different names")
        for tag in tags:
            check_tag(tag)
        self.tags = tuple(tags)
        self.opened = opened
        self.outside = outside
        self.empty = empty
        self.partial = partial

    async def score(self, sample: RewardSample) -> Score:
        """Return 1, the share of the tags that are right, or 0."""
        text = sample.text
        if self.opened and not text.lstrip().startswith(f"<{self.tags[0]}>"):
            text = f"<{self.tags[0]}>{text}"
        right = self._right(text)
        return Score(1.0 if right == len(self.tags) else right / len(self.tags) if self.partial else 0.0)

    def _right(self, text: str) -> int:
        """Count the tags that are right."""
        right, end = 0, 0
        for tag in self.tags:
            opening, closing = f"<{tag}>", f"</{tag}>"
            start, stop = text.find(opening), text.find(closing)
            if text.count(opening) != 1 or text.count(closing) != 1 or not end <= start < stop:
                continue
            before, content = text[end:start], text[start + len(opening) : stop]
            end = stop + len(closing)
            alone = tag != self.tags[-1] or not text[end:].strip()
            right += (self.outside or (not before.strip() and alone)) and (self.empty or bool(content.strip()))
        return right
