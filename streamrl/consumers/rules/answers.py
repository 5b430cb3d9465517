"""What rules read: the answer that came with a prompt, the part of a response that counts, and choices in args."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, TypeVar

from streamrl.consumers.reward import RewardSample
from streamrl.errors import DataError

_NAME_CHARACTERS: Final = frozenset("<>/ \t\n")
_Choice = TypeVar("_Choice", bound=str)


def answer_of(sample: RewardSample) -> str:
    """Return the answer of the prompt as text; `DataError` when it has none."""
    answer = sample.prompt.answer
    if answer is None:
        raise DataError(
            f"line {sample.prompt.line} of the data set has no answer to compare with", "give each line an `answer`"
        )
    return answer if isinstance(answer, str) else str(answer)


def one_of(name: str, value: _Choice, known: Sequence[str]) -> _Choice:
    """Return `value` of the arg `name`; `ValueError` when it is none of the known ones."""
    if value not in known:
        raise ValueError(f"{name} is {value!r}; it is one of {', '.join(known)}")
    return value


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
