"""The learner host's side of a transport: what stands between the files of a version and the engines.

For `shm` and `directory` the files are the transport and an outlet does nothing; for `http` it serves them; for
`collective` it serves and broadcasts them.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from streamrl.config import RunConfig
from streamrl.weight_sync.bearer import make_token
from streamrl.weight_sync.manifest import Manifest

if TYPE_CHECKING:
    from streamrl.weight_sync.broadcaster import Broadcaster

logger = logging.getLogger(__name__)


class Outlet(Protocol):
    """How versions leave the learner's host; rank 0 of the learner has one."""

    def sources(self) -> list[str]:
        """URLs for `Manifest.sources`; constant while the outlet is open, empty for `shm` and `directory`."""
        ...

    async def announce(self, manifest: Manifest) -> None:
        """Say that the files of a version are there, under their final names.

        Returns at once, whatever the engines do: a broadcast goes on in a task of the outlet, and a version that is
        announced before the one before it was sent takes its place. A repeat of the newest version does nothing.
        """
        ...


class _Files:
    """`shm` and `directory`: whoever sees the files has them."""

    def sources(self) -> list[str]:
        return []

    async def announce(self, manifest: Manifest) -> None:
        del manifest


class _Server:
    """`http`: the files are served."""

    def __init__(self, url: str) -> None:
        self._url = url

    def sources(self) -> list[str]:
        return [self._url]

    async def announce(self, manifest: Manifest) -> None:
        del manifest


class _Broadcast(_Server):
    """`collective`: the files are sent to all members, and served to whoever missed that."""

    def __init__(self, url: str, broadcaster: Broadcaster) -> None:
        super().__init__(url)
        self._broadcaster = broadcaster

    async def announce(self, manifest: Manifest) -> None:
        self._broadcaster.announce(manifest)


@contextlib.asynccontextmanager
async def open_outlet(config: RunConfig, run_dir: Path, root: Path) -> AsyncIterator[Outlet]:
    """Open the outlet of the configured transport for the length of the block.

    Args:
        config: of the run; `weights` says which transport, host and port.
        run_dir: of the run; the bearer token of the http transport lies in it.
        root: folder that holds the folders of the versions (`Publisher.root`).

    Raises:
        CannotCreate: the port is taken, or the token cannot be written.
    """
    weights = config.weights
    if weights.transport not in ("http", "collective"):
        yield _Files()
        return
    from streamrl.weight_sync.shard_server import ShardServer, listen

    server = ShardServer(root, make_token(run_dir))
    if weights.transport == "http":
        async with listen(server.app(), weights.host, weights.port) as url:
            yield _Server(url)
        return
    from streamrl.weight_sync.broadcaster import Broadcaster

    broadcaster = Broadcaster(root, weights.host, weights.deadline)
    async with listen(server.app(broadcaster.routes()), weights.host, weights.port) as url:
        running = asyncio.create_task(broadcaster.run(), name="broadcast weights")
        running.add_done_callback(_tell)
        try:
            yield _Broadcast(url, broadcaster)
        finally:
            running.cancel()
            await asyncio.wait([running])


def _tell(running: asyncio.Task[None]) -> None:
    """Say at once what ended the broadcasts; replicas pull from then on, and training goes on."""
    if not running.cancelled() and (error := running.exception()) is not None:
        logger.error("weights broadcast ended: replicas pull from now on", exc_info=error)
