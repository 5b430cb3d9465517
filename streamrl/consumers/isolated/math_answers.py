"""Are two mathematical answers the same? For a process of `child`; needs the package math-verify.

The time limits of math-verify are off: they use signals, which work in the main thread alone and do not interrupt a
long computation in C; the kernel ends the process instead. `parse` and `verify` would turn exceptions of sympy, even a
MemoryError, into a wrong answer, so they are handled here.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from typing import Any

os.environ["SYMPY_GROUND_TYPES"] = "python"  # with gmpy2 a number that is too large would abort the process

from math_verify import parse, verify
from sympy import Integer

_ANOTHER = 7919


def prepare(settings: Any) -> Callable[[Any, Callable[[str], None]], Any]:
    r"""Return the comparison: a function of `{"gold": text, "response": text}`, with delimiters (`\boxed{}`, `$`).

    `settings` is `{"digits": decimals that must agree, "strict": variables and kinds of brackets matter}`. The function
    gives `{"gold": why, "response": why, "equal": bool}`; a `why` that is not empty says why that text has no value.
    Its phases are `gold`, then `response`.
    """

    def equal(gold: Any, value: Any) -> bool:
        return bool(
            verify(
                gold,
                value,
                float_rounding=settings["digits"],
                strict=settings["strict"],
                timeout_seconds=None,
                raise_on_error=True,
            )
        )

    _agree(equal, _parse("$1$")[0][0], Integer(_ANOTHER))  # compile now, so the first response does not pay for it

    @functools.lru_cache(maxsize=64)
    def gold_of(text: str) -> tuple[list[Any], str]:
        values, why = _parse(text)
        for value in values:  # compared with an arbitrary number, to see whether it can be computed at all
            _agree(equal, value, Integer(_ANOTHER))
        return values, why

    def compare(request: Any, tell: Callable[[str], None]) -> Any:
        tell("gold")
        golds, why = gold_of(request["gold"])
        if why:
            return _verdict(gold=why)
        tell("response")
        values, why = _parse(request["response"])
        if why:
            return _verdict(response=why)
        doubts = []
        for gold in golds:
            for value in values:
                same, doubt = _agree(equal, gold, value)
                if same:
                    return _verdict(equal=True)
                doubts.append(doubt)
        # If every comparison failed, nothing was compared; otherwise the response is a different value.
        return _verdict(response=doubts[0] if all(doubts) else "")

    return compare


def _verdict(*, gold: str = "", response: str = "", equal: bool = False) -> dict[str, Any]:
    return {"gold": gold, "response": response, "equal": equal}


def _parse(text: str) -> tuple[list[Any], str]:
    try:
        values = parse(text, parsing_timeout=None, raise_on_error=True)
    except MemoryError:
        raise
    except Exception as error:  # noqa: BLE001 (whatever sympy raises on hostile text)
        return [], f"{type(error).__name__} while it was read"
    return values, "" if values else "nothing mathematical in it"


def _agree(equal: Callable[[Any, Any], bool], gold: Any, value: Any) -> tuple[bool, str]:
    try:
        return equal(gold, value), ""
    except MemoryError:
        raise
    except Exception as error:  # noqa: BLE001 (whatever sympy raises on hostile expressions)
        return False, f"{type(error).__name__} while it was compared"
