"""The adapter of verifiers against the real package, in an environment that has it."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from .environments import ROOT, python_of

pytestmark = pytest.mark.slow
HERE = Path(__file__).parent


def test_tasks_of_the_package(tmp_path):
    """What verifiers and pytest write is in a directory of the test."""
    command = [python_of("verifiers"), "-m", "pytest", "-q", "-n0", "-o", f"cache_dir={tmp_path}/cache"]
    variables = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST")}
    variables |= {"PYTHONPATH": str(HERE), "HOME": str(tmp_path)}
    cases = HERE / "verifiers_cases.py"
    done = subprocess.run(
        [*command, cases], capture_output=True, text=True, timeout=110, check=False, cwd=ROOT, env=variables
    )
    assert done.returncode == 0, done.stdout[-8000:]
