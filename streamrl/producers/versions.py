"""A doorbell for new versions of the weights: the moment a learner's step makes room for more groups."""

from __future__ import annotations

import asyncio
from typing import Final, Protocol

_LOOK_SECONDS: Final = 0.5


class Versions(Protocol):
    """What the bell needs of the weights stream (streamrl.queues)."""

    async def newest(self) -> tuple[int, bytes] | None:
        """Return number and manifest of the newest version, None before the first."""
        ...

    async def after(self, version: int, seconds: float) -> tuple[int, bytes] | None:
        """Return the newest version above `version`, waiting up to `seconds` for one."""
        ...


class VersionBell:
    """Shares one blocking read of the weights stream among all tasks of a process.

    Args:
        stream: the weights stream.
    """

    def __init__(self, stream: Versions) -> None:
        self._stream = stream
        self._rung = asyncio.Condition()
        self.version = 0

    async def run(self, stop: asyncio.Event) -> None:
        """Watch the stream until `stop` is set; owned by the caller's task group."""
        while not stop.is_set():
            found = await self._stream.after(self.version, _LOOK_SECONDS)
            if found is not None:
                async with self._rung:
                    self.version = found[0]
                    self._rung.notify_all()

    async def wait(self, version: int, seconds: float) -> bool:
        """Return True as soon as a version above `version` is known, False after `seconds`. Cancelling is harmless."""
        try:
            async with asyncio.timeout(seconds), self._rung:
                await self._rung.wait_for(lambda: self.version > version)
        except TimeoutError:
            return False
        return True
