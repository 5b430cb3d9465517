"""Rules that are opened and closed as a worker does it."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import TypeVar

from streamrl.config import RunConfig
from streamrl.consumers import Reward, RewardContext

_R = TypeVar("_R", bound=Reward)
TOWER = r"\boxed{9^{9^{9^{9}}}}"
"""What no computer can compute."""


@contextlib.asynccontextmanager
async def opened(rule: _R) -> AsyncIterator[_R]:
    """The rule, open; it is closed at the end of the block."""
    try:
        await rule.open(RewardContext(RunConfig.model_validate({}), Path.cwd()))
        yield rule
    finally:
        await rule.close()
