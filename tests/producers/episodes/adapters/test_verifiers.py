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
    """Its files in the home directory go into one of the test."""
    command = [
        python_of("verifiers"),
        "-m",
        "pytest",
        "-q",
        "-p",
        "no:cacheprovider",
        "-n0",
        HERE / "verifiers_cases.py",
    ]
    variables = {**os.environ, "PYTHONPATH": str(HERE), "HOME": str(tmp_path)}
    done = subprocess.run(
        command,
        capture_output=True,
        text=True,
        timeout=110,
        check=False,
        cwd=ROOT,
        env=variables,
        stdin=subprocess.DEVNULL,
    )
    assert done.returncode == 0, done.stdout[-8000:]
