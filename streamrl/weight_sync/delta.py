"""Deltas: only the changed values of a tensor, bit for bit, and the file that holds those of one file of a version.

A delta names the changed elements and their new values, so applying it twice does no harm, and a value never drifts.
Values are compared as bits, so that -0.0 and the payloads of NaN arrive too. The format: docs/internals/weights.md.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, TypeAlias

import numpy as np
import torch
import zstandard
from numpy.typing import NDArray

from streamrl.errors import WeightsError
from streamrl.weight_sync.files import checksum
from streamrl.weight_sync.manifest import Shard
from streamrl.weight_sync.tensors import encode_tensors, parse_tensors, write_pieces

_ESCAPE: Final = 255
_CHUNK: Final = 1 << 22  # elements looked at together: bounds the memory of both directions
_WORDS: Final[Mapping[int, torch.dtype]] = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_Bytes: TypeAlias = NDArray[np.uint8]
_Words: TypeAlias = NDArray[Any]


@dataclass(frozen=True, eq=False)
class Encoded:
    """The changes of one tensor."""

    gaps: _Bytes  # runs of unchanged elements, shape (any,)
    values: _Bytes  # byte planes, shape (width, count)

    @property
    def count(self) -> int:
        return int(self.values.shape[1])

    @property
    def bytes(self) -> int:
        return self.gaps.nbytes + self.values.nbytes


def encode(old: torch.Tensor, new: torch.Tensor) -> Encoded | None:
    """What turns the bits of `old` into those of `new`, None when they are the same.

    Both are contiguous CPU tensors of one shape and dtype.
    """
    before, after = _words(old), _words(new)
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
    """Count elements that differ in their bits."""
    before, after = _words(old), _words(new)
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
    """Write the changes of one file as one new file; `makes` is the checksum of the file that they make."""
    arrays = [(f"gaps/{name}", encoded.gaps) for name, encoded in changes.items()]
    arrays += [(f"values/{name}", encoded.values) for name, encoded in changes.items()]
    pieces = encode_tensors([(name, torch.from_numpy(array)) for name, array in arrays])
    return write_pieces(path, _compressed(pieces), durable=durable, makes=makes)


def read_delta_shard(path: Path, shard: Shard) -> dict[str, Encoded]:
    """Read a file of `write_delta_shard`, checked against its entry; tensors that did not change are not in it."""
    data = path.read_bytes()
    if (found := checksum(data)) != shard.checksum:
        raise WeightsError(f"{path} has checksum {found}, its manifest says {shard.checksum}")
    try:
        tensors = parse_tensors(_decompressed(data), str(path))
        names = [name.removeprefix("gaps/") for name in tensors if name.startswith("gaps/")]
        return {name: Encoded(tensors[f"gaps/{name}"].numpy(), tensors[f"values/{name}"].numpy()) for name in names}
    except (zstandard.ZstdError, KeyError) as error:
        raise WeightsError(f"{path} is no delta: {error}") from error


def _words(tensor: torch.Tensor) -> _Words:
    words: _Words = tensor.detach().view(-1).view(_WORDS[tensor.element_size()]).numpy()
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


def _decompressed(data: bytes) -> bytearray:
    """The content of a frame, in one piece of memory that tensors can be views of."""
    size = zstandard.frame_content_size(data)
    if size < 0:
        raise zstandard.ZstdError("it does not say how long its content is")
    content = bytearray(size)
    with zstandard.ZstdDecompressor().stream_reader(data) as reader:
        if (found := reader.readinto(content)) != size:
            raise zstandard.ZstdError(f"it ends after {found} of {size} bytes")
    return content


def _compressed(pieces: list[memoryview[Any]]) -> Iterator[bytes]:
    size = sum(piece.nbytes for piece in pieces)
    chunker = zstandard.ZstdCompressor(level=1).chunker(size=size, chunk_size=1 << 20)
    for piece in pieces:
        yield from chunker.compress(piece)
    yield from chunker.finish()  # type: ignore[no-untyped-call]
