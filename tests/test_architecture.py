"""Rules of the house that a linter does not know: sizes of files and functions, forbidden words."""

from __future__ import annotations

import ast
import statistics
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
FILES = sorted((ROOT / "streamrl").rglob("*.py"))
OTHERS = sorted(path for folder in ("tests", "examples", "benchmarks") for path in (ROOT / folder).rglob("*.py"))


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_files_and_functions_stay_small_and_documented(path: Path):
    text = path.read_text()
    assert text.count("\n") <= 500, "split this file"
    tree = ast.parse(text)
    assert ast.get_docstring(tree) or not text.strip(), "a module says what it is for"
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            assert node.end_lineno is not None
            assert node.end_lineno - node.lineno < 70, f"{node.name} does not fit on a screen"


@pytest.mark.parametrize("path", OTHERS, ids=lambda path: str(path.relative_to(ROOT)))
def test_what_stands_around_the_package_stays_small_too(path: Path):
    assert path.read_text().count("\n") <= 500, "split this file"


def test_half_of_the_files_are_under_150_lines():
    assert statistics.median(path.read_text().count("\n") for path in FILES) < 150


def test_nothing_is_unpickled_anywhere():
    for path in FILES:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import | ast.ImportFrom):
                names = {alias.name for alias in node.names} | {getattr(node, "module", None)}
                assert not names & {"pickle", "cloudpickle", "dill", "shelve", "marshal"}, path
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
                assert (node.value.id, node.attr) != ("torch", "load"), path


def test_no_vague_names():
    vague = {"manager", "util", "utils", "helper", "helpers", "misc", "common"}
    assert not [path for path in FILES if path.stem in vague]
