"""A doorbell for new versions of the weights: the moment a learner's step makes room for more groups."""

from __future__ import annotations

import asyncio
from typing import Final

from streamrl.queues.ledgers import WeightsStream

_LOOK_SECONDS: Final = 0.5


class VersionBell:
    """Shares one blocking read of the weights stream among all tasks of a process.

    Args:
        stream: the weights stream.
    """

    def __init__(self, stream: WeightsStream) -> None:
        self._stream = stream
        self._rung = asyncio.Condition()
        self.version = 0

    async def look(self) -> None:
        """Learn the newest version there is, without waiting for one."""
        newest = await self._stream.newest()
        if newest is not None:
            self.version = newest[0]

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
