"""The transports: for each kind, how replicas get the files of a version and what the learner's host does for that.

A new transport is a kind in `WeightsConfig.transport`, a module, and an entry in each of the two functions here.
"""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Final

import torch

from streamrl.config import RunConfig, WeightsConfig
from streamrl.config.base import SERVER_KINDS
from streamrl.errors import CannotCreate
from streamrl.store import ObjectStore
from streamrl.weight_sync.files import StagingFolder, make_token, read_token, store_of
from streamrl.weight_sync.lane import Lane
from streamrl.weight_sync.manifest import MANIFEST_FILE, LanePlace, Manifest, parse_folder
from streamrl.weight_sync.pull import PullSource, from_learner, from_store
from streamrl.weight_sync.serve import listen, weights_app
from streamrl.weight_sync.source import FolderSource, WeightSource

_HOST: Final = torch.device("cpu")


@contextlib.asynccontextmanager
async def open_source(
    config: WeightsConfig, run_dir: Path, staging: StagingFolder, *, run: str
) -> AsyncIterator[WeightSource]:
    """Open the source of the configured transport on a replica's host; `ConfigError`: no token.

    `staging` must be open, unless the transport is a folder.
    """
    if not config.pulled:
        yield FolderSource(store_of(config.transport, run_dir).root)
        return
    stored = _stored(config, run)
    opened = from_store(stored) if stored is not None else from_learner(read_token(run_dir))
    async with PullSource(staging, opened, config.deadline) as pulled:
        yield pulled


class WeightServer:
    """How versions leave the learner's host; for `shm` and `directory` nothing happens here."""

    def __init__(self, url: str = "", lane: Lane | None = None, stored: tuple[Path, ObjectStore] | None = None) -> None:
        self._url, self._lane, self._stored = url, lane, stored
        self._copied: set[str] = set()

    def sources(self) -> list[str]:
        """For the manifest; empty where replicas know the place."""
        return [self._url] if self._url else []

    @property
    def lane(self) -> LanePlace | None:
        return None if self._lane is None else self._lane.place

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

    def announce(self, manifest: Manifest) -> None:
        """Say, once, that the files of a version are there under their final names; returns at once."""
        if self._lane is not None:
            self._lane.announce(manifest.offered)


@contextlib.asynccontextmanager
async def open_server(
    config: RunConfig, run_dir: Path, root: Path, device: torch.device = _HOST
) -> AsyncIterator[WeightServer]:
    """Open the learner host's side of the configured transport; a broadcast goes out from `device`.

    `CannotCreate`: the port is taken, or the token cannot be written.
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
    async with listen(weights_app(root, token), weights.host, weights.port) as url:
        if weights.transport == "http" or config.engine.kind not in SERVER_KINDS or config.learner.lora.alone:
            yield WeightServer(url)
            return
        lane = Lane(root, weights.host, weights.deadline, token, device)
        try:
            yield WeightServer(url, lane)
        finally:
            await lane.close()


def _stored(weights: WeightsConfig, run: str) -> ObjectStore | None:
    return None if weights.url is None else ObjectStore(f"{weights.url.rstrip('/')}/{run}", "weights.url")
