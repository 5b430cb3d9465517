"""From fetched files to one whole version: full files are used where they lie, deltas change a copy of their base.

```
anchor   its files are whole
delta    base is what is held  its files are copied and changed
         base is another       the chain of bases is walked back to what is held or to an anchor, and applied in order
```
Only files with the checksums of the manifest are that version. A base that gave others is not used again: the version
is made anew from the newest anchor.
"""

from __future__ import annotations

import asyncio
import logging
import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from streamrl.config import WeightsConfig
from streamrl.errors import CannotCreate, WeightsError
from streamrl.weight_sync.delta import decode_into, read_delta_shard
from streamrl.weight_sync.files import StagingFolder, file_checksum
from streamrl.weight_sync.manifest import Manifest
from streamrl.weight_sync.source import WeightSource
from streamrl.weight_sync.tensors import Version, map_shared, map_version

logger = logging.getLogger(__name__)
_PATCHED: Final = "patched-"


@dataclass(frozen=True)
class Link:
    manifest: Manifest
    folder: Path


class Staging:
    """Brings versions near, for one replica, while its engine works."""

    def __init__(self, config: WeightsConfig, source: WeightSource, folder: StagingFolder) -> None:
        self._config, self._source, self._folder = config, source, folder
        self._held: Link | None = None
        """The version made last, and the folder that holds its whole files."""

    async def bring(self, manifest: Manifest) -> Version:
        """Fetch, prove and map a version; errors as of `WeightSource.fetch`. A repeat fetches only what is missing."""
        try:
            return await self._make(manifest)
        except (WeightsError, FileNotFoundError) as error:
            if manifest.base is None or self._held is None:
                raise
            extra = {"version": manifest.version, "error": str(error)}
            logger.warning("weights do not fit what this host holds", extra=extra)
            self._held = None
            await asyncio.to_thread(self._remove_patched)
        return await self._make(manifest)

    async def _make(self, manifest: Manifest) -> Version:
        links = await self._links(manifest)
        deadline = self._config.deadline
        try:
            async with asyncio.timeout(deadline):
                version = await asyncio.to_thread(self._build, links)
        except TimeoutError as error:
            raise WeightsError(
                f"version {manifest.version} could not be read within {deadline:g} s", "raise weights.deadline"
            ) from error
        assert version.folder is not None
        self._held = Link(manifest, version.folder)
        return version

    async def _links(self, manifest: Manifest) -> list[Link]:
        """Fetch what leads to a version: a folder of whole files, and the deltas to apply to them, the oldest first."""
        held, chain = self._held, [manifest]
        if held is not None and held.manifest.pair == manifest.pair:
            return [held]
        while chain[-1].base is not None and (held is None or held.manifest.pair != chain[-1].base):
            chain.append(await self._source.base_of(chain[-1]))  # always an older one
        if len(chain) > 1 and chain[-1].base is None:
            extra = {"version": manifest.version, "anchor": chain[-1].version, "deltas": len(chain) - 1}
            logger.info("weights rebuilt from a full version", extra=extra)
        if self._source.proves:
            used = () if held is None else (held.manifest.folder,)
            self._folder.trim({*used, *(link.folder for link in chain)})
        links = [Link(link, await self._source.fetch(link)) for link in reversed(chain)]
        return links if held is None or chain[-1].base is None else [held, *links]

    def _build(self, links: list[Link]) -> Version:
        """Blocks. `WeightsError`: the files are not those of the manifest."""
        manifest = links[-1].manifest
        if len(links) > 1:
            folder = self._patch(links[0].folder, links[1:])
        else:
            folder = links[0].folder
            self._remove_patched(folder)
        return map_version(folder, manifest, proven=self._source.proves or manifest.base is not None)

    def _patch(self, base: Path, deltas: list[Link]) -> Path:
        """Change a copy of the files of a base, in a folder of its own: after a cancellation the thread goes on."""
        manifest = deltas[-1].manifest
        self._remove_patched(base)
        folder = Path(tempfile.mkdtemp(prefix=_PATCHED, dir=self._folder.root))
        try:
            for index, shard in enumerate(manifest.shards):
                path = folder / shard.file
                shutil.copyfile(base / shard.file, path)
                table = map_shared(path)
                for link in deltas:
                    changes = link.manifest.shards[index]
                    found = read_delta_shard(link.folder / changes.file, changes)
                    for name, encoded in found.items():
                        decode_into(table[name], encoded)
                if file_checksum(path) != shard.makes:
                    raise WeightsError(f"{shard.file} of version {manifest.pair} is not what its delta should make")
        except (KeyError, IndexError) as error:
            raise WeightsError(f"version {manifest.pair} is a delta of other files: {error}") from error
        except OSError as error:
            if isinstance(error, FileNotFoundError):
                raise
            raise CannotCreate(f"no room for {folder}: {error}", "give this host a larger /dev/shm") from error
        return folder

    def _remove_patched(self, used: Path | None = None) -> None:
        for entry in self._folder.root.glob(f"{_PATCHED}*"):
            if entry != used:
                shutil.rmtree(entry, ignore_errors=True)
