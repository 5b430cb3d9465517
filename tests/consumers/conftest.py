"""Configurations of reward workers on a real Redis."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable

import pytest

from streamrl.config import RunConfig
from tests.consumers.worker_kit import config_of
from tests.redis_kit import RedisRun


@pytest.fixture
def make_config(redis_run: RedisRun, monkeypatch: pytest.MonkeyPatch) -> Callable[..., RunConfig]:
    """Makes configurations on the Redis of the test; what plug-in paths add to `sys.path` goes with the test."""
    monkeypatch.setattr(sys, "path", list(sys.path))
    return functools.partial(config_of, redis_run.config)
