"""Engines: what generates inside a rollout replica."""

from __future__ import annotations

from streamrl.config import RunConfig
from streamrl.producers.engines.contract import Completion, Engine, EngineLoad, Request

__all__ = ["Completion", "Engine", "EngineLoad", "Request", "make_engine"]


def make_engine(config: RunConfig, seed: int) -> Engine:
    """The engine that `config.engine.kind` names, not yet started.

    Args:
        config: the run.
        seed: of the sampling; every replica, and every start of a replica, needs another one.
    """
    from streamrl.producers.engines.hf import HfEngine

    return HfEngine(config, seed)
