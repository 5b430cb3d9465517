"""What a test needs of its machine: where it is missing, the test fails in CI and is skipped elsewhere."""

from __future__ import annotations

import os
import shutil
from typing import NoReturn

import pytest


def missing(what: str) -> NoReturn:
    """End the test. CI installs all that tests need (`.ci/run`): there a skip would be a proof that nobody made."""
    if os.environ.get("CI"):
        pytest.fail(what)
    pytest.skip(what)


def need_programs(*names: str) -> None:
    """End the test unless these programs are on PATH."""
    if absent := [name for name in names if shutil.which(name) is None]:
        missing(f"not on PATH: {', '.join(absent)}")
