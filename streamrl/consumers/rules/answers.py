"""What rules read: the answer that came with a prompt, and the part of a response that counts."""

from __future__ import annotations

from typing import Final

from streamrl.consumers.reward import RewardSample
from streamrl.errors import DataError

_NAME_CHARACTERS: Final = frozenset("<>/ \t\n")


def answer_of(sample: RewardSample) -> str:
    """Return the answer of the prompt as text; `DataError` when it has none."""
    answer = sample.prompt.answer
    if answer is None:
        raise DataError(
            f"line {sample.prompt.line} of the data set has no answer to compare with", "give each line an `answer`"
        )
    return answer if isinstance(answer, str) else str(answer)


def check_tag(tag: str | None) -> str | None:
    """Return `tag`, the name between `<` and `>`; `ValueError` when it is none."""
    if tag is not None and (not tag or _NAME_CHARACTERS & set(tag)):
        raise ValueError(f"{tag!r} is no tag: write its name only, for example answer for <answer>")
    return tag


def inside(text: str, tag: str | None) -> str | None:
    """Return what is between the last `</tag>` and the `<tag>` before it; None when there is none.

    Args:
        text: where to look.
        tag: its name; None: all of the text.
    """
    if tag is None:
        return text
    end = text.rfind(f"</{tag}>")
    start = text.rfind(f"<{tag}>", 0, max(end, 0))
    return None if end < 0 or start < 0 else text[start + len(tag) + 2 : end]
