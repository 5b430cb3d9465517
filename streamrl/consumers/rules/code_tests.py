"""The tests of a prompt: read from the metadata, and judged after a run."""

from __future__ import annotations

import math
import re
import secrets
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final, Literal, get_args

import orjson

from streamrl.consumers.rules.code_checks import NotTests, read_checks
from streamrl.errors import DataError
from streamrl.sandbox import Execution

Verdict = Literal["passed", "wrong", "crashed", "time", "memory", "output", "unrun"]

VERDICTS: Final[tuple[Verdict, ...]] = get_args(Verdict)
_FORMS: Final = "{input, output}, {call, args, kwargs, output}, {code}, or a text of code"
_SMALLEST: Final = 1e-12
_NUMBER: Final = re.compile(r"[-+]?([0-9]+\.?[0-9]*|\.[0-9]+)([eE][-+]?[0-9]+)?")
"""Numbers as programs print them. `float` would also accept `1_000` and digits of other scripts."""


@dataclass(frozen=True, slots=True)
class CodeTest:
    kind: Literal["stdin", "call", "code"]
    stdin: str  # of the program, or the task of `driver.py` or `checks.py`
    wanted: tuple[Any, ...]  # accepted outputs or results; they never enter the sandbox


class Unchecked(Exception):
    """Code of tests ended without a check and without asking the program for anything."""


class NoModule(Exception):
    """Code of tests imports a module that the programs' interpreter lacks. The argument is its name."""


def read_tests(value: Any, where: str, entry: str | None = None) -> list[CodeTest]:
    """The tests in a value of the metadata; `DataError` if it has another form, or no test.

    `value`: a list of tests, a mapping of `inputs` and `outputs` (with `fn_name` for calls), or either as JSON text;
    any other text is code. `where` names the value in errors. `entry`: function that HumanEval's `check` is called
    with, if a test names none.
    """
    if isinstance(value, str):
        try:
            value = orjson.loads(value)
        except orjson.JSONDecodeError:
            value = [value]
    try:
        if isinstance(value, Mapping):
            tests = _pairs(value)
        elif isinstance(value, list):
            tests = [_test(item, entry) for item in value]
        else:
            raise NotTests(f"is a {type(value).__name__}, not a list of tests")
    except NotTests as error:
        raise DataError(f"{where} {error}", f"a test is {_FORMS}") from None
    if not tests:
        raise DataError(f"{where} is empty", "a response cannot be scored without tests")
    return tests


def judge(test: CodeTest, execution: Execution, tolerance: float) -> Verdict:
    if execution.outcome in {"time", "memory", "output"}:
        return execution.outcome
    if execution.outcome == "signal" or execution.code != 0:
        return "crashed"
    if test.kind == "stdin":
        return "passed" if same_output(execution.stdout, test.wanted[0], tolerance) else "wrong"
    if test.kind == "code":
        if execution.result == f"{test.wanted[0]} unchecked":
            raise Unchecked
        if execution.result.startswith(f"{test.wanted[0]} misses "):
            raise NoModule(execution.result.partition(" misses ")[2])
        return "passed" if execution.result == test.wanted[0] else "wrong"
    try:
        found = orjson.loads(execution.result)
    except orjson.JSONDecodeError:
        return "wrong"
    return "passed" if any(same_value(found, wanted, tolerance) for wanted in test.wanted) else "wrong"


def same_output(found: str, wanted: str, tolerance: float) -> bool:
    """Compare two texts line by line, ignoring white space at the ends of lines, and empty lines at the end.

    With a tolerance above 0, numbers may differ by it, and white space between words does not count.
    """
    lines, others = ([line.strip() for line in text.strip().splitlines()] for text in (found, wanted))
    if lines == others:
        return True
    if not tolerance or len(lines) != len(others):
        return False
    pairs = [(line.split(), other.split()) for line, other in zip(lines, others, strict=True)]
    return all(
        len(words) == len(wanted_words) and all(map(lambda a, b: _same_word(a, b, tolerance), words, wanted_words))
        for words, wanted_words in pairs
    )


def same_value(found: Any, wanted: Any, tolerance: float) -> bool:
    """Compare two JSON values; a whole number equals its float, and true is not 1."""
    waiting = [(found, wanted)]
    while waiting:
        one, other = waiting.pop()
        if isinstance(one, bool) or isinstance(other, bool) or one is None or other is None:
            equal = one is other
        elif isinstance(one, int | float) and isinstance(other, int | float):
            equal = _close(one, other, tolerance)
        elif isinstance(one, list) and isinstance(other, list):
            equal = len(one) == len(other)
            waiting.extend(zip(one, other, strict=False))
        elif isinstance(one, dict) and isinstance(other, dict):
            equal = one.keys() == other.keys()
            waiting.extend((one[key], other[key]) for key in one if key in other)
        else:
            equal = one == other
        if not equal:
            return False
    return True


def _same_word(found: str, wanted: str, tolerance: float) -> bool:
    if found == wanted:
        return True
    if not _NUMBER.fullmatch(found) or not _NUMBER.fullmatch(wanted):
        return False
    for kind in (int, float):
        try:
            one, other = kind(found), kind(wanted)
        except ValueError:
            continue
        return math.isfinite(one) and _close(one, other, tolerance)
    return False


def _close(one: float, other: float, tolerance: float) -> bool:
    if one == other or not tolerance or (isinstance(one, int) and isinstance(other, int)):
        return one == other  # whole numbers must be equal
    return math.isclose(one, other, rel_tol=tolerance, abs_tol=_SMALLEST)


def _pairs(value: Mapping[str, Any]) -> list[CodeTest]:
    """Read `inputs` and `outputs`, the form of APPS, TACO and verl's code rewards."""
    inputs, outputs = value.get("inputs"), value.get("outputs")
    if not isinstance(inputs, list) or not isinstance(outputs, list) or len(inputs) != len(outputs):
        raise NotTests("is a mapping without lists `inputs` and `outputs` of the same length")
    name = value.get("fn_name")
    if name is None:
        return [_program(given, wanted) for given, wanted in zip(inputs, outputs, strict=True)]
    tests = []
    for given, wanted in zip(inputs, outputs, strict=True):
        test = _call({"call": name, "args": given if isinstance(given, list) else [given], "output": wanted})
        alone = wanted[0] if isinstance(wanted, list) and len(wanted) == 1 else wanted  # these data sets use both forms
        tests.append(CodeTest("call", test.stdin, (wanted, alone)))
    return tests


def _test(item: Any, entry: str | None) -> CodeTest:
    if isinstance(item, str):
        return _code(item, entry)
    if not isinstance(item, Mapping):
        raise NotTests(f"has a {type(item).__name__} among its tests")
    if "call" in item:
        return _call(item)
    if "code" in item:
        return _code(item["code"], item.get("entry_point", entry))
    if "input" in item and "output" in item:
        return _program(item["input"], item["output"])
    raise NotTests(f"has a test with the keys {', '.join(map(str, item)) or 'none'}")


def _program(given: Any, wanted: Any) -> CodeTest:
    texts = [
        "\n".join(text) if isinstance(text, list) and all(isinstance(line, str) for line in text) else text
        for text in (given, wanted)
    ]
    if not all(isinstance(text, str) for text in texts):
        raise NotTests("has an `input` or `output` that is not text")
    return CodeTest("stdin", texts[0], (texts[1],))


def _call(item: Mapping[str, Any]) -> CodeTest:
    name, args, named = item["call"], item.get("args", []), item.get("kwargs", {})
    if not isinstance(name, str) or not all(part.isidentifier() for part in name.split(".")):
        raise NotTests(f"calls {name!r}, which is not a function name")
    if not isinstance(args, list) or not isinstance(named, Mapping) or "output" not in item:
        raise NotTests(
            f"has a call of {name} without `output`, or whose `args` are not a list or `kwargs` not a mapping"
        )
    return CodeTest("call", orjson.dumps({"call": name, "args": args, "kwargs": named}).decode(), (item["output"],))


def _code(text: Any, entry: Any) -> CodeTest:
    if not isinstance(text, str) or not text.strip():
        raise NotTests("has `code` that is not text, or is empty")
    if entry is not None and not isinstance(entry, str):
        raise NotTests(f"has the entry point {entry!r}, which is not text")
    token = secrets.token_hex(16)
    return CodeTest("code", orjson.dumps({**read_checks(text, entry), "token": token}).decode(), (token,))
