"""How the files of a version get onto this host: they are there already, they are pulled, or they are broadcast."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Protocol

from streamrl.config import WeightsConfig
from streamrl.errors import WeightsError
from streamrl.weight_sync.hosts import Board
from streamrl.weight_sync.manifest import MANIFEST_FILE, Manifest, Pair, decode, folder_name
from streamrl.weight_sync.spool import Spool
from streamrl.weight_sync.transports import make_transport

_LOOKS: Final = 4
_LOOK_PAUSE: Final = 0.05


@dataclass
class Traffic:
    """What was fetched since the start; only grows.

    Attributes:
        bytes: received over the network, those of broken transfers too.
        seconds: spent fetching.
    """

    bytes: int = 0
    seconds: float = 0.0

    @contextlib.contextmanager
    def timed(self) -> Iterator[None]:
        """Add the time of the block to `seconds`."""
        began = time.monotonic()
        try:
            yield
        finally:
            self.seconds += time.monotonic() - began


class Source(Protocol):
    """Where versions come from. All methods belong to one event loop; fetches may overlap."""

    @property
    def proves(self) -> bool:
        """Whether the files that `fetch` returns have the sizes and checksums of their manifest, and are our own.

        Otherwise whoever reads them has to prove that, and must not write to them.
        """
        ...

    @property
    def traffic(self) -> Traffic:
        """What was fetched."""
        ...

    async def fetch(self, manifest: Manifest) -> Path:
        """Return the folder that holds all files of a version.

        What is here already is not fetched again, and a fetch that failed or was cancelled is gone on with by the next.

        Raises:
            FileNotFoundError: nobody has the version any more.
            WeightsError: its files are not what the manifest says.
            Unreachable: not fetched within `weights.deadline`; trying again may help.
            CannotCreate: no room for the files.
        """
        ...

    async def base_of(self, manifest: Manifest) -> Manifest:
        """Return the manifest of the version that a delta needs; raises like `fetch`."""
        ...


class FolderSource:
    """`shm` and `directory`: the publisher's own files, which others read too."""

    proves = False

    def __init__(self, root: Path) -> None:
        self._root = root
        self.traffic = Traffic()

    async def fetch(self, manifest: Manifest) -> Path:
        """See `Source`."""
        folder = self._root / manifest.folder
        await self._look(folder / MANIFEST_FILE)
        return folder

    async def base_of(self, manifest: Manifest) -> Manifest:
        """See `Source`."""
        pair = base_pair(manifest)
        data = await self._look(self._root / folder_name(*pair) / MANIFEST_FILE)
        return checked_base(decode(data), manifest)

    async def _look(self, path: Path) -> bytes:
        # A shared file system may show a rename a moment later than Redis shows the manifest.
        for attempt in range(_LOOKS):
            try:
                return await asyncio.to_thread(path.read_bytes)
            except OSError:
                if attempt == _LOOKS - 1:
                    raise
            await asyncio.sleep(_LOOK_PAUSE * 2**attempt)
        raise AssertionError


def base_pair(manifest: Manifest) -> Pair:
    """Return the pair of the version that a delta needs; `WeightsError` for a full version."""
    if manifest.base is None:
        raise WeightsError(f"version {manifest.version} is no delta")
    return manifest.base


def checked_base(base: Manifest, manifest: Manifest) -> Manifest:
    """Return `base` when it is what the delta `manifest` names; `WeightsError` otherwise."""
    if base.pair != manifest.base or base.run != manifest.run or base.pair >= manifest.pair:
        raise WeightsError(f"the base of version {manifest.pair} should be {manifest.base}, not {base.pair}")
    return base


@contextlib.asynccontextmanager
async def open_source(
    config: WeightsConfig, run_dir: Path, *, name: str, board: Board | None = None
) -> AsyncIterator[tuple[Source, Spool]]:
    """Open the source of the configured transport, with the spool of this replica, for the length of the block.

    Args:
        config: `transport` and `deadline` count.
        run_dir: of the run.
        name: of the replica.
        board: where neighbours that relay announce themselves; None: only the learner's host is asked.

    Raises:
        CannotCreate: the spool cannot be made.
        ConfigError: no token for the http transport.
    """
    spool = Spool(run_dir, name)
    if config.transport in ("http", "collective") or config.delta.enabled:
        spool.open()
    try:
        if config.transport not in ("http", "collective"):
            yield FolderSource(make_transport(config.transport, run_dir).root), spool
            return
        from streamrl.weight_sync.pull import HttpSource

        async with HttpSource(spool, run_dir, config.deadline, name=name, board=board) as pulled:
            if config.transport == "http":
                yield pulled, spool
                return
            from streamrl.weight_sync.member import CollectiveSource

            async with CollectiveSource(pulled, spool, config.deadline, name=name) as source:
                yield source, spool
    finally:
        spool.close()
