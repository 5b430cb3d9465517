"""From fetched files to one whole version: full files are used where they lie, deltas are applied to their base.

```
anchor   all shards full       the files replace those of the base
delta    base is what is held  changed values are written into the mapped files; full shards replace their file
         base is another       the chain of bases is walked back to what is held or to an anchor, and applied in order
then     every part of every tensor is hashed; only files with the hashes of the manifest hold that version
```
A base that was cancelled, torn or found wrong holds no version: the next one is rebuilt from the newest anchor.
"""

from __future__ import annotations

import asyncio
import logging
import shutil
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import torch

from streamrl.config import WeightsConfig
from streamrl.errors import CannotCreate, WeightsError
from streamrl.weight_sync.delta import decode_into, read_delta_shard
from streamrl.weight_sync.files import SLACK_BYTES, StagingFolder, file_checksum, short_hash
from streamrl.weight_sync.manifest import MANIFEST_FILE, Manifest, Pair, Shard
from streamrl.weight_sync.source import Traffic, WeightSource
from streamrl.weight_sync.tensors import Version, assemble, map_shared, map_version, raw_bytes

logger = logging.getLogger(__name__)
_LONGEST_CHAIN: Final = 1000


@dataclass(frozen=True)
class Link:
    manifest: Manifest
    folder: Path


@dataclass(frozen=True)
class Fetched:
    """A version whose files are on this host, and the links that lead to it, the oldest first."""

    manifest: Manifest
    links: list[Link]  # none: the delta base holds it
    in_place: bool  # the files of the only link are whole and used where they lie


def _needs_base(chain: list[Manifest], held: Pair | None) -> bool:
    """Whether a chain, the newest first, begins neither with a full version nor with a delta against `held`."""
    if chain[-1].base is None or chain[-1].base == held:
        return False
    if len(chain) == _LONGEST_CHAIN:
        raise WeightsError(f"version {chain[0].version} is more than {_LONGEST_CHAIN} deltas from a full one")
    return True


class DeltaBase:
    """Full files of one version, mapped, into which deltas are written. Used by one thread at a time.

    `pair` is the version that it holds, proven; None: none, or in the middle of a change. `manifest` is that of the
    version it held last. Fetched files are moved into `folder` (`moves`) or copied; `proven` says that their checksums
    have been checked.
    """

    def __init__(self, folder: Path, *, moves: bool, proven: bool, hint: str) -> None:
        self._folder, self._moves, self._proven, self._hint = folder, moves, proven, hint
        self._tables: dict[str, dict[str, torch.Tensor]] = {}
        self.manifest: Manifest | None = None
        self.pair: Pair | None = None

    def apply(self, link: Link) -> None:
        """Become the version of a link. After a `WeightsError` (wrong file or hashes) nothing is held."""
        manifest = link.manifest
        if manifest.base not in (None, self.pair):
            raise WeightsError(f"a delta against {manifest.base} does not fit the files of {self.pair}")
        self.pair = None  # until the files are proven to be the new version
        if self._moves:
            (link.folder / MANIFEST_FILE).unlink(missing_ok=True)  # from here on its files are not all there
        self._folder.mkdir(mode=0o700, exist_ok=True)
        for shard in manifest.shards:
            if shard.kind == "full":
                self._replace(link.folder, shard)
            else:
                self._change(link.folder, shard)
        for name in self._tables.keys() - {shard.file for shard in manifest.shards}:
            del self._tables[name]
            (self._folder / name).unlink(missing_ok=True)
        self._prove(manifest)
        self.manifest, self.pair = manifest, manifest.pair

    def version(self) -> Version:
        manifest = self.manifest
        if manifest is None or self.pair is None:
            raise WeightsError("no version is held")
        return assemble(self._folder, manifest, [self._tables[shard.file] for shard in manifest.shards])

    def _replace(self, folder: Path, shard: Shard) -> None:
        draft = self._folder / f".{shard.file}"
        draft.unlink(missing_ok=True)
        try:
            if self._moves:
                (folder / shard.file).replace(draft)
            else:
                shutil.copyfile(folder / shard.file, draft)
        except FileNotFoundError:
            raise
        except OSError as error:
            draft.unlink(missing_ok=True)
            raise CannotCreate(f"no room for {draft}: {error}", self._hint) from error
        if not self._proven and file_checksum(draft) != shard.checksum:
            raise WeightsError(f"{folder / shard.file} does not have the checksum of its manifest")
        draft.replace(self._folder / shard.file)
        self._tables[shard.file] = map_shared(self._folder / shard.file)

    def _change(self, folder: Path, shard: Shard) -> None:
        table = self._tables.get(shard.file)
        if table is None:
            raise WeightsError(f"{folder / shard.file} changes a file that the version before does not have")
        limit = 2 * sum(tensor.nbytes for tensor in table.values()) + SLACK_BYTES
        for name, encoded in read_delta_shard(folder / shard.file, shard, limit=limit).items():
            if name not in table:
                raise WeightsError(f"{folder / shard.file} changes {name}, which the version before does not have")
            decode_into(table[name], encoded)

    def _prove(self, manifest: Manifest) -> None:
        for entry in manifest.tensors:
            if not entry.hashes and manifest.base is None:
                continue  # the checksums of its files are proof enough
            found = []
            for index in entry.parts:
                part = self._tables[manifest.shards[index].file].get(entry.name)
                found.append("" if part is None else short_hash(raw_bytes(part)))
            if found != entry.hashes:
                raise WeightsError(
                    f"{entry.name} of version {manifest.pair} has other hashes than its manifest says",
                    "it is rebuilt from a full version",
                )


class Staging:
    """Brings versions near, for one replica: `fetch` while its engine works, then `make`."""

    def __init__(self, config: WeightsConfig, source: WeightSource, folder: StagingFolder) -> None:
        self._config, self._source, self._folder = config, source, folder
        self._moves = source.proves
        hint = "give this host a larger /dev/shm"
        self._base = DeltaBase(folder.root / "base", moves=self._moves, proven=source.proves, hint=hint)
        self._hopeless: Pair | None = None
        self._used = ""
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="deltas")  # so never two changes of the base at a time

    def close(self) -> None:
        self._thread.shutdown()

    @property
    def traffic(self) -> Traffic:
        return self._source.traffic

    async def fetch(self, manifest: Manifest) -> Fetched:
        """Get the files of a version onto this host, without touching what an engine may be reading."""
        if manifest.base is not None or self._config.delta.enabled:
            return Fetched(manifest, await self.links(manifest), in_place=False)
        if self._source.proves:
            self._folder.trim({self._used, manifest.folder})
        return Fetched(manifest, [Link(manifest, await self._source.fetch(manifest))], in_place=True)

    async def make(self, fetched: Fetched) -> Version:
        """Prove and map a version; no engine may be reading one meanwhile. Errors as of `WeightSource.fetch`."""
        manifest, deadline = fetched.manifest, self._config.deadline
        try:
            async with asyncio.timeout(deadline):
                if fetched.in_place:
                    folder, proven = fetched.links[0].folder, self._source.proves
                    version = await asyncio.to_thread(map_version, folder, manifest, proven=proven)
                else:
                    version = await self._rebuild(manifest, fetched.links)
        except TimeoutError as error:
            raise WeightsError(
                f"version {manifest.version} could not be read within {deadline:g} s", "raise weights.deadline"
            ) from error
        self._used = manifest.folder
        return version

    async def _rebuild(self, manifest: Manifest, links: list[Link]) -> Version:
        try:
            return await self.apply(links)
        except WeightsError as error:
            if links and links[0].manifest.base is None:
                raise
            extra = {"version": manifest.version, "error": error.message}
            logger.warning("weights do not fit what this host holds", extra=extra)
        return await self.apply(await self.links(manifest))  # the base holds nothing now: from an anchor on

    async def links(self, manifest: Manifest) -> list[Link]:
        """Fetch what leads from the delta base to a version, the oldest first; nothing when it holds that one.

        A repeat fetches only what is missing. May run while an engine reads the base. `WeightsError` also when no chain
        leads to the version, or only one that was found wrong before.
        """
        held = self._base.pair
        if manifest.pair == held:
            return []
        chain = [manifest]
        while _needs_base(chain, held):
            chain.append(await self._source.base_of(chain[-1]))
        if chain[-1].base is None and len(chain) > 1:
            if chain[-1].pair == self._hopeless:
                raise WeightsError(
                    f"version {manifest.version} builds on {self._hopeless}, whose deltas gave wrong weights before",
                    "the next full version fixes this",
                )
            extra = {"version": manifest.version, "anchor": chain[-1].version, "deltas": len(chain) - 1}
            logger.info("weights rebuilt from a full version", extra=extra)
        if self._source.proves:
            used = () if self._base.manifest is None else (self._base.manifest.folder,)
            self._folder.trim({*used, *(link.folder for link in chain)})
        return [Link(link, await self._source.fetch(link)) for link in reversed(chain)]

    async def apply(self, links: list[Link]) -> Version:
        """Bring the delta base to the last link of a chain; an empty chain returns what it holds.

        Writes into what an engine may be reading. After a cancellation the base holds nothing.
        """
        loop = asyncio.get_running_loop()
        try:
            for link in links:
                await loop.run_in_executor(self._thread, self._base.apply, link)
                if self._moves:
                    self._folder.drop(link.folder)
            return await loop.run_in_executor(self._thread, self._base.version)
        except WeightsError:
            if len(links) > 1 and links[0].manifest.base is None:
                self._hopeless = links[0].manifest.pair
            raise
