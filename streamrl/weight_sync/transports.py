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
from streamrl.errors import CannotCreate
from streamrl.store import ObjectStore
from streamrl.weight_sync.broadcast import Broadcaster, CollectiveSource
from streamrl.weight_sync.files import StagingFolder, make_token, read_token, store_of
from streamrl.weight_sync.manifest import MANIFEST_FILE, Manifest, parse_folder
from streamrl.weight_sync.pull import PullSource, from_learner, from_store
from streamrl.weight_sync.serve import listen, weights_app
from streamrl.weight_sync.source import FolderSource, WeightSource

logger = logging.getLogger(__name__)


@contextlib.asynccontextmanager
async def open_source(
    config: WeightsConfig, run_dir: Path, staging: StagingFolder, *, run: str, name: str
) -> AsyncIterator[WeightSource]:
    """Open the source of the configured transport on a replica's host, for the length of the block.

    `staging` must be open, unless the transport is a folder. `ConfigError`: no token for the http transport.
    """
    if not config.pulled:
        yield FolderSource(store_of(config.transport, run_dir).root)
        return
    stored = _stored(config, run)
    opened = from_store(stored) if stored is not None else from_learner(read_token(run_dir))
    async with PullSource(staging, opened, config.deadline) as pulled:
        if config.transport == "http":
            yield pulled
        else:
            async with CollectiveSource(pulled, staging, config.deadline, read_token(run_dir), name=name) as source:
                yield source


class WeightServer:
    """How versions leave the learner's host; rank 0 of the learner has one.

    For `shm` and `directory` the files are the transport and nothing happens here; `http` serves them, or copies them
    to the store at `weights.url`; `collective` serves and broadcasts them.
    """

    def __init__(
        self, url: str = "", broadcaster: Broadcaster | None = None, stored: tuple[Path, ObjectStore] | None = None
    ) -> None:
        self._url, self._broadcaster, self._stored = url, broadcaster, stored
        self._copied: set[str] = set()

    def sources(self) -> list[str]:
        """Return the URLs for `Manifest.sources`; constant, empty where replicas know the place."""
        return [self._url] if self._url else []

    def store(self, manifest: Manifest) -> None:
        """Copy a version to the store, its manifest last, and remove older ones; blocks.

        Those of this learner go when this host has removed them, those of others when there are two of its own.
        `CannotCreate`: it is not there, and no version may build on it.
        """
        if self._stored is None:
            return
        root, store = self._stored
        try:
            for file in [*(shard.file for shard in manifest.files), MANIFEST_FILE]:
                store.put(root / manifest.folder / file, f"{manifest.folder}/{file}")
            self._copied.add(manifest.folder)
            for name in store.names():
                pair = parse_folder(name)
                if pair is None or pair >= manifest.pair:
                    continue
                if not (root / name).exists() if name in self._copied else len(self._copied) > 1:
                    store.remove(name)
        except OSError as error:
            raise CannotCreate(str(error), "fix the store at weights.url, or leave it out") from error

    async def announce(self, manifest: Manifest) -> None:
        """Say that the files of a version are there, under their final names.

        Returns at once: a broadcast goes on in a task of the server, and a version that is
        announced before the one before it was sent takes its place. A repeat of the newest version does nothing.
        """
        if self._broadcaster is not None:
            self._broadcaster.announce(manifest.offered)


@contextlib.asynccontextmanager
async def open_server(config: RunConfig, run_dir: Path, root: Path) -> AsyncIterator[WeightServer]:
    """Open the learner host's side of the configured transport for the length of the block.

    `root` holds the folders of the versions. `CannotCreate`: the port is taken, or the token cannot be written.
    """
    weights = config.weights
    stored = _stored(weights, config.name)
    if stored is not None:
        yield WeightServer(stored=(root, stored))
        return
    if not weights.pulled:
        yield WeightServer()
        return
    token = make_token(run_dir)
    if weights.transport == "http":
        async with listen(weights_app(root, token), weights.host, weights.port) as url:
            yield WeightServer(url)
        return
    broadcaster = Broadcaster(root, weights.host, weights.deadline)
    async with listen(weights_app(root, token, broadcaster.routes()), weights.host, weights.port) as url:
        running = asyncio.create_task(broadcaster.run(), name="broadcast weights")
        running.add_done_callback(_tell)
        try:
            yield WeightServer(url, broadcaster)
        finally:
            running.cancel()
            await asyncio.wait([running])


def _stored(weights: WeightsConfig, run: str) -> ObjectStore | None:
    return None if weights.url is None else ObjectStore(f"{weights.url.rstrip('/')}/{run}", "weights.url")


def _tell(running: asyncio.Task[None]) -> None:
    """Log at once what ended the broadcasts; replicas pull from then on, and training goes on."""
    if not running.cancelled() and (error := running.exception()) is not None:
        logger.error("weights broadcast ended: replicas pull from now on", exc_info=error)
