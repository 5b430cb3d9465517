"""A version put aside: plain full files in RUN_DIR/pinned/v-EPOCH-VERSION, which nothing removes but a person."""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Final

import msgspec
import torch

from streamrl.atomic import fsync_directory
from streamrl.errors import CannotCreate, WeightsError
from streamrl.weight_sync import safetensors_file
from streamrl.weight_sync.catalog import PINNED, read_manifest
from streamrl.weight_sync.checksums import short_hash
from streamrl.weight_sync.delta import decode_into, read_delta_shard
from streamrl.weight_sync.manifest import MANIFEST_FILE, Manifest, Pair, Shard, encode, folder_name
from streamrl.weight_sync.safetensors_file import map_shard, raw

_DRAFT: Final = ".draft-"
_SLACK_BYTES: Final = 1 << 20
_LONGEST_CHAIN: Final = 1000


def pin(root: Path, run_dir: Path, pair: Pair) -> Manifest:
    """Copy a version that is on the transport into the run directory, whole and durable.

    Deltas are applied, so the copy needs nothing else. One file is held in memory at a time. A version that is pinned
    already is left as it is.

    Args:
        root: folder that holds the folders of the versions.
        run_dir: of the run.
        pair: (epoch, version).

    Returns:
        The manifest of the copy.

    Raises:
        WeightsError: the files are not what their manifests say, or went away because newer versions came.
        CannotCreate: no room, or no permission; nothing is left behind.
    """
    target = run_dir / PINNED / folder_name(*pair)
    if (target / MANIFEST_FILE).exists():
        return read_manifest(target)
    draft = target.with_name(f"{_DRAFT}{target.name}-{os.getpid()}")
    _remove_abandoned(target.parent)
    try:
        chain = _chain(root, pair)
        draft.mkdir(parents=True)
        _check_room(draft, chain[-1])
        shards = [_write(draft, root, chain, shard.file) for shard in chain[-1].shards]
        manifest = msgspec.structs.replace(chain[-1], base=None, sources=[], shards=shards)
        with (draft / MANIFEST_FILE).open("xb") as file:
            file.write(encode(manifest))
            file.flush()
            os.fsync(file.fileno())
        fsync_directory(draft)
        draft.rename(target)
        fsync_directory(target.parent)
    except FileNotFoundError as error:
        raise WeightsError(
            f"version {pair[1]} went away while it was copied: {error.filename}", "newer ones came; pin one of those"
        ) from error
    except OSError as error:
        if isinstance(error, CannotCreate):
            raise
        raise CannotCreate(f"version {pair[1]} cannot be pinned in {draft}: {error}", "make room there") from error
    finally:
        shutil.rmtree(draft, ignore_errors=True)
    return manifest


def unpin(run_dir: Path, pair: Pair) -> bool:
    """Remove a pinned version; False when there is none. What is half removed is not seen as a version."""
    target = run_dir / PINNED / folder_name(*pair)
    gone = target.with_name(f"{_DRAFT}gone-{target.name}-{os.getpid()}")
    try:
        target.rename(gone)
    except FileNotFoundError:
        return False
    shutil.rmtree(gone)
    return True


def _remove_abandoned(folder: Path) -> None:
    """Remove what processes of this host that are gone were writing or removing."""
    for entry in folder.glob(f"{_DRAFT}*"):
        pid = entry.name.rpartition("-")[2]
        try:
            os.kill(int(pid), 0)
        except ProcessLookupError:
            shutil.rmtree(entry, ignore_errors=True)
        except (OSError, ValueError, OverflowError):
            continue


def _chain(root: Path, pair: Pair) -> list[Manifest]:
    """A version and all that it builds on, the oldest first."""
    chain = [read_manifest(root / folder_name(*pair))]
    while chain[-1].base is not None:
        if len(chain) == _LONGEST_CHAIN:
            raise WeightsError(f"version {pair[1]} is more than {_LONGEST_CHAIN} deltas from a full one")
        chain.append(read_manifest(root / folder_name(*chain[-1].base)))
    return chain[::-1]


def _check_room(folder: Path, manifest: Manifest) -> None:
    """Refuse at once what the disk has no room for; it has the last word later."""
    need = _SLACK_BYTES
    for entry in manifest.tensors:
        need += torch.Size(entry.shape).numel() * safetensors_file.DTYPES[entry.dtype].itemsize
    free = shutil.disk_usage(folder).free
    if free < need:
        raise CannotCreate(
            f"no room for version {manifest.version} in {folder.parent}: needs {need >> 20} MiB, {free >> 20} MiB left",
            "make room on the disk of the run directory, or unpin another version",
        )


def _write(draft: Path, root: Path, chain: list[Manifest], file: str) -> Shard:
    """Put one file of the newest version of a chain together, prove it, and write it."""
    tensors: dict[str, torch.Tensor] = {}
    for manifest in chain:
        folder = root / manifest.folder
        shard = next((shard for shard in manifest.shards if shard.file == file), None)
        if shard is None:
            continue
        if shard.kind == "full":
            tensors = map_shard(folder / file, shard)  # private: what is written to it never reaches the file
        else:
            _apply(folder / file, shard, tensors)
    _prove(chain[-1], file, tensors)
    return safetensors_file.write(draft / file, list(tensors.items()), durable=True)


def _apply(path: Path, shard: Shard, tensors: Mapping[str, torch.Tensor]) -> None:
    limit = 2 * sum(tensor.nbytes for tensor in tensors.values()) + _SLACK_BYTES
    for name, changes in read_delta_shard(path, shard, limit=limit).items():
        if name not in tensors:
            raise WeightsError(f"{path} changes {name}, which the version before does not have")
        decode_into(tensors[name], changes)


def _prove(manifest: Manifest, file: str, tensors: Mapping[str, torch.Tensor]) -> None:
    """Check the parts in one file against the table of their version."""
    held = set()
    for entry in manifest.tensors:
        for place, index in enumerate(entry.parts):
            if manifest.shards[index].file != file:
                continue
            part = tensors.get(entry.name)
            wrong = part is None or safetensors_file.DTYPE_NAMES[part.dtype] != entry.dtype
            if part is None or wrong or (entry.hashes and short_hash(raw(part)) != entry.hashes[place]):
                raise WeightsError(f"version {manifest.version}: {entry.name} in {file} is not what the manifest says")
            held.add(entry.name)
    if held != set(tensors):
        raise WeightsError(f"{file} of version {manifest.version} holds tensors that its manifest does not list")
