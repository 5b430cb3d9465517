"""The replica's side: sees the newest version, proves that it is whole, and hands it to the engine."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Final, Protocol, TypeAlias

import torch

from streamrl.config import WeightsConfig
from streamrl.errors import WeightsError
from streamrl.weight_sync.manifest import Manifest, Pair, decode, folder_name
from streamrl.weight_sync.safetensors_file import DTYPE_NAMES, map_shard
from streamrl.weight_sync.transports import make_transport
from streamrl.weight_sync.version import Version

logger = logging.getLogger(__name__)
_LOOK_SECONDS: Final = 0.5
_MAP_ATTEMPTS: Final = 4
_MAP_PAUSE: Final = 0.05

Apply: TypeAlias = Callable[[Version], Awaitable[None]]


class Versions(Protocol):
    """What a follower needs of the weights stream (streamrl.queues.WeightsStream)."""

    async def newest(self) -> tuple[int, bytes] | None:
        """Return number and manifest of the newest version, None before the first."""
        ...

    async def after(self, version: int, seconds: float) -> tuple[int, bytes] | None:
        """Return the newest version above `version`, waiting up to `seconds` for one."""
        ...


class Follower:
    """Follows the newest version of the weights; one in each rollout replica.

    Versions in between are skipped. Whatever is wrong with a version (checksum, size, another run, an older epoch,
    names or shapes the engine does not know) is logged and counted in `refused`, and the version before it stays.
    A version whose files went away because a newer one came is no error. Mapping and hashing happen in a thread.

    Args:
        stream: the weights stream.
        config: transport, and the deadline of reading and verifying one version.
        apply: takes the version, and must have copied what it needs when it returns. It has a deadline of its own:
            only the engine knows what became of weights that it was about to take. `WeightsError` from it means "not
            applied, the old version stays"; any other error ends `run`.
        run: name of the run; versions of another run are refused.
        run_dir: run directory.
    """

    def __init__(self, stream: Versions, config: WeightsConfig, apply: Apply, *, run: str, run_dir: Path) -> None:
        self._stream = stream
        self._config = config
        self._apply = apply
        self._run = run
        self._root = make_transport(config.transport, run_dir).root
        self._seen = 0
        self._applied: Pair | None = None
        self.refused = 0
        self.first = asyncio.Event()

    @property
    def version(self) -> int:
        """Number of the version applied last; 0 before the first."""
        return 0 if self._applied is None else self._applied[1]

    async def run(self, stop: asyncio.Event) -> None:
        """Follow until `stop` is set; `first` is set after the first version was applied.

        Cancelling it between versions leaves the engine whole; in the middle of one it is as whole as the engine's
        `apply` makes it. It may be run again afterwards.
        """
        while not stop.is_set():
            found = await self._stream.after(self._seen, _LOOK_SECONDS)
            if found is None:
                continue
            number, data = found
            try:
                await self._take(number, data)
            except WeightsError as error:
                self._refuse(number, error)
            self._seen = max(self._seen, number)

    async def _take(self, number: int, data: bytes) -> None:
        manifest = decode(data)
        self._check(number, manifest)
        try:
            async with asyncio.timeout(self._config.deadline):
                version = await self._map(manifest)
        except TimeoutError as error:
            raise WeightsError(
                f"version {number} could not be read within {self._config.deadline:g} s", "raise weights.deadline"
            ) from error
        if version is None:
            return
        await self._apply(version)
        self._applied = manifest.pair
        self.first.set()
        logger.info("weights applied", extra={"version": manifest.version, "epoch": manifest.epoch})

    def _check(self, number: int, manifest: Manifest) -> None:
        if manifest.run != self._run:
            raise WeightsError(f"version {number} belongs to run {manifest.run!r}, this is {self._run!r}")
        if manifest.version != number or manifest.folder != folder_name(*manifest.pair):
            raise WeightsError(f"the manifest of version {number} names version {manifest.pair}, {manifest.folder}")
        if manifest.transport != self._config.transport:
            raise WeightsError(
                f"version {number} came by {manifest.transport}, this replica reads {self._config.transport}"
            )
        if manifest.base is not None:
            raise WeightsError(f"version {number} is a delta, which this follower cannot apply")
        if self._applied is not None and manifest.pair <= self._applied:
            raise WeightsError(f"version {manifest.pair} is not newer than {self._applied}, which is applied")

    async def _map(self, manifest: Manifest) -> Version | None:
        """Map all shards; None when the version is gone and a newer one is there."""
        for attempt in range(_MAP_ATTEMPTS):
            try:
                return await asyncio.to_thread(map_version, self._root / manifest.folder, manifest)
            except OSError as error:
                newest = await self._stream.newest()
                if newest is not None and newest[0] > manifest.version:
                    logger.debug("weights overtaken", extra={"version": manifest.version, "newest": newest[0]})
                    return None
                problem = error
            # A shared file system may show a rename a moment later than Redis shows the manifest.
            await asyncio.sleep(_MAP_PAUSE * 2**attempt)
        raise WeightsError(
            f"the files of version {manifest.version} cannot be read: {problem}",
            "shm works on one host only; use weights.transport=directory for several",
        )

    def _refuse(self, number: int, error: WeightsError) -> None:
        self.refused += 1
        logger.error(
            "weights refused",
            extra={"version": number, "stays": self.version, "error": error.message, "hint": error.hint},
        )


def map_version(folder: Path, manifest: Manifest) -> Version:
    """Map every shard of a full version and check sizes, checksums, names, dtypes and shapes.

    Raises:
        WeightsError: something does not fit the manifest.
        OSError: a file cannot be opened or mapped.
    """
    shards = [map_shard(folder / shard.file, shard) for shard in manifest.shards]
    tensors: dict[str, torch.Tensor] = {}
    for entry in manifest.tensors:
        parts = [shards[part].get(entry.name) for part in entry.parts]
        found = [part for part in parts if part is not None]
        if not found or len(found) != len(parts) or any(DTYPE_NAMES[part.dtype] != entry.dtype for part in found):
            raise WeightsError(f"{folder}: tensor {entry.name} is not what the manifest says")
        tensors[entry.name] = found[0] if len(found) == 1 else torch.cat(found)
        if list(tensors[entry.name].shape) != entry.shape:
            raise WeightsError(f"{folder}: tensor {entry.name} is not what the manifest says")
    if sum(len(entry.parts) for entry in manifest.tensors) != sum(len(shard) for shard in shards):
        raise WeightsError(f"{folder}: the shards hold tensors that the manifest does not list")
    return Version(
        pair=manifest.pair,
        step=manifest.step,
        tensors=tensors,
        folder=folder,
        files=tuple(shard.file for shard in manifest.shards),
        parts={entry.name: tuple(manifest.shards[part].file for part in entry.parts) for entry in manifest.tensors},
    )
