"""A score as rewards and episodes give it: a finite number, and nothing that only looks like one."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from streamrl.wire import utf8


@dataclass(frozen=True, slots=True)
class Score:
    """A finite number, and by name the parts it was made of (kept for the metrics, not added to anything).

    `tokens` is the cost of the score: tokens that a judge read and wrote, at least 0; the metrics add it up.
    `detail` explains the value in words; `streamrl reward test` shows it, and a run does not keep it.

    Raises:
        TypeError: the value or a part is no number (booleans, strings and None are refused, so that a bug is an error
            and never a silent 0), or `tokens` is no whole number.
        ValueError: the value or a part is NaN or infinite, the name of a part cannot be written in UTF-8, or `tokens`
            is below 0.
    """

    value: float
    parts: Mapping[str, float] = field(default_factory=dict)
    tokens: int = 0
    detail: str = ""

    def __post_init__(self) -> None:
        if type(self.value) is not float or not math.isfinite(self.value):
            object.__setattr__(self, "value", finite(self.value, "the value"))
        if self.parts or type(self.parts) is not dict:
            parts = {_named(name): finite(part, f"part {name}") for name, part in self.parts.items()}
            object.__setattr__(self, "parts", parts)
        if type(self.tokens) is not int:
            raise TypeError(f"the tokens of a score are {self.tokens!r} ({type(self.tokens).__name__}), not an int")
        if self.tokens < 0:
            raise ValueError(f"the tokens of a score are {self.tokens}")


def _named(name: Any) -> str:
    text = str(name)
    if utf8(text) != text:
        raise ValueError(f"the name of part {text!r} of a score has half a character in it")
    return text


def finite(value: Any, what: str) -> float:
    """Return `value` as a float; `TypeError` if it is no number, `ValueError` if it is not finite.

    Scalars of numpy and torch are numbers; booleans of any library are not.
    """
    if type(value) is not float:
        if isinstance(value, bool | str | bytes) or value is None or "bool" in str(getattr(value, "dtype", "")):
            raise TypeError(f"{what} of a score is {value!r} ({type(value).__name__}), not a number; write float(...)")
        try:
            number = float(value)
        except (TypeError, ValueError) as error:
            raise TypeError(f"{what} of a score is a {type(value).__name__}, not a number") from error
    else:
        number = value
    if not math.isfinite(number):
        raise ValueError(f"{what} of a score is {number}")
    return number
