"""How the files of a version get onto this host: `WeightSource`, and the one for files that this host sees already."""

from __future__ import annotations

import asyncio
import contextlib
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Protocol

from typing_extensions import override

from streamrl.errors import WeightsError
from streamrl.weight_sync.manifest import MANIFEST_FILE, Manifest, decode, folder_name

_PAUSES: Final = (0.05, 0.1, 0.2)


@dataclass
class Traffic:
    """What was fetched since the start, including the bytes of broken transfers; only grows."""

    bytes: int = 0
    seconds: float = 0.0


class WeightSource(Protocol):
    """Where versions come from."""

    proves: bool  # the files that `fetch` returns have the checksums of their manifest, and are our own
    traffic: Traffic

    async def fetch(self, manifest: Manifest) -> Path:
        """Return the folder that holds all files of a version; the next fetch continues one that failed.

        Raises:
            FileNotFoundError: no host has the version any more.
            WeightsError: its files are not what the manifest says.
            Unreachable: not fetched within `weights.deadline`; trying again may help.
            CannotCreate: no room for the files.
        """
        ...

    async def base_of(self, manifest: Manifest) -> Manifest:
        """Return the manifest of the version that a delta needs; raises like `fetch`."""
        ...


def base_folder(manifest: Manifest) -> str:
    assert manifest.base is not None
    return folder_name(*manifest.base)


def checked_base(data: bytes, manifest: Manifest) -> Manifest:
    """Decode the manifest of the base; `WeightsError` when it is not what the delta `manifest` names."""
    base = decode(data)
    if base.pair != manifest.base or base.run != manifest.run or base.pair >= manifest.pair:
        raise WeightsError(f"the base of version {manifest.pair} should be {manifest.base}, not {base.pair}")
    return base


class FolderSource(WeightSource):
    """`shm` and `directory`: the publisher's own files, which others read too."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self.proves = False
        self.traffic = Traffic()

    @override
    async def fetch(self, manifest: Manifest) -> Path:
        folder = self._root / manifest.folder
        await self._look(folder / MANIFEST_FILE)
        return folder

    @override
    async def base_of(self, manifest: Manifest) -> Manifest:
        return checked_base(await self._look(self._root / base_folder(manifest) / MANIFEST_FILE), manifest)

    async def _look(self, path: Path) -> bytes:
        # A shared file system may show a rename a moment later than Redis shows the manifest.
        for pause in _PAUSES:
            with contextlib.suppress(OSError):
                return await asyncio.to_thread(path.read_bytes)
            await asyncio.sleep(pause)
        return await asyncio.to_thread(path.read_bytes)
