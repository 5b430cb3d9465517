"""Deltas: only the changed values of a tensor, bit for bit, and the file that holds those of one file of a version.

A delta names the changed elements and their new values, so applying it twice does no harm, and a value never drifts.
Values are compared as bits, so that -0.0 and the payloads of NaN arrive too.

For each tensor there are two arrays of bytes (docs/internals/weights.md):

```
gaps    the run of unchanged elements before each changed one, and last the run after all of them.
        A run g is written as g // 255 bytes of 255 and one byte g % 255 (escape-u8)
values  [width, count]: byte 0 of every new value, byte 1 of every new value, ... (byte planes)
```
The runs and the changed elements add up to the elements of the tensor, which a reader checks before it writes anything.
The file is one zstd frame (level 1) around a safetensors file with the tensors `gaps/NAME` and `values/NAME`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, TypeAlias

import numpy as np
import torch
import xxhash
import zstandard
from numpy.typing import NDArray

from streamrl.errors import WeightsError
from streamrl.weight_sync.files import CHUNK_BYTES
from streamrl.weight_sync.manifest import Shard
from streamrl.weight_sync.tensors import encode_tensors, parse_tensors, write_pieces

_ESCAPE: Final = 255
_CHUNK: Final = 1 << 22
"""Elements looked at together: bounds the memory of both directions."""
_LEVEL: Final = 1
_FRAME_HEADER_BYTES: Final = 18  # RFC 8878, 3.1.1
_WORDS: Final[Mapping[int, torch.dtype]] = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
DEFAULT_LIMIT: Final = 1 << 36
_Bytes: TypeAlias = NDArray[np.uint8]
_Words: TypeAlias = NDArray[Any]


@dataclass(frozen=True, eq=False)
class Encoded:
    """The changes of one tensor: `gaps` uint8 [any] and `values` uint8 [width, count], see the module."""

    gaps: _Bytes
    values: _Bytes

    @property
    def count(self) -> int:
        return int(self.values.shape[1])

    @property
    def bytes(self) -> int:
        return self.gaps.nbytes + self.values.nbytes


def encode(old: torch.Tensor, new: torch.Tensor) -> Encoded | None:
    """Return what turns the bits of `old` into those of `new`, None when they are the same.

    Both are contiguous CPU tensors of one shape and dtype, of 1, 2, 4 or 8 bytes an element; `WeightsError` otherwise.
    """
    before, after = _pair(old, new)
    gaps: list[_Bytes] = []
    values: list[_Words] = []
    end = -1  # the changed element before
    for start in range(0, len(after), _CHUNK):
        piece = after[start : start + _CHUNK]
        found = np.flatnonzero(before[start : start + _CHUNK] != piece)
        if len(found):
            values.append(piece[found])
            gaps.append(_escape(np.diff(found + start, prepend=end) - 1))
            end = int(found[-1]) + start
    if not values:
        return None
    gaps.append(_escape(np.array([len(after) - 1 - end])))
    together = np.concatenate(values)
    planes = together.view(np.uint8).reshape(len(together), together.itemsize)
    return Encoded(np.concatenate(gaps), np.ascontiguousarray(planes.T))


def changed(old: torch.Tensor, new: torch.Tensor) -> int:
    """Count elements that differ in their bits; arguments and errors as of `encode`."""
    before, after = _pair(old, new)
    return sum(
        int(np.count_nonzero(before[start : start + _CHUNK] != after[start : start + _CHUNK]))
        for start in range(0, len(after), _CHUNK)
    )


def decode_into(target: torch.Tensor, encoded: Encoded) -> None:
    """Overwrite the changed elements of `target`, which holds the bits of the version before. A repeat is harmless.

    Everything is checked before the first write: after a `WeightsError`, `target` is untouched.
    """
    words = _words(target)
    gaps, values = encoded.gaps, encoded.values
    if values.ndim != 2 or gaps.ndim != 1 or values.shape[0] != words.itemsize:
        raise WeightsError(f"a delta with {values.shape} values does not fit elements of {words.itemsize} bytes")
    ends = int(np.count_nonzero(gaps != _ESCAPE))
    covered = int(gaps.sum(dtype=np.int64)) + encoded.count
    if ends != encoded.count + 1 or gaps[-1] == _ESCAPE or covered != len(words):
        raise WeightsError(
            f"a delta over {covered} elements with {encoded.count} values and {ends} runs does not fit {len(words)}"
        )
    for first, places in _places(gaps, encoded.count):
        planes = np.ascontiguousarray(values[:, first : first + len(places)].T)
        words[places] = planes.view(words.dtype).reshape(-1)


def write_delta_shard(path: Path, changes: Mapping[str, Encoded], makes: str, *, durable: bool = False) -> Shard:
    """Write the changes of one file as one new file; `makes` is the checksum of the file that they make.

    Tensors that did not change are left out. OSError may leave part of the file.
    """
    arrays = [(f"gaps/{name}", encoded.gaps) for name, encoded in changes.items()]
    arrays += [(f"values/{name}", encoded.values) for name, encoded in changes.items()]
    pieces = encode_tensors([(name, torch.from_numpy(array)) for name, array in arrays])
    size = sum(piece.nbytes for piece in pieces)
    return write_pieces(path, _compressed(pieces, size), durable=durable, makes=makes)


def read_delta_shard(path: Path, shard: Shard, *, limit: int = DEFAULT_LIMIT) -> dict[str, Encoded]:
    """Read a file of `write_delta_shard`, checked against its entry; tensors that did not change are not in it.

    `decode_into` checks the arrays, because it knows the tensor they are for. More than `limit` bytes after
    decompression are refused; twice the bytes of the tensors are always enough.
    """
    state = xxhash.xxh3_128()
    size = path.stat().st_size
    if size != shard.bytes:
        raise WeightsError(f"{path} has {size} bytes, its manifest says {shard.bytes}")
    with path.open("rb") as file:
        while chunk := file.read(CHUNK_BYTES):
            state.update(chunk)
        if state.hexdigest() != shard.checksum:
            raise WeightsError(f"{path} has checksum {state.hexdigest()}, its manifest says {shard.checksum}")
        file.seek(0)
        try:
            data = _decompressed(file, limit)
        except (zstandard.ZstdError, ValueError) as error:
            raise WeightsError(f"{path} is no delta: {error}") from error
    return _collect(parse_tensors(data, str(path)), path)


def _pair(old: torch.Tensor, new: torch.Tensor) -> tuple[_Words, _Words]:
    if old.shape != new.shape or old.dtype != new.dtype:
        raise WeightsError(f"no delta from {old.dtype} {list(old.shape)} to {new.dtype} {list(new.shape)}")
    return _words(old), _words(new)


def _words(tensor: torch.Tensor) -> _Words:
    word = _WORDS.get(tensor.element_size())
    if word is None or tensor.device.type != "cpu" or not tensor.is_contiguous():
        raise WeightsError(f"no deltas of {tensor.dtype} tensors, or of tensors that are not contiguous on the CPU")
    words: _Words = tensor.detach().view(-1).view(word).numpy()
    return words


def _escape(runs: NDArray[np.int64]) -> _Bytes:
    """Runs as bytes: each as many times 255 as it holds, then the rest."""
    ends = np.cumsum(runs // _ESCAPE + 1)
    gaps = np.full(int(ends[-1]), _ESCAPE, dtype=np.uint8)
    gaps[ends - 1] = runs % _ESCAPE
    return gaps


def _places(gaps: _Bytes, count: int) -> Iterator[tuple[int, NDArray[np.int64]]]:
    """Yield the number of a changed element and the places of it and some that follow."""
    done, place = 0, 0
    for start in range(0, len(gaps), _CHUNK):
        piece = gaps[start : start + _CHUNK]
        ends = np.flatnonzero(piece != _ESCAPE)
        runs = np.cumsum(piece, dtype=np.int64)
        places = runs[ends] + np.arange(len(ends)) + place
        place += int(runs[-1]) + len(ends)
        yield done, places[: count - done]  # the last run ends after the last changed element
        done += len(ends)


def _compressed(pieces: list[memoryview[Any]], size: int) -> Iterator[bytes]:
    chunker = zstandard.ZstdCompressor(level=_LEVEL).chunker(size=size, chunk_size=1 << 20)
    for piece in pieces:
        yield from chunker.compress(piece)
    yield from chunker.finish()  # type: ignore[no-untyped-call]


def _decompressed(file: Any, limit: int) -> bytearray:
    """The content of a file that is exactly one zstd frame of a known size."""
    size = zstandard.get_frame_parameters(file.read(_FRAME_HEADER_BYTES)).content_size
    if not 8 <= size <= limit:
        raise ValueError(f"{size} bytes after decompression, at most {limit} are possible")
    file.seek(0)
    data = bytearray(size)
    view = memoryview(data)
    with zstandard.ZstdDecompressor().stream_reader(file, read_across_frames=False, closefd=False) as reader:
        while view.nbytes:
            count = reader.readinto(view)
            if not count:
                raise ValueError("it is cut off")
            view = view[count:]
        if reader.read(1) or file.read(1):
            raise ValueError("it is longer than it says")
    return data


def _collect(tensors: Mapping[str, torch.Tensor], path: Path) -> dict[str, Encoded]:
    names = [name.removeprefix("gaps/") for name in tensors if name.startswith("gaps/")]
    parts: dict[str, Encoded] = {}
    for name in names:
        gaps, values = tensors[f"gaps/{name}"], tensors.get(f"values/{name}")
        if values is None or gaps.dtype != torch.uint8 or values.dtype != torch.uint8:
            raise WeightsError(f"{path} is no delta: {name} does not have the two arrays of bytes")
        parts[name] = Encoded(gaps.numpy(), values.numpy())
    if len(tensors) != 2 * len(parts):
        raise WeightsError(f"{path} is no delta: it holds other tensors too")
    return parts
