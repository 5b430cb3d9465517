"""Every test that docs/bad_input.md names is there."""

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_the_page_names_tests_that_exist():
    named = re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", (ROOT / "docs" / "bad_input.md").read_text())
    assert len(named) > 60
    missing = [f"{path}::{name}" for path, name in named if f"def {name}(" not in (ROOT / path).read_text()]
    assert not missing
