"""Tests of what a machine lacks: skipped with a reason, remembered, run alone once it is there."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
NEEDY = """
import pytest
from tests.needs import missing, need_programs

@pytest.fixture(scope="module")
def program():
    need_programs("odd-program")

@pytest.mark.parametrize("name", ["a b", "c"])
def test_needy(program, name):
    pass

def test_of_two_lines():
    missing("no odd thing:\\n  make it")

def test_modest():
    pass
"""


def pytest_in(folder: Path, *words: str, **environment: str) -> tuple[int, str]:
    plugins = ["tests.skipped", "xdist"] if "-n" in words else ["tests.skipped"]
    command = [sys.executable, "-m", "pytest", "-ra", "--rootdir", folder, *(f"-p{name}" for name in plugins)]
    clean = {name: value for name, value in os.environ.items() if name not in ("NO_SKIPS", "PYTEST_ADDOPTS")}
    clean = {name: value for name, value in clean.items() if not name.startswith("PYTEST_XDIST")}
    environment = clean | {"PYTHONPATH": str(ROOT), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"} | environment
    done = subprocess.run(
        [*command, *words, folder], env=environment, capture_output=True, text=True, timeout=100, check=False
    )
    return done.returncode, done.stdout + done.stderr


@pytest.fixture
def project(tmp_path: Path) -> Path:
    (tmp_path / "test_needy.py").write_text(NEEDY)
    (tmp_path / "test_broken.py").write_text("raise RuntimeError('a file without skipped tests is not read again')\n")
    return tmp_path


def test_what_was_skipped_is_run_alone_once_the_program_is_there(project: Path, tmp_path_factory):
    code, said = pytest_in(project, "--only-skipped")
    assert (code, "no run is remembered" in said) == (4, True), said
    code, said = pytest_in(project, "-n", "2", "--ignore", str(project / "test_broken.py"))
    assert (code, "1 passed, 3 skipped" in said) == (0, True), said
    assert re.search(r"^SKIPPED \[2\].*not on PATH: odd-program$", said, re.MULTILINE), said
    assert re.search(r"^SKIPPED \[1\].*no odd thing: make it$", said, re.MULTILINE), said
    code, said = pytest_in(project, "--only-skipped", NO_SKIPS="1")
    assert (code, "1 failed, 1 deselected, 2 errors" in said) == (1, True), said
    program = tmp_path_factory.mktemp("bin") / "odd-program"
    program.touch(mode=0o755)
    path = os.pathsep.join([str(program.parent), os.environ["PATH"]])
    code, said = pytest_in(project, "--only-skipped", "-k", "not two_lines", NO_SKIPS="1", PATH=path)
    assert (code, "2 passed" in said) == (0, True), said


def test_nothing_was_skipped_or_a_test_has_gone(project: Path):
    (project / "test_broken.py").unlink()
    assert pytest_in(project, "-k", "modest")[0] == 0
    assert pytest_in(project, "--only-skipped")[0] == 0, "nothing to run is no failure"
    assert pytest_in(project)[0] == 0
    (project / "test_needy.py").write_text(NEEDY.replace("test_of_two_lines", "test_renamed"))
    code, said = pytest_in(project, "--only-skipped", "-n", "2")
    assert (code, "test_of_two_lines was skipped by the last run and is not there now" in said) == (1, True), said
