"""Runs in the sandbox: plain data as trees for JSON, and back, for checks.py."""

from __future__ import annotations

import builtins

globals()["__builtins__"] = dict(vars(builtins))  # as in checks.py

import sys  # noqa: E402
from collections.abc import Callable  # noqa: E402
from typing import Any  # noqa: E402

_SMALL = 1 << 60
SCALARS = (int, float, complex, str, bytes, bytearray)
CONTAINERS = (list, tuple, dict, set, frozenset)


class NotPlain(BaseException):
    """A value that cannot travel: no plain data, and no object of the program."""


def _of_collections(value: Any) -> list[Any]:
    if type(value).__name__ == "deque":
        return [list(value), value.maxlen]
    if type(value).__name__ == "defaultdict":
        factory = value.default_factory
        return [factory if factory in _TYPES.values() else None, dict(value)]
    return [dict(value)]


KINDS: dict[tuple[str, str], Callable[[Any], list[Any]]] = {
    ("collections", "deque"): _of_collections,
    ("collections", "defaultdict"): _of_collections,
    ("collections", "Counter"): _of_collections,
    ("collections", "OrderedDict"): lambda value: [list(value.items())],
    ("fractions", "Fraction"): lambda value: [value.numerator, value.denominator],
    ("decimal", "Decimal"): lambda value: [str(value)],
    ("datetime", "timedelta"): lambda value: [value.days, value.seconds, value.microseconds],
    ("datetime", "date"): lambda value: [value.year, value.month, value.day],
    ("datetime", "time"): lambda value: [value.hour, value.minute, value.second, value.microsecond, value.tzinfo],
    ("datetime", "datetime"): lambda value: [*value.timetuple()[:6], value.microsecond, value.tzinfo],
    ("datetime", "timezone"): lambda value: [value.utcoffset(None)],
}
"""Values of the standard library that travel: what they are built from."""
_TYPES: dict[str, Any] = {kind.__name__: kind for kind in (*SCALARS, *CONTAINERS, bool, object, type, range, slice)}


def write(value: Any, other: Callable[[Any], Any]) -> Any:  # noqa: PLR0911 - one for each kind
    """Return plain data as a tree for JSON; `other` writes what is none."""
    kind = type(value)
    if value is None or kind in (bool, float, str):
        return value
    if kind is int:
        return value if -_SMALL < value < _SMALL else ["int", hex(value)]
    if kind in CONTAINERS:
        items = value.items() if kind is dict else value
        return [kind.__name__, [write(list(item) if kind is dict else item, other) for item in items]]
    if kind in (bytes, bytearray):
        return [kind.__name__, value.hex()]
    if kind is complex:
        return ["complex", [value.real, value.imag]]
    if kind in (range, slice):
        return [kind.__name__, [write(one, other) for one in (value.start, value.stop, value.step)]]
    if value is Ellipsis:
        return ["Ellipsis", None]
    if kind is type and value in _TYPES.values():
        return ["type", value.__name__]
    parts = KINDS.get((kind.__module__, kind.__name__))
    if parts is not None and getattr(sys.modules.get(kind.__module__), kind.__name__, None) is kind:
        return ["known", [kind.__module__, kind.__name__, write(parts(value), other)]]
    return other(value)


def read(tree: Any, other: Callable[[str, Any], Any]) -> Any:  # noqa: PLR0911 - one for each kind
    """Return the value of a tree; `other` reads what is no plain data."""
    if not isinstance(tree, list):
        return tree
    kind, inner = tree
    if kind == "int":
        return int(inner, 16)
    if kind == "dict":
        return dict(read(item, other) for item in inner)
    if kind in ("list", "tuple", "set", "frozenset"):
        return _TYPES[kind](read(item, other) for item in inner)
    if kind in ("bytes", "bytearray"):
        return _TYPES[kind].fromhex(inner)
    if kind in ("complex", "range", "slice"):
        return _TYPES[kind](*(read(item, other) for item in inner))
    if kind == "Ellipsis":
        return Ellipsis
    if kind == "type":
        return _TYPES[inner]
    if kind == "known":
        module, name, parts = inner
        if (module, name) not in KINDS:
            raise ValueError(f"{module}.{name} does not travel")
        return getattr(__import__(module), name)(*read(parts, other))
    return other(kind, inner)


def change(old: Any, new: Any) -> Any:
    """Make a value what the program has made of its copy; lists, dictionaries and sets stay the same objects."""
    if type(old) is not type(new):
        return new
    if type(old) is list:
        old[:] = [*map(change, old, new), *new[len(old) :]]
    elif type(old) is dict:
        merged = {key: change(old[key], value) if key in old else value for key, value in new.items()}
        old.clear()
        old.update(merged)
    elif type(old) is set:
        old.clear()
        old.update(new)
    elif type(old) is bytearray:
        old[:] = new
    elif type(old) is tuple and len(old) == len(new):
        return tuple(map(change, old, new))
    elif type(old).__name__ in ("deque", "defaultdict", "Counter", "OrderedDict"):
        old.clear()
        (old.extend if type(old).__name__ == "deque" else old.update)(new)
    else:
        return new
    return old
