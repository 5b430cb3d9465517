"""Are two mathematical answers the same? For a process of `child`; needs the package math-verify.

The time limits of math-verify (signals, which work in the main thread alone and do not interrupt a long computation in
C) are switched off: the kernel ends the process. Exceptions of sympy are looked at here, because `parse` and `verify`
would call them a wrong answer, also when the process is out of memory.
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
    r"""Return the comparison.

    Args:
        settings: `{"digits": decimals that must agree, "strict": variables and kinds of brackets matter}`.

    Returns:
        A function of `{"gold": text, "response": text}`, both with their delimiters (`\boxed{}`, `$`). It gives
        `{"gold": why, "response": why, "equal": bool}`; a reason that is not empty says why that text has no value.
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

    _agree(equal, _parse("$1$")[0][0], Integer(_ANOTHER))  # what is compiled at the first use is not of a response

    @functools.lru_cache(maxsize=64)
    def gold_of(text: str) -> tuple[list[Any], str]:
        values, why = _parse(text)
        for value in values:  # can it be computed with at all? Compared with a number that it hardly is
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
        # When every comparison failed nothing has been compared; else the text is simply something else.
        return _verdict(response=doubts[0] if all(doubts) else "")

    return compare


def _verdict(*, gold: str = "", response: str = "", equal: bool = False) -> dict[str, Any]:
    return {"gold": gold, "response": response, "equal": equal}


def _parse(text: str) -> tuple[list[Any], str]:
    """Return what math-verify finds (the value, and the text itself), or why it finds nothing."""
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
