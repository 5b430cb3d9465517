"""Shards: plain safetensors files, written in one pass with their checksum and mapped without a copy.

The library writes a shard from a dictionary and would have to read it back for its checksum; here each byte is hashed
on its way out. The format is that of the library, byte for byte: 8 bytes of header length, JSON header, data without
holes (https://huggingface.co/docs/safetensors, "Format"); the tests read these files with the library itself.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, Literal

import orjson
import torch
import xxhash

from streamrl.errors import WeightsError
from streamrl.weight_sync.checksums import Buffer, checksum
from streamrl.weight_sync.manifest import Shard

_ALIGNMENT: Final = 64
_MAX_HEADER_BYTES: Final = 100 << 20
_WRITE_BYTES: Final = 4 << 20
"""Hashed and written in turn: what was hashed is still in the processor's cache when it is written."""
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


def write(path: Path, tensors: Sequence[tuple[str, torch.Tensor]], *, durable: bool, over: bool = False) -> Shard:
    """Write tensors as one safetensors file and return its entry for the manifest.

    Args:
        path: a file that must not exist, or one to be written `over`.
        tensors: names and contiguous CPU tensors. Wider elements come first in the file, so each is aligned.
        durable: fsync before returning.
        over: the file is there, nobody reads it, and its content goes.

    Raises:
        OSError: from the file system, among them `ENOSPC`; the file may be left behind in part.
    """
    return write_pieces(path, encode(tensors), durable=durable, over=over)


def write_pieces(
    path: Path, pieces: Iterable[Buffer], *, durable: bool, kind: Literal["full", "delta"] = "full", over: bool = False
) -> Shard:
    """Write bytes as one file, hash them on their way, and return the entry; arguments and errors as of `write`."""
    state = xxhash.xxh3_128()
    total = 0
    with path.open("r+b" if over else "xb", buffering=0) as file:
        for piece in pieces:
            view = memoryview(piece).cast("B")
            total += view.nbytes
            for start in range(0, view.nbytes, _WRITE_BYTES):
                part = view[start : start + _WRITE_BYTES]
                state.update(part)
                while part.nbytes:
                    part = part[os.write(file.fileno(), part) :]
        if over:
            file.truncate(total)
        if durable:
            os.fsync(file.fileno())
    return Shard(file=path.name, bytes=total, checksum=state.hexdigest(), kind=kind)


def map_shard(path: Path, shard: Shard) -> dict[str, torch.Tensor]:
    """Map a shard into memory, check it against its entry, and return its tensors without copying them.

    The mapping is private (copy on write), so nothing a holder does reaches the file, and it stays readable after the
    file is unlinked, for as long as one of the tensors lives.

    Raises:
        WeightsError: the size, the checksum or the safetensors header does not fit.
        FileNotFoundError: the file is gone.
    """
    with path.open("rb") as file:
        size = os.fstat(file.fileno()).st_size
        if size != shard.bytes:
            raise WeightsError(f"{path} has {size} bytes, its manifest says {shard.bytes}")
        if not size:
            raise WeightsError(f"{path} is empty")
        mapped = mmap.mmap(file.fileno(), size, flags=mmap.MAP_PRIVATE, prot=mmap.PROT_READ | mmap.PROT_WRITE)
    found = checksum(mapped)
    if found != shard.checksum:
        raise WeightsError(f"{path} has checksum {found}, its manifest says {shard.checksum}")
    return parse(mapped, str(path))


def encode(tensors: Sequence[tuple[str, torch.Tensor]]) -> list[memoryview[Any]]:
    """Return the bytes of a safetensors file in pieces, without a copy of the tensors (contiguous, on the CPU)."""
    ordered = sorted(tensors, key=lambda item: -item[1].element_size())
    return [memoryview(_header(ordered)), *(raw(tensor) for _, tensor in ordered)]


def parse(data: bytearray | mmap.mmap, where: str) -> dict[str, torch.Tensor]:
    """Return the tensors of a safetensors file that lies in `data`, as views of it.

    Args:
        data: the whole file.
        where: names the file in errors.

    Raises:
        WeightsError: it is no safetensors file, or a tensor lies outside of it.
    """
    size = len(data)
    start = 8 + int.from_bytes(data[:8], "little")
    if start > min(size, _MAX_HEADER_BYTES):
        raise WeightsError(f"{where}: the safetensors header is longer than the file")
    try:
        table: dict[str, Any] = orjson.loads(data[8:start])
        return {name: _view(data, start, entry) for name, entry in table.items() if name != "__metadata__"}
    except (ValueError, KeyError, TypeError, AttributeError, RuntimeError) as error:
        raise WeightsError(f"{where} is no safetensors file: {error}") from error


def raw(tensor: torch.Tensor) -> memoryview[Any]:
    """The bytes of a contiguous CPU tensor, without a copy."""
    return tensor.detach().reshape(-1).view(torch.uint8).numpy().data


def _header(tensors: Sequence[tuple[str, torch.Tensor]]) -> bytes:
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
    # The format allows trailing spaces; they put the data on a cache line.
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
