"""The kinds of servers that generate. A new one is a dialect, its line here, and its name in the configuration."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from streamrl.config import RunConfig
from streamrl.servers.dialect import Dialect
from streamrl.servers.openai import OpenaiDialect
from streamrl.servers.sglang import SglangDialect
from streamrl.servers.vllm import VllmDialect

DIALECTS: Final[Mapping[str, type[Dialect]]] = {
    dialect.kind: dialect for dialect in (VllmDialect, SglangDialect, OpenaiDialect)
}


def make_dialect(config: RunConfig) -> Dialect:
    """Return the dialect of `engine.kind`, which is one of servers."""
    return DIALECTS[config.engine.kind](config)
