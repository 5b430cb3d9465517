"""Files of a version on this host, mapped into memory and put together to the tensors of a `Version`."""

from __future__ import annotations

import mmap
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TypeAlias

import torch

from streamrl.errors import WeightsError
from streamrl.weight_sync.manifest import Manifest, TensorEntry
from streamrl.weight_sync.safetensors_file import DTYPE_NAMES, map_shard, parse
from streamrl.weight_sync.version import Version

Table: TypeAlias = Mapping[str, torch.Tensor]


class WholeTensors(Mapping[str, torch.Tensor]):
    """Tensors by name; one that is cut into parts is put together when it is asked for, so only one is held whole."""

    def __init__(self, parts: Mapping[str, Sequence[torch.Tensor]]) -> None:
        self._parts = parts

    def __getitem__(self, name: str) -> torch.Tensor:
        parts = self._parts[name]
        return parts[0] if len(parts) == 1 else torch.cat(list(parts))

    def __iter__(self) -> Iterator[str]:
        return iter(self._parts)

    def __len__(self) -> int:
        return len(self._parts)


def map_version(folder: Path, manifest: Manifest, *, proven: bool = False) -> Version:
    """Map every shard of a full version and check it against its manifest.

    Args:
        folder: holds the shards.
        manifest: of a version without a base.
        proven: sizes and checksums were looked at already, and nobody else can write there.

    Raises:
        WeightsError: sizes, checksums, names, dtypes or shapes do not fit.
        OSError: a file cannot be opened or mapped.
    """
    if proven:
        return assemble(folder, manifest, [map_shared(folder / shard.file) for shard in manifest.shards])
    return assemble(folder, manifest, [map_shard(folder / shard.file, shard) for shard in manifest.shards])


def map_shared(path: Path) -> dict[str, torch.Tensor]:
    """Map a safetensors file that belongs to this process; what is written to its tensors is written to the file.

    Raises:
        WeightsError: no safetensors file.
        OSError: it cannot be opened or mapped.
    """
    with path.open("r+b") as file:
        size = os.fstat(file.fileno()).st_size
        if not size:
            raise WeightsError(f"{path} is empty")
        return parse(mmap.mmap(file.fileno(), size, flags=mmap.MAP_SHARED), str(path))


def assemble(folder: Path, manifest: Manifest, tables: Sequence[Table]) -> Version:
    """Make a version of the mapped shards, one table of tensors for each shard of the manifest, in its order.

    Raises:
        WeightsError: names, dtypes or shapes are not those of the manifest.
    """
    if sum(len(entry.parts) for entry in manifest.tensors) != sum(len(table) for table in tables):
        raise WeightsError(f"{folder}: the shards hold tensors that the manifest does not list")
    found: dict[str, list[torch.Tensor]] = {}
    for entry in manifest.tensors:
        parts = [tables[part].get(entry.name) for part in entry.parts]
        held = [part for part in parts if part is not None]
        if len(held) != len(parts) or not _fits(entry, held):
            raise WeightsError(f"{folder}: tensor {entry.name} is not what the manifest says")
        found[entry.name] = held
    files = tuple(shard.file for shard in manifest.shards)
    return Version(
        pair=manifest.pair,
        step=manifest.step,
        tensors=WholeTensors(found),
        folder=folder,
        files=files,
        parts={entry.name: tuple(files[part] for part in entry.parts) for entry in manifest.tensors},
        sources=tuple(manifest.sources),
        adapter=manifest.adapter,
    )


def _fits(entry: TensorEntry, parts: Sequence[torch.Tensor]) -> bool:
    if not parts or any(DTYPE_NAMES[part.dtype] != entry.dtype for part in parts):
        return False
    if len(parts) == 1:
        return list(parts[0].shape) == entry.shape
    if not entry.shape or any(list(part.shape[1:]) != entry.shape[1:] for part in parts):
        return False
    return sum(part.shape[0] for part in parts) == entry.shape[0]
