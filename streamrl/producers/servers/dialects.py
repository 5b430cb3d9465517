"""Which dialect the servers of a run speak."""

from __future__ import annotations

from streamrl.config import RunConfig
from streamrl.producers.servers.dialect import Dialect


def make_dialect(config: RunConfig) -> Dialect:
    """Return the dialect of `engine.kind`; `hf` is that of `streamrl engines serve`."""
    kind = config.engine.kind
    if kind == "vllm":
        from streamrl.producers.servers.vllm import VllmDialect

        return VllmDialect(config)
    if kind == "sglang":
        from streamrl.producers.servers.sglang import SglangDialect

        return SglangDialect(config)
    if kind == "openai":
        from streamrl.producers.servers.openai import OpenaiDialect

        return OpenaiDialect(config)
    from streamrl.producers.servers.native import NativeDialect

    return NativeDialect(config)
