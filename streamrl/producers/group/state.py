"""What every server of a group has to be brought to: the newest weights, adapters, pause and sleep."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import TypeAlias

from streamrl.engine import Engine, PauseMode
from streamrl.errors import WeightsError
from streamrl.weight_sync.manifest import Pair
from streamrl.weight_sync.tensors import Version

Apply: TypeAlias = Callable[[Version], Awaitable[None]]
Source: TypeAlias = Callable[[Apply], Awaitable[object]]
"""Hands the newest version to an `apply`, as often as it is asked to (`Follower.again`)."""


class WeightTracker:
    """The newest version, and where a server gets it.

    Attributes:
        target: the newest version that there is; None before the first.
    """

    def __init__(self) -> None:
        self.target: Pair | None = None
        self._kept: Version | None = None
        self._source: Source | None = None

    @property
    def has_source(self) -> bool:
        """Whether the newest version can be had again later; if not, the last one that came is kept."""
        return self._source is not None

    def follow(self, source: Source) -> None:
        """Take versions from `source`, instead of keeping the last one that came."""
        self._source = source

    def begin(self, version: Version) -> None:
        """Note the newest version, which is handed out until `end`.

        Raises:
            WeightsError: it is older than the one before.
        """
        if self.target is not None and version.pair < self.target:
            raise WeightsError(f"version {version.pair} is older than {self.target}, which is in force")
        self.target, self._kept = version.pair, version

    def end(self, version: Version) -> None:
        """The caller takes the version back; without a source it is kept for servers that come later."""
        if self._source is not None and self._kept is version:
            self._kept = None

    async def deliver(self, apply: Apply) -> None:
        """Hand the newest version to `apply`: the one that has just come, else what the source has."""
        kept = self._kept
        if kept is not None:
            with kept.readers:
                await apply(kept)
        elif self._source is not None:
            await self._source(apply)


class EngineGroupState:
    """What a server has to be told when it comes up.

    Attributes:
        weights: the newest version.
        awake: set while servers may use their devices.
        paused: how the group was paused; None when it was not.
        adapters: folders by name. They have to stay: servers that come later load them as well.
    """

    def __init__(self) -> None:
        self.weights = WeightTracker()
        self.awake = asyncio.Event()
        self.awake.set()
        self.paused: PauseMode | None = None
        self.adapters: dict[str, Path] = {}

    async def equip(self, engine: Engine) -> None:
        """Load the adapters into a server that has just started, and pause it if the group is paused."""
        for name, folder in self.adapters.items():
            await engine.load_adapter(name, folder)
        if self.paused is not None:
            await engine.pause(self.paused)
