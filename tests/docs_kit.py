"""What tests of the documentation share: its pages, their blocks of code, and the generator of its tables."""

from __future__ import annotations

import functools
import importlib.util
import re
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import NamedTuple

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
PAGES = [ROOT / "README.md", *sorted(DOCS.rglob("*.md"))]


class Block(NamedTuple):
    """A block of code of a page."""

    page: str
    number: int
    language: str
    text: str


@functools.cache
def hooks() -> ModuleType:
    """The module that fills the generated parts of the pages."""
    spec = importlib.util.spec_from_file_location("docs_hooks", DOCS / "hooks.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def blocks(language: str) -> Iterator[Block]:
    """All blocks of one language, page by page."""
    for page in PAGES:
        found = re.findall(rf"^```{language}\n(.*?)^```$", page.read_text(), re.MULTILINE | re.DOTALL)
        for number, text in enumerate(found):
            yield Block(str(page.relative_to(ROOT)), number, language, text)
