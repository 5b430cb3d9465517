"""The transports: for each kind, how replicas get the files of a version and what the learner's host does for that.

A new transport is a kind in `WeightsConfig.transport`, a module, and an entry in each of the two functions here.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator
from pathlib import Path

from streamrl.config import RunConfig, WeightsConfig
from streamrl.queues.registry import RoleRegistry
from streamrl.weight_sync.broadcast import Broadcaster, CollectiveSource
from streamrl.weight_sync.files import StagingFolder, make_token, store_of
from streamrl.weight_sync.manifest import Manifest
from streamrl.weight_sync.pull import HttpSource
from streamrl.weight_sync.serve import ShardServer, listen
from streamrl.weight_sync.source import FolderSource, WeightSource

logger = logging.getLogger(__name__)


@contextlib.asynccontextmanager
async def open_source(
    config: WeightsConfig, run_dir: Path, staging: StagingFolder, *, name: str, board: RoleRegistry | None = None
) -> AsyncIterator[WeightSource]:
    """Open the source of the configured transport on a replica's host, for the length of the block.

    `staging` must be open, unless the transport is a folder. `board` is where neighbours that relay announce
    themselves. `ConfigError`: no token for the http transport.
    """
    if not config.pulled:
        yield FolderSource(store_of(config.transport, run_dir).root)
        return
    async with HttpSource(staging, run_dir, config.deadline, name=name, board=board) as pulled:
        if config.transport == "http":
            yield pulled
        else:
            async with CollectiveSource(pulled, staging, config.deadline, name=name) as source:
                yield source


class WeightServer:
    """How versions leave the learner's host; rank 0 of the learner has one.

    For `shm` and `directory` the files are the transport and nothing happens here; `http` serves them; `collective`
    serves and broadcasts them.
    """

    def __init__(self, url: str = "", broadcaster: Broadcaster | None = None) -> None:
        self._url, self._broadcaster = url, broadcaster

    def sources(self) -> list[str]:
        """Return the URLs for `Manifest.sources`; constant, empty for `shm` and `directory`."""
        return [self._url] if self._url else []

    async def announce(self, manifest: Manifest) -> None:
        """Say that the files of a version are there, under their final names.

        Returns at once: a broadcast goes on in a task of the server, and a version that is
        announced before the one before it was sent takes its place. A repeat of the newest version does nothing.
        """
        if self._broadcaster is not None:
            self._broadcaster.announce(manifest)


@contextlib.asynccontextmanager
async def open_server(config: RunConfig, run_dir: Path, root: Path) -> AsyncIterator[WeightServer]:
    """Open the learner host's side of the configured transport for the length of the block.

    `root` holds the folders of the versions. `CannotCreate`: the port is taken, or the token cannot be written.
    """
    weights = config.weights
    if not weights.pulled:
        yield WeightServer()
        return
    server = ShardServer(root, make_token(run_dir))
    if weights.transport == "http":
        async with listen(server.app(), weights.host, weights.port) as url:
            yield WeightServer(url)
        return
    broadcaster = Broadcaster(root, weights.host, weights.deadline)
    async with listen(server.app(broadcaster.routes()), weights.host, weights.port) as url:
        running = asyncio.create_task(broadcaster.run(), name="broadcast weights")
        running.add_done_callback(_tell)
        try:
            yield WeightServer(url, broadcaster)
        finally:
            running.cancel()
            await asyncio.wait([running])


def _tell(running: asyncio.Task[None]) -> None:
    """Log at once what ended the broadcasts; replicas pull from then on, and training goes on."""
    if not running.cancelled() and (error := running.exception()) is not None:
        logger.error("weights broadcast ended: replicas pull from now on", exc_info=error)
