"""The error behind all others in the log of a vLLM or SGLang server.

Its processes end one after the other, and each reports the end of the one before it: "see root cause above".
"""

from __future__ import annotations

import re
from typing import Final

_PREFIX: Final = re.compile(
    r"(?:\((?P<process>[^()]*pid=\d+[^()]*)\) ?)?(?:(?P<level>[A-Z]+) [\d-]+ [\d:.]+ \[[^]]*\] ?)?"
)
_TRACEBACK: Final = "Traceback (most recent call last):"
_CHAINED: Final = "The above exception was the direct cause of the following exception:"
_ERROR: Final = re.compile(r"(?:\w+\.)*[A-Z]\w*[a-z]\w*(?:: .*)?$")
_POINTS_BACK: Final = re.compile(
    r"root cause|stack trace|messages above|relevant logs|is dead|EngineDeadError"
    r"|^(?:EOFError|SystemExit|(?:asyncio\.\S*)?CancelledError)\b"
)
_LONGEST: Final = 500


def points_back(error: str) -> bool:
    """Whether an error says no more than that there was another one before it."""
    return _POINTS_BACK.search(error) is not None


def root_cause(log: str) -> str:
    """The exception that began the last failure in a log; of a chain of exceptions the first. Empty: there is none."""
    errors: list[str] = []
    inside: set[str] = set()  # processes whose traceback has begun
    chained: set[str] = set()  # processes whose next exception comes of the last one
    named = None  # the process whose exception was the last line
    for line in log.splitlines():
        prefix = _PREFIX.match(line)
        assert prefix is not None
        process, text = prefix["process"] or "", line[prefix.end() :].rstrip()
        if named == process and text.startswith("  "):
            errors[-1] += f" {text.strip()}"  # pydantic says there what is wrong
        named = None
        if text.endswith(_TRACEBACK) and prefix["level"] not in {"DEBUG", "INFO", "WARNING"}:
            inside.add(process)
        elif text == _CHAINED:
            chained.add(process)
        elif process in inside and _ERROR.match(text):
            inside.discard(process)
            if process in chained:
                chained.discard(process)
            else:
                errors.append(text)
                named = process
    while len(errors) > 1 and points_back(errors[-1]):
        errors.pop()
    return errors[-1][:_LONGEST] if errors else ""
