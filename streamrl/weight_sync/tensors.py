"""Tensors in files: safetensors shards that are written, proven and mapped, and the `Version` an engine is handed.

The safetensors library writes a shard from a dictionary and would have to read it back for its checksum; here each byte
is hashed on its way out. The format is that of the library, byte for byte: 8 bytes of header length, JSON header, data
without holes (https://huggingface.co/docs/safetensors, "Format"); the tests read these files with the library itself.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Final, TypeAlias

import orjson
import torch
import xxhash

from streamrl.errors import WeightsError
from streamrl.weight_sync.files import Buffer, checksum
from streamrl.weight_sync.manifest import Adapter, LanePlace, Manifest, Pair, Shard

_ALIGNMENT: Final = 64
_MAX_HEADER_BYTES: Final = 100 << 20
_WRITE_BYTES: Final = 4 << 20  # hashed and written in turn: what was hashed is still in the processor's cache
DTYPES: Final[Mapping[str, torch.dtype]] = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
DTYPE_NAMES: Final[Mapping[torch.dtype, str]] = {dtype: name for name, dtype in DTYPES.items()}


Named: TypeAlias = tuple[str, torch.Tensor]


# ---- one version


@dataclass(frozen=True, eq=False)
class Version:
    """All weights of one version, or its adapter, whole and proven, in files of this host or (no `folder`) announced.

    `tensors` has every parameter by its Hugging Face name, a tied one under one of its names; on the CPU, views of
    mapped files. Only to be read; the files may lose their names before. Without a `folder` they have no values
    (`announced_version`), or the version was made in memory (tests), which only an engine in this process can take.
    """

    pair: Pair
    step: int  # optimizer step
    tensors: Mapping[str, torch.Tensor]
    folder: Path | None = None
    files: tuple[str, ...] = ()  # safetensors files in `folder`, of whole tensors
    sources: tuple[str, ...] = ()  # servers that have these files for other hosts; none have what a delta makes
    proofs: tuple[tuple[int, str], ...] = ()  # bytes and checksum of each file there
    lane: LanePlace | None = None  # where servers join its broadcast
    adapter: Adapter | None = None  # `tensors` are those of an adapter alone, by the names of peft (adapter.py)

    @property
    def number(self) -> int:
        return self.pair[1]

    @cached_property
    def structure(self) -> str:
        """Digest of names, types and shapes: an engine compares those of its model once with each."""
        heads = [[name, DTYPE_NAMES[tensor.dtype], list(tensor.shape)] for name, tensor in self.tensors.items()]
        return checksum(orjson.dumps(heads))


def map_version(folder: Path, manifest: Manifest, *, proven: bool = False) -> Version:
    """Map the files of a version that is whole in `folder`, checked against its manifest.

    `proven`: sizes and checksums have been checked, and no other process writes there.
    """
    tables = [_proven(folder / shard.file, None if proven else shard.checksum) for shard in manifest.shards]
    try:
        tensors = {entry.name: tables[entry.shard][entry.name] for entry in manifest.tensors}
    except KeyError as error:
        raise WeightsError(f"{folder} has no tensor {error}, which its manifest lists") from error
    if len(tensors) != sum(map(len, tables)):
        raise WeightsError(f"{folder} holds tensors that its manifest does not list")
    return replace(_version(manifest, tensors), folder=folder, lane=None)


def announced_version(manifest: Manifest) -> Version:
    """A version for a server that fetches the files itself: they are not on this host, and its tensors have no values.

    `WeightsError`: a type that is not known here.
    """
    try:
        tensors = {
            entry.name: torch.empty(entry.shape, dtype=DTYPES[entry.dtype], device="meta") for entry in manifest.tensors
        }
    except KeyError as error:
        raise WeightsError(f"version {manifest.version} has tensors of type {error}") from error
    return _version(manifest, tensors)


def _version(manifest: Manifest, tensors: Mapping[str, torch.Tensor]) -> Version:
    return Version(
        pair=manifest.pair,
        step=manifest.step,
        tensors=tensors,
        files=tuple(shard.file for shard in manifest.shards),
        sources=tuple(manifest.sources) if manifest.base is None else (),
        proofs=tuple((shard.bytes, shard.checksum) for shard in manifest.shards),
        lane=manifest.lane,
        adapter=manifest.adapter,
    )


def is_finite(values: torch.Tensor) -> bool:
    """Whether all values are finite, in one pass at the speed of memory (`isfinite` takes twenty times as long)."""
    if not values.is_floating_point() or not values.numel():
        return True
    if values.element_size() == 1:  # torch compares no float8
        values = values.float()
    # the least and the greatest value of anything with a NaN are NaN
    least, greatest = torch.aminmax(values)
    return bool(torch.isfinite(least) & torch.isfinite(greatest))


# ---- one safetensors file


def buckets(tensors: Iterable[Named], limit: int) -> Iterator[list[Named]]:
    """One file each: groups of at most `limit` bytes, in order; a larger tensor is a group of its own and never cut."""
    bucket: list[Named] = []
    size = 0
    for name, tensor in tensors:
        if bucket and size + tensor.nbytes > limit:
            yield bucket
            bucket, size = [], 0
        bucket.append((name, tensor))
        size += tensor.nbytes
    if bucket:
        yield bucket


def write_tensors(path: Path, tensors: Sequence[Named], *, durable: bool) -> Shard:
    """Write tensors as one new safetensors file; `OSError` may leave it behind in part."""
    return write_pieces(path, encode_tensors(tensors), durable=durable)


def write_pieces(path: Path, pieces: Iterable[Buffer], *, durable: bool, makes: str | None = None) -> Shard:
    """Write bytes as one new file, hash them on their way, and return its entry for the manifest."""
    state = xxhash.xxh3_128()
    total = 0
    with path.open("xb", buffering=0) as file:
        for piece in pieces:
            view = memoryview(piece).cast("B")
            total += view.nbytes
            for start in range(0, view.nbytes, _WRITE_BYTES):
                part = view[start : start + _WRITE_BYTES]
                state.update(part)
                while part.nbytes:
                    part = part[os.write(file.fileno(), part) :]
        if durable:
            os.fsync(file.fileno())
    return Shard(file=path.name, bytes=total, checksum=state.hexdigest(), makes=makes)


def _proven(path: Path, expected: str | None) -> dict[str, torch.Tensor]:
    """Map a shard, compare its checksum (None: it is proven), and return its tensors without copying them.

    The mapping is private (copy on write), so nothing a holder does reaches the file, and it stays readable after the
    file is unlinked, for as long as one of the tensors lives.
    """
    mapped = _map(path, mmap.MAP_PRIVATE)
    if expected is not None and (found := checksum(mapped)) != expected:
        raise WeightsError(f"{path} has checksum {found}, its manifest says {expected}")
    return parse_tensors(mapped, str(path))


def map_shared(path: Path) -> dict[str, torch.Tensor]:
    """Map a safetensors file that belongs to this process; what is written to its tensors is written to the file."""
    return parse_tensors(_map(path, mmap.MAP_SHARED), str(path))


def _map(path: Path, flags: int) -> mmap.mmap:
    with path.open("r+b" if flags == mmap.MAP_SHARED else "rb") as file:
        if not os.fstat(file.fileno()).st_size:
            raise WeightsError(f"{path} is empty")
        return mmap.mmap(file.fileno(), 0, flags=flags, prot=mmap.PROT_READ | mmap.PROT_WRITE)


def encode_tensors(tensors: Sequence[Named]) -> list[memoryview[Any]]:
    """The bytes of a safetensors file in pieces, without a copy of the tensors (contiguous, on the CPU)."""
    # Wider elements come first, so each is aligned.
    ordered = sorted(tensors, key=lambda item: -item[1].element_size())
    return [memoryview(_header(ordered)), *(raw_bytes(tensor) for _, tensor in ordered)]


def parse_tensors(data: bytearray | mmap.mmap, where: str) -> dict[str, torch.Tensor]:
    """The tensors of a whole safetensors file as views of `data`; `where` names the file in errors."""
    size = len(data)
    start = 8 + int.from_bytes(data[:8], "little")
    if start > min(size, _MAX_HEADER_BYTES):
        raise WeightsError(f"{where}: the safetensors header is longer than the file")
    try:
        table: dict[str, Any] = orjson.loads(data[8:start])
        return {name: _view(data, start, entry) for name, entry in table.items() if name != "__metadata__"}
    except (ValueError, KeyError, TypeError, AttributeError, RuntimeError) as error:
        raise WeightsError(f"{where} is no safetensors file: {error}") from error


def raw_bytes(tensor: torch.Tensor) -> memoryview[Any]:
    return tensor.detach().reshape(-1).view(torch.uint8).numpy().data


def _header(tensors: Sequence[Named]) -> bytes:
    table: dict[str, Any] = {}
    offset = 0
    for name, tensor in tensors:
        end = offset + tensor.nbytes
        table[name] = {
            "dtype": DTYPE_NAMES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [offset, end],
        }
        offset = end
    text = orjson.dumps(table)
    # The format allows trailing spaces; they align the data to a cache line.
    text += b" " * (-(8 + len(text)) % _ALIGNMENT)
    return len(text).to_bytes(8, "little") + text


def _view(data: bytearray | mmap.mmap, start: int, entry: Mapping[str, Any]) -> torch.Tensor:
    dtype = DTYPES[entry["dtype"]]
    shape = [int(size) for size in entry["shape"]]
    begin, end = (int(offset) for offset in entry["data_offsets"])
    count = (end - begin) // dtype.itemsize
    if not 0 <= begin <= end <= len(data) - start or count * dtype.itemsize != end - begin or min(shape, default=0) < 0:
        raise ValueError("the offsets of a tensor do not fit")
    if count == 0:
        return torch.empty(shape, dtype=dtype)
    return torch.frombuffer(data, dtype=dtype, count=count, offset=start + begin).view(shape)
