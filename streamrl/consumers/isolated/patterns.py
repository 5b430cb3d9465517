"""Does a regular expression match? For a process of `child`, since `re` can take unlimited time and blocks threads."""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Callable
from typing import Any


def prepare(settings: Any) -> Callable[[Any, Callable[[str], None]], Any]:
    """Return a function of a text that gives `{"found": bool, "group": text or null}`, the group of the last match.

    `settings` is `{"pattern": text, "whole": bool, "group": name, number or null}`. The only phase is `response`.
    """
    pattern, group = re.compile(settings["pattern"]), settings["group"]

    def search(text: Any, tell: Callable[[str], None]) -> Any:
        tell("response")
        match: re.Match[str] | None
        if settings["whole"]:
            match = pattern.fullmatch(text)
        elif group is None:
            match = pattern.search(text)
        else:
            match = next(iter(deque(pattern.finditer(text), maxlen=1)), None)
        return {"found": match is not None, "group": None if match is None or group is None else match[group]}

    return search
