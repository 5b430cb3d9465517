"""Which dialect the servers of a run speak."""

from __future__ import annotations

from streamrl.config import RunConfig
from streamrl.servers.dialect import Dialect


def make_dialect(config: RunConfig) -> Dialect:
    """Return the dialect of `engine.kind`; `hf` is that of `streamrl engines serve`."""
    kind = config.engine.kind
    if kind == "vllm":
        from streamrl.servers.vllm import VllmDialect

        return VllmDialect(config)
    if kind == "sglang":
        from streamrl.servers.sglang import SglangDialect

        return SglangDialect(config)
    if kind == "openai":
        from streamrl.servers.openai import OpenaiDialect

        return OpenaiDialect(config)
    from streamrl.servers.native import NativeDialect

    return NativeDialect(config)
