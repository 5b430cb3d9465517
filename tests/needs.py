"""What a test needs of its machine beyond what the Makefile installs: the test is skipped where it is missing.

With `NO_SKIPS` set it fails instead: CI sets it after it has installed all that tests need (`.ci/run`).
"""

from __future__ import annotations

import os
import shutil
from typing import NoReturn

import pytest


def missing(what: str) -> NoReturn:
    """End the test for want of something; `what` says so in one line."""
    line = " ".join(what.split())
    if os.environ.get("NO_SKIPS"):
        pytest.fail(line)
    pytest.skip(line)


def need_programs(*names: str) -> None:
    """End the test unless these programs are on PATH."""
    if absent := [name for name in names if shutil.which(name) is None]:
        missing(f"not on PATH: {', '.join(absent)}")
