"""The manifest of one version: what was published, where it lies, and how a receiver proves that it is whole."""

from __future__ import annotations

from typing import Annotated, Final, Literal, TypeAlias

import msgspec

from streamrl.errors import WeightsError

SCHEMA: Final = 1
MAX_MANIFEST_BYTES: Final = 32 << 20

# A name of one file or folder: no path, so that a manifest cannot point outside of the folder of its transport.
_FileName: TypeAlias = Annotated[str, msgspec.Meta(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,127}$")]
_Count: TypeAlias = Annotated[int, msgspec.Meta(ge=0, le=(1 << 53))]
_Checksum: TypeAlias = Annotated[str, msgspec.Meta(pattern=r"^[0-9a-f]{32}$")]
Pair: TypeAlias = tuple[int, int]


class Shard(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One safetensors file: name inside the folder, size in bytes, xxh3-128 of all its bytes in hexadecimal."""

    file: _FileName
    bytes: _Count
    checksum: _Checksum


class TensorEntry(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One tensor: Hugging Face name, safetensors dtype (`F32`, `BF16`, ...), shape, index into the shards."""

    name: str
    dtype: str
    shape: list[_Count]
    shard: _Count


class Manifest(msgspec.Struct, frozen=True, kw_only=True, tag="manifest"):
    """One version of the weights.

    `version` only grows, also across restarts of the learner; `epoch` is that of the learner that wrote it, `step` the
    optimizer step the weights come from. `base` names the version a delta needs; None: the version is full. `folder`
    is the name of the version's folder below the root of the transport.
    """

    v: int = SCHEMA
    run: str
    version: _Count
    epoch: _Count
    step: _Count
    base: _Count | None = None
    transport: Literal["shm", "directory"]
    folder: _FileName
    shards: list[Shard]
    tensors: list[TensorEntry]

    def __post_init__(self) -> None:
        names = {entry.name for entry in self.tensors}
        if len(names) != len(self.tensors):
            raise ValueError("a tensor is named twice")
        if any(entry.shard >= len(self.shards) for entry in self.tensors):
            raise ValueError("a tensor lies in a shard that the manifest does not list")

    @property
    def pair(self) -> Pair:
        """(epoch, version): what orders versions, because two learners may use one number."""
        return self.epoch, self.version

    @property
    def total_bytes(self) -> int:
        """Bytes of all shards."""
        return sum(shard.bytes for shard in self.shards)


_decoder: Final = msgspec.json.Decoder(Manifest)


def encode(manifest: Manifest) -> bytes:
    """Return a manifest as JSON bytes."""
    return msgspec.json.encode(manifest)


def decode(data: bytes) -> Manifest:
    """Return the manifest in `data`.

    Raises:
        WeightsError: too large, no manifest, of an unknown schema version, or against its own rules.
    """
    if len(data) > MAX_MANIFEST_BYTES:
        raise WeightsError(f"a manifest of {len(data)} bytes is over the limit of {MAX_MANIFEST_BYTES}")
    try:
        manifest = _decoder.decode(data)
    except (msgspec.DecodeError, RecursionError) as error:
        raise WeightsError(f"not a manifest of weights: {error}") from error
    if manifest.v != SCHEMA:
        raise WeightsError(f"manifest of schema version {manifest.v}, this program knows {SCHEMA}")
    return manifest


def folder_name(epoch: int, version: int) -> str:
    """Name of the folder of a version; both numbers are in it, because two learners may use one version number."""
    return f"v-{epoch}-{version}"


def parse_folder(name: str) -> Pair | None:
    """Return (epoch, version) of a folder's name, None when it is no folder of a version."""
    parts = name.split("-")
    if len(parts) != 3 or parts[0] != "v" or not (parts[1].isdecimal() and parts[2].isdecimal()):
        return None
    return int(parts[1]), int(parts[2])
