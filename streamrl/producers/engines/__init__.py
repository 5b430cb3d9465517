"""Engines: what generates inside a rollout replica."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from streamrl.config import RunConfig
from streamrl.engine import Completion, Engine, EngineLoad, Request

if TYPE_CHECKING:
    from streamrl.queues.registry import Enlisted

__all__ = ["Completion", "Engine", "EngineLoad", "Request", "make_engine"]


def make_engine(
    config: RunConfig,
    seed: int,
    run_dir: Path = Path(),
    replica: str = "rollout.0",
    enlisted: Mapping[str, Enlisted] | None = None,
) -> Engine:
    """Make the engine that `config.engine` describes, not yet started: in this process, or a group of servers.

    Every start of every replica needs another seed. The name of the replica's role decides its servers and devices;
    `enlisted` are servers that were added or removed since the run began.
    """
    if config.engine.kind == "hf":
        from streamrl.producers.engines.hf import HfEngine

        return HfEngine(config, seed)
    from streamrl.producers.group.fleet import Fleet

    return Fleet(config, seed, run_dir, replica).group(enlisted or {})
