"""Runs in the sandbox: plain data as trees for JSON, and back, for checks.py."""

from __future__ import annotations

import builtins

globals()["__builtins__"] = dict(vars(builtins))  # as in checks.py

import sys  # noqa: E402
from collections.abc import Callable, Iterable  # noqa: E402
from typing import Any  # noqa: E402

_SMALL = 1 << 60
SCALARS = (int, float, complex, str, bytes, bytearray)
CONTAINERS = (list, tuple, dict, set, frozenset)


class NotPlain(BaseException):
    """A value that cannot travel: neither plain data nor an object of the program."""


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
"""Values of the standard library that travel, with their constructor arguments."""
_TYPES: dict[str, Any] = {kind.__name__: kind for kind in (*SCALARS, *CONTAINERS, bool, object, type, range, slice)}


_CHANGE: dict[str, Callable[[Any, Any], None]] = {
    "list": lambda old, new: old.__setitem__(slice(None), new),
    "bytearray": lambda old, new: old.__setitem__(slice(None), new),
    **dict.fromkeys(
        ("set", "dict", "defaultdict", "Counter", "OrderedDict"), lambda old, new: _replace(old.update, new)
    ),
    "deque": lambda old, new: _replace(old.extend, new),
}
"""Mutable kinds, with a function that gives a value the contents of another."""


def _replace(fill: Any, new: Any) -> None:
    fill.__self__.clear()
    fill(new)


def _is_known(kind: type) -> bool:
    """Whether it is one of `KINDS`, and not a class that only has its name."""
    name = (kind.__module__, kind.__name__)
    return name in KINDS and getattr(sys.modules.get(name[0]), name[1], None) is kind


class Message:
    """Values that travel together.

    Mutable values are numbered in the order in which they occur: `objects`. So an object that occurs several times
    stays one object, and an answer can refer to the objects of its request (`given`).
    """

    def __init__(self, given: Iterable[Any] = ()) -> None:
        self.objects = list(given)
        self._numbers = {id(value): number for number, value in enumerate(self.objects)}
        self._written: set[int] = set()

    def unchanged(self) -> None:
        self._written.update(range(len(self.objects)))

    def write(self, value: Any, other: Callable[[Any], Any]) -> Any:
        """Plain data as a tree for JSON; `other` writes any other value."""
        kind = type(value)
        if kind.__name__ not in _CHANGE or not (kind in (*CONTAINERS, bytearray) or _is_known(kind)):
            return self._write(value, other)
        number = self._numbers.setdefault(id(value), len(self.objects))
        if number in self._written:
            return ["again", number]
        self._written.add(number)
        if number < len(self.objects):
            return ["mine", [number, self._write(value, other)]]
        self.objects.append(value)
        return self._write(value, other)

    def _write(self, value: Any, other: Callable[[Any], Any]) -> Any:  # noqa: PLR0911 - one for each kind
        kind = type(value)
        if value is None or kind in (bool, float, str):
            return value
        if kind is int:
            return value if -_SMALL < value < _SMALL else ["int", hex(value)]
        if kind is dict:
            pairs = value.items()
            return ["dict", [[self.write(key, other), self.write(item, other)] for key, item in pairs]]
        if kind in CONTAINERS:
            return [kind.__name__, [self.write(item, other) for item in value]]
        if kind in (bytes, bytearray):
            return [kind.__name__, value.hex()]
        if kind is complex:
            return ["complex", [value.real, value.imag]]
        if kind in (range, slice):
            return [kind.__name__, [self.write(one, other) for one in (value.start, value.stop, value.step)]]
        if value is Ellipsis:
            return ["Ellipsis", None]
        if kind is type and value in _TYPES.values():
            return ["type", value.__name__]
        if _is_known(kind):
            name = (kind.__module__, kind.__name__)
            return ["known", [*name, [self.write(part, other) for part in KINDS[name](value)]]]
        return other(value)

    def read(self, tree: Any, other: Callable[[str, Any], Any]) -> Any:
        """The value of a tree; `other` reads what is not plain data."""
        if not isinstance(tree, list):
            return tree
        kind, inner = tree
        if kind == "again":
            return self.objects[inner]
        if kind == "mine":
            number, (kind, inner) = inner
            return self._filled(self.objects[number], kind, inner, other)
        if kind in ("list", "dict", "set", "bytearray"):
            self.objects.append(_TYPES[kind]())
            return self._filled(self.objects[-1], kind, inner, other)
        if kind == "known" and inner[1] in _CHANGE:
            self.objects.append(None)  # its number comes before those of its contents
            number = len(self.objects) - 1
            self.objects[number] = self._read(kind, inner, other)
            return self.objects[number]
        return self._read(kind, inner, other)

    def _filled(self, old: Any, kind: str, inner: Any, other: Callable[[str, Any], Any]) -> Any:
        new = self._read(kind, inner, other)
        if type(new) is not type(old):
            raise TypeError(f"a {type(old).__name__} of the tests cannot become a {type(new).__name__}")
        _CHANGE[type(old).__name__](old, new)
        return old

    def _read(self, kind: str, inner: Any, other: Callable[[str, Any], Any]) -> Any:  # noqa: PLR0911 - one for each
        if kind == "int":
            return int(inner, 16)
        if kind == "dict":
            return {self.read(key, other): self.read(item, other) for key, item in inner}
        if kind in ("list", "tuple", "set", "frozenset"):
            return _TYPES[kind](self.read(item, other) for item in inner)
        if kind in ("bytes", "bytearray"):
            return _TYPES[kind].fromhex(inner)
        if kind in ("complex", "range", "slice"):
            return _TYPES[kind](*(self.read(item, other) for item in inner))
        if kind == "Ellipsis":
            return Ellipsis
        if kind == "type":
            return _TYPES[inner]
        if kind == "known":
            module, name, parts = inner
            if (module, name) not in KINDS:
                raise ValueError(f"{module}.{name} does not travel")
            return getattr(__import__(module), name)(*(self.read(part, other) for part in parts))
        return other(kind, inner)
