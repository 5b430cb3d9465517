"""Interpreters that have a package which cannot be installed beside those of the project (`make adapters`)."""

from __future__ import annotations

from pathlib import Path

from tests.needs import missing

ROOT = Path(__file__).parents[4]


def python_of(package):
    """The interpreter of an environment; the test ends where it is missing."""
    python = ROOT / ".adapters" / package / "bin" / "python"
    if not python.exists():
        missing(f"no {python.relative_to(ROOT)}: `make adapters` makes it")
    return python
