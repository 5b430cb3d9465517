"""Rules of the house that a linter does not know: sizes of files and functions, forbidden words."""

from __future__ import annotations

import ast
from collections import Counter
from functools import cache
from pathlib import Path

from streamrl.runtime.logs import RECORD_FIELDS

ROOT = Path(__file__).parent.parent
FILES = sorted((ROOT / "streamrl").rglob("*.py"))
OTHERS = sorted(path for folder in ("tests", "examples", "benchmarks") for path in (ROOT / folder).rglob("*.py"))


@cache
def trees() -> dict[Path, ast.Module]:
    return {path: ast.parse(path.read_text()) for path in FILES}


def test_files_have_at_most_800_lines():
    assert not [str(path) for path in FILES + OTHERS if path.read_text().count("\n") > 800]


def test_modules_say_what_they_are_for():
    assert not [path for path, tree in trees().items() if tree.body and not ast.get_docstring(tree)]


def test_a_class_name_is_used_once():
    names = Counter(
        node.name
        for tree in trees().values()
        for node in tree.body
        if isinstance(node, ast.ClassDef) and not node.name.startswith("_")
    )
    assert [name for name, count in names.items() if count > 1] == []


def test_functions_fit_on_a_screen():
    assert not [
        f"{path}:{node.lineno} {node.name}"
        for path, tree in trees().items()
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and (node.end_lineno or 0) - node.lineno >= 70
    ]


def test_nothing_is_unpickled_anywhere():
    for path, tree in trees().items():
        for node in ast.walk(tree):
            if isinstance(node, ast.Import | ast.ImportFrom):
                names = {alias.name for alias in node.names} | {getattr(node, "module", None)}
                assert not names & {"pickle", "cloudpickle", "dill", "shelve", "marshal"}, path
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
                assert (node.value.id, node.attr) != ("torch", "load"), path
            if isinstance(node, ast.Attribute):  # collectives of torch that pickle
                assert not node.attr.endswith(("gather_object", "object_list")), path


def test_no_vague_names():
    vague = {"manager", "util", "utils", "helper", "helpers", "misc", "common"}
    assert not [path for path in FILES if path.stem in vague]


def test_no_log_line_names_an_extra_like_a_field_of_the_record():
    assert not [
        f"{path}:{node.lineno} {sorted(taken)}"
        for path, tree in trees().items()
        for function in ast.walk(tree)
        if isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef)
        for node in ast.walk(function)
        if isinstance(node, ast.keyword) and node.arg == "extra"
        for taken in [_keys_of(node.value, function) & RECORD_FIELDS]
        if taken
    ]


def _keys_of(value: ast.expr, function: ast.AST) -> set[object]:
    """String keys of all dictionaries in an expression, and in what the function gives to the names in it."""
    names = {node.id for node in ast.walk(value) if isinstance(node, ast.Name)}
    given = [
        node.value
        for node in ast.walk(function)
        if isinstance(node, ast.Assign)
        and {target.id for target in node.targets if isinstance(target, ast.Name)} & names
    ]
    dictionaries = [node for root in (value, *given) for node in ast.walk(root) if isinstance(node, ast.Dict)]
    return {key.value for found in dictionaries for key in found.keys if isinstance(key, ast.Constant)}
