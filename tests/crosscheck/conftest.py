"""What trl answers: as it was kept, and by itself, all of it at once."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tests.needs import missing

sys.path.insert(0, str(Path(__file__).parent))


@pytest.fixture(scope="session")
def trl_python() -> Path:
    """Interpreter of the environment that has trl; the test ends where it is missing."""
    from both import PYTHON

    if not PYTHON.exists():
        missing("no .crosscheck: `make crosscheck` makes it")
    return PYTHON


@pytest.fixture(scope="session")
def both_sides(tmp_path_factory: pytest.TempPathFactory) -> object:
    """Inputs, and the answers of trl that were kept."""
    from both import Both

    both = Both(tmp_path_factory.mktemp("crosscheck"))
    both.recall()
    return both


@pytest.fixture(scope="session")
def with_trl(trl_python: Path, tmp_path_factory: pytest.TempPathFactory) -> object:
    """Inputs, and what trl answers now."""
    from both import Both

    both = Both(tmp_path_factory.mktemp("crosscheck"))
    both.ask()
    return both
