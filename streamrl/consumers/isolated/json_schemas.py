"""Is a text JSON that fits a schema? For a process of `child`; needs the package jsonschema.

Runs in its own process, because patterns and `uniqueItems` of a schema can take unlimited time. References to other
files and hosts are not followed.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable
from typing import Any

from jsonschema import Draft202012Validator
from jsonschema.validators import validator_for
from referencing.jsonschema import EMPTY_REGISTRY


def prepare(settings: Any) -> Callable[[Any, Callable[[str], None]], Any]:
    """Return a function of `{"schema": JSON text, "text": text}` that gives `{"json": bool, "valid": bool}`."""
    del settings

    def check(request: Any, tell: Callable[[str], None]) -> Any:
        tell("schema")
        validator = _validator(request["schema"])
        tell("response")
        try:
            value = json.loads(request["text"], parse_constant=_refuse)
        except (ValueError, RecursionError):
            return {"json": False, "valid": False}
        try:
            return {"json": True, "valid": validator.is_valid(value)}
        except RecursionError:  # no reasonable schema allows such deep nesting
            return {"json": True, "valid": False}

    return check


@functools.lru_cache(maxsize=64)
def _validator(schema: str) -> Any:
    value = json.loads(schema)
    kind = validator_for(value, default=Draft202012Validator)
    kind.check_schema(value)
    return kind(value, registry=EMPTY_REGISTRY)


def _refuse(constant: str) -> Any:
    raise ValueError(f"{constant} is no JSON")
