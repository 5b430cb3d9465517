"""What is wrong with a value of a run file, in the words of run files."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

_SHOWN: Final = 60
_NAMES: Final = {
    r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$": "letters, digits, '.', '_' and '-', beginning with a letter or digit",
    r"^[A-Za-z0-9][A-Za-z0-9_-]{0,63}$": "letters, digits, '_' and '-', beginning with a letter or digit",
}
_MAPPING: Final = "must be a mapping: {{key: value}}"
_LIST: Final = "must be a list: [a, b]"
_WHOLE: Final = "must be a whole number, not {input}"
_NUMBER: Final = "must be a number, not {input}"
_SWITCH: Final = "must be true or false, not {input}"
WORDS: Final[Mapping[str, str]] = {
    "missing": "is missing",
    "extra_forbidden": "is not a key",
    "value_error": "{error}",
    "literal_error": "must be {expected}, not {input}",
    "string_pattern_mismatch": "must be 1 to 64 {pattern}, not {input}",
    "string_type": "must be text; put it in quotes",
    "string_unicode": "must be text, and holds a part of a character",
    "path_type": "must be the path of a file or directory",
    "bool_type": _SWITCH,
    "bool_parsing": _SWITCH,
    "int_type": _WHOLE,
    "int_parsing": _WHOLE,
    "int_parsing_size": _WHOLE,
    "int_from_float": _WHOLE,
    "float_type": _NUMBER,
    "float_parsing": _NUMBER,
    "finite_number": "must be a finite number, not {input}",
    "greater_than": "must be more than {gt}, not {input}",
    "greater_than_equal": "must be at least {ge}, not {input}",
    "less_than": "must be less than {lt}, not {input}",
    "less_than_equal": "must be at most {le}, not {input}",
    "too_short": "must have {min_length} or more entries, and has {actual_length}",
    "too_long": "must have {max_length} or fewer entries, and has {actual_length}",
    "tuple_type": _LIST,
    "dict_type": _MAPPING,
    "model_type": _MAPPING,
    "json_invalid": "is not JSON",
}
"""By the type of pydantic's error; `tests/test_config_words.py` makes every one that a run file can lead to."""


def explain(error: Mapping[str, Any]) -> str:
    """One error of pydantic (an item of `ValidationError.errors()`) in the words of a run file."""
    kind, place = error["type"], error["loc"]
    if kind == "missing" and place and isinstance(place[-1], int):  # the index of a list
        return "is missing: the list is too short"
    known: dict[str, Any] = {
        name: int(v) if isinstance(v, float) and v.is_integer() else v for name, v in error.get("ctx", {}).items()
    }
    if "pattern" in known:
        known["pattern"] = _NAMES[str(known["pattern"])]
    return WORDS.get(kind, "is not what this key takes").format_map({**known, "input": _shown(error["input"])})


def _shown(value: Any) -> str:
    text = repr(value) if isinstance(value, (str, dict, list)) or value is None else str(value)
    text = {"None": "empty", "True": "true", "False": "false"}.get(text, text)
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}..."
