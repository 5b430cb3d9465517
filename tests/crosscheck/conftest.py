"""The environment of trl, and all of its answers at once: starting it takes longer than all cases together."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.needs import missing

sys.path.insert(0, str(Path(__file__).parent))

ROOT = Path(__file__).parents[2]
PYTHON = ROOT / ".crosscheck" / "bin" / "python"


@pytest.fixture(scope="session")
def trl_python() -> Path:
    """Interpreter of the environment that has trl; the test ends where it is missing."""
    if not PYTHON.exists():
        missing(f"no {PYTHON.relative_to(ROOT)}: `make crosscheck` makes it")
    return PYTHON


@pytest.fixture(scope="session")
def both_sides(trl_python: Path, tmp_path_factory: pytest.TempPathFactory) -> object:
    """Inputs and trl's answers to all cases."""
    from both import Both

    folder = tmp_path_factory.mktemp("crosscheck")
    both = Both(folder)
    both.write()
    command = [str(trl_python), str(Path(__file__).parent / "trl_side.py"), str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    both.read()
    return both
