"""The mirror: full files of the version that deltas are applied to, on this host, for one replica.

```
anchor   all shards full    the files take the place of those in the mirror
delta    base == mirror     changed values are written into the mapped files; full shards replace their file
         somebody reads     into copies of them, in a new folder; the old files go when the last reader does
         base != mirror     the chain of bases is walked back to the mirror or to an anchor, and applied in order
then     every part of every tensor is hashed; only a mirror with the hashes of the manifest holds that version
```
A mirror that was cancelled, torn or found wrong holds no version: the next one rebuilds it from the newest anchor.
"""

from __future__ import annotations

import asyncio
import logging
import shutil
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from itertools import count
from pathlib import Path
from typing import Final

import torch

from streamrl.errors import CannotCreate, WeightsError
from streamrl.weight_sync.checksums import file_checksum, short_hash
from streamrl.weight_sync.delta import decode_into, read_delta_shard
from streamrl.weight_sync.manifest import MANIFEST_FILE, Manifest, Pair, Shard
from streamrl.weight_sync.mapping import assemble, map_shared
from streamrl.weight_sync.safetensors_file import raw
from streamrl.weight_sync.sources import Source
from streamrl.weight_sync.spool import Spool
from streamrl.weight_sync.version import Readers, Version

logger = logging.getLogger(__name__)
_LONGEST_CHAIN: Final = 1000
_SLACK_BYTES: Final = 1 << 20


@dataclass(frozen=True)
class Link:
    """One version of a chain with the folder that holds its files."""

    manifest: Manifest
    folder: Path


class Mirror:
    """Keeps the full files of one version and brings them to the next.

    `prepare` fetches and may run while an engine reads the mirror; `patch` writes and may not.

    Args:
        spool: the mirror is a folder in it.
        source: where versions come from.
        keep: leave fetched files in the spool for neighbours, instead of moving them into the mirror.
    """

    def __init__(self, spool: Spool, source: Source, *, keep: bool) -> None:
        self._spool, self._source = spool, source
        self._moves = source.proves and not keep
        self._folders = (spool.root / f"mirror.{number}" for number in count())
        self._folder = next(self._folders)
        self._readers = Readers()
        self._tables: dict[str, dict[str, torch.Tensor]] = {}
        self._hopeless: Pair | None = None
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="mirror")
        self._manifest: Manifest | None = None
        self.pair: Pair | None = None

    def close(self) -> None:
        """End the thread; what it is doing is finished first."""
        self._thread.shutdown()
        self._tables = {}

    async def prepare(self, manifest: Manifest) -> list[Link]:
        """Fetch what leads from the mirror to a version, the oldest first; nothing when the mirror holds it.

        A repeat fetches only what is missing.

        Raises:
            WeightsError: no way leads there, or only one that was found wrong before.
            FileNotFoundError, Unreachable, CannotCreate: as of `Source.fetch`.
        """
        if manifest.pair == self.pair:
            return []
        chain = [manifest]
        while chain[-1].base is not None and chain[-1].base != self.pair:
            if len(chain) == _LONGEST_CHAIN:
                raise WeightsError(f"version {manifest.version} is more than {_LONGEST_CHAIN} deltas from a full one")
            chain.append(await self._source.base_of(chain[-1]))
        if chain[-1].base is None and len(chain) > 1:
            if chain[-1].pair == self._hopeless:
                raise WeightsError(
                    f"version {manifest.version} builds on {self._hopeless}, whose deltas gave wrong weights before",
                    "the next full version mends this",
                )
            extra = {"version": manifest.version, "anchor": chain[-1].version, "deltas": len(chain) - 1}
            logger.info("weights rebuilt from a full version", extra=extra)
        if self._source.proves:
            held = () if self._manifest is None else (self._manifest.folder,)
            self._spool.trim({*held, *(link.folder for link in chain)})
        return [Link(link, await self._source.fetch(link)) for link in reversed(chain)]

    async def patch(self, chain: list[Link]) -> Version:
        """Bring the mirror to the last version of a chain and return it; an empty chain returns what it holds.

        When deltas on top of what the mirror held give wrong weights, the caller may prepare once more: the mirror
        holds nothing then, so that the chain begins at an anchor. Cancelling leaves a mirror that holds nothing.

        Raises:
            WeightsError: the result does not have the hashes of the manifest, or a file is wrong; nothing is held.
            FileNotFoundError: a file went away.
            CannotCreate: no room.
        """
        loop = asyncio.get_running_loop()
        anchored = bool(chain) and chain[0].manifest.base is None
        try:
            for link in chain:
                await loop.run_in_executor(self._thread, self._apply, link)
                if self._moves:
                    self._spool.drop(link.folder)
            return await loop.run_in_executor(self._thread, self._assemble)
        except WeightsError:
            if anchored and len(chain) > 1:
                self._hopeless = chain[0].manifest.pair
            raise

    def _apply(self, link: Link) -> None:
        """Runs in the thread of the mirror, so never twice at a time, whatever became of the caller."""
        manifest = link.manifest
        if manifest.base not in (None, self.pair):
            raise WeightsError(f"a delta against {manifest.base} does not fit the mirror of {self.pair}")
        self.pair = None  # until it is proven to be the new one
        if self._readers.count:
            self._step_aside({shard.file for shard in manifest.shards if shard.kind == "delta"})
        if self._moves:
            (link.folder / MANIFEST_FILE).unlink(missing_ok=True)  # from here on its files are not all there
        self._folder.mkdir(mode=0o700, exist_ok=True)
        for shard in manifest.shards:
            if shard.kind == "full":
                self._replace(link.folder, shard)
            else:
                self._change(link.folder, shard)
        self._remove_others({shard.file for shard in manifest.shards})
        self._prove(manifest)
        self._manifest, self.pair = manifest, manifest.pair

    def _assemble(self) -> Version:
        manifest = self._manifest
        if manifest is None or self.pair is None:
            raise WeightsError("the mirror holds no version")
        version = assemble(self._folder, manifest, [self._tables[shard.file] for shard in manifest.shards])
        return replace(version, readers=self._readers)

    def _step_aside(self, changed: set[str]) -> None:
        """Leave the files to those who read them; go on with copies of those that are to be changed."""
        old, self._folder = self._folder, next(self._folders)
        self._readers = Readers()
        tables, self._tables = self._tables, {}
        try:
            self._folder.mkdir(mode=0o700)
            for file in tables.keys() & changed:
                shutil.copyfile(old / file, self._folder / file)
                self._tables[file] = map_shared(self._folder / file)
        except OSError as error:
            raise CannotCreate(f"no room for {self._folder}: {error}", "give this host a larger /dev/shm") from error
        finally:
            shutil.rmtree(old, ignore_errors=True)

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
            raise CannotCreate(f"no room for {draft}: {error}", "give this host a larger /dev/shm") from error
        if not self._source.proves and file_checksum(draft) != shard.checksum:
            raise WeightsError(f"{folder / shard.file} does not have the checksum of its manifest")
        draft.replace(self._folder / shard.file)
        self._tables[shard.file] = map_shared(self._folder / shard.file)

    def _change(self, folder: Path, shard: Shard) -> None:
        table = self._tables.get(shard.file)
        if table is None:
            raise WeightsError(f"{folder / shard.file} changes a file that the mirror does not have")
        limit = 2 * sum(tensor.nbytes for tensor in table.values()) + _SLACK_BYTES
        for name, encoded in read_delta_shard(folder / shard.file, shard, limit=limit).items():
            if name not in table:
                raise WeightsError(f"{folder / shard.file} changes {name}, which the mirror does not have")
            decode_into(table[name], encoded)

    def _remove_others(self, files: set[str]) -> None:
        for name in self._tables.keys() - files:
            del self._tables[name]
            (self._folder / name).unlink(missing_ok=True)

    def _prove(self, manifest: Manifest) -> None:
        for entry in manifest.tensors:
            if not entry.hashes and manifest.base is None:
                continue  # the checksums of its files are proof enough
            parts = [self._part(manifest.shards[index], entry.name) for index in entry.parts]
            if [short_hash(raw(part)) for part in parts] != entry.hashes:
                raise WeightsError(
                    f"{entry.name} of version {manifest.pair} has other hashes than its manifest says",
                    "it is rebuilt from a full version",
                )

    def _part(self, shard: Shard, name: str) -> torch.Tensor:
        part = self._tables[shard.file].get(name)
        if part is None:
            raise WeightsError(f"{name} is not in {shard.file} of the mirror")
        return part
