"""The Lua scripts of the ledger: their text and the digest that Redis knows them by.

Each file of `lua/` says in its header what KEYS and ARGV are, what it returns and what a repeat does. Every script may
be sent twice: that is what lets the connection retry after a lost reply.
"""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass
from functools import cache
from importlib.resources import files


@dataclass(frozen=True)
class Script:
    """Text of a script with its includes, and its SHA-1 as EVALSHA wants it."""

    name: str
    text: str
    digest: str


@cache
def load_scripts() -> dict[str, Script]:
    """Read all scripts of the package, by name."""
    folder = files("streamrl.queues") / "lua"
    texts = {item.name.removesuffix(".lua"): item.read_text("utf-8") for item in folder.iterdir()}
    return {name: _build(name, texts) for name in texts if not name.startswith("_")}


def _build(name: str, texts: dict[str, str]) -> Script:
    include = re.search(r"^-- include ([\w ]+)$", texts[name], re.MULTILINE)
    parts = [texts[part] for part in include.group(1).split()] if include else []
    text = "\n".join([*parts, texts[name]])
    # Redis identifies scripts by SHA-1; nothing here depends on it being hard to forge.
    return Script(name, text, hashlib.sha1(text.encode(), usedforsecurity=False).hexdigest())
