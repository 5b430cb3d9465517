"""The manifest of one version: what was published, and how a receiver proves it. Needs no torch."""

from __future__ import annotations

import contextlib
import re
from pathlib import Path
from typing import Annotated, Final, Literal, TypeAlias

import msgspec

from streamrl.config import Quantize
from streamrl.errors import WeightsError

SCHEMA: Final = 3
MAX_MANIFEST_BYTES: Final = 32 << 20
MANIFEST_FILE: Final = "manifest.json"

# A name of one file or folder: no path, so that a manifest cannot point outside of the folder of its transport.
_FileName: TypeAlias = Annotated[str, msgspec.Meta(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,127}$")]
_Count: TypeAlias = Annotated[int, msgspec.Meta(ge=0, le=(1 << 53))]
_Checksum: TypeAlias = Annotated[str, msgspec.Meta(pattern=r"^[0-9a-f]{32}$")]
Pair: TypeAlias = tuple[int, int]
_Url: TypeAlias = Annotated[str, msgspec.Meta(pattern=r"^https?://[^\s]{1,500}$")]


class Shard(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A safetensors file of whole tensors; in a delta what changed in the file of the same place (delta.py)."""

    file: _FileName
    bytes: _Count
    checksum: _Checksum  # xxh3-128 of all its bytes in hexadecimal
    makes: _Checksum | None = None  # in a delta: that of the safetensors file after the change


class TensorEntry(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    name: str  # of Hugging Face; a tied tensor comes under one of its names
    dtype: str  # of safetensors (`F32`, `BF16`, ...)
    shape: list[_Count]
    shard: _Count  # index of the file that holds it


class Adapter(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """What peft needs to know of a version that is an adapter alone (LoRA)."""

    base: str  # `model.path` of the learner
    rank: Annotated[int, msgspec.Meta(ge=1, le=1 << 16)]
    alpha: Annotated[float, msgspec.Meta(gt=0)]
    targets: list[str]  # adapted modules, by the last part of the name where all of that name are adapted
    dora: bool = False  # weight-decomposed, with a magnitude for each row

    @property
    def scale(self) -> float:
        return self.alpha / self.rank

    @property
    def kind(self) -> str:
        return "DoRA" if self.dora else "LoRA"


class LanePlace(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Where servers join the broadcast of a version (lane.py); its key there is the name of its folder."""

    host: str
    port: Annotated[int, msgspec.Meta(ge=1, lt=1 << 16)]
    stall: Annotated[float, msgspec.Meta(gt=0)]  # seconds that one piece may take


class Quantised(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The same weights once more, quantised, in files of their own beside the others (quantize.py)."""

    kind: Quantize
    shards: list[Shard]
    tensors: list[TensorEntry]


class Manifest(msgspec.Struct, frozen=True, kw_only=True, tag="manifest"):
    v: int = SCHEMA
    run: str
    version: _Count  # only grows, also across restarts of the learner
    epoch: _Count  # of the learner that wrote it
    step: _Count  # optimizer step that the weights come from
    base: tuple[_Count, _Count] | None = None  # (epoch, version) that it is a delta of; None: its files are whole
    transport: _FileName
    folder: _FileName  # below the root of the transport
    sources: list[_Url] = []  # servers that have the files (http, collective)
    lane: LanePlace | None = None  # collective
    shards: list[Shard]
    tensors: list[TensorEntry]
    adapter: Adapter | None = None  # the tensors are an adapter alone, by the names of peft
    quantised: Quantised | None = None  # what servers take in the place of `shards` and `tensors`

    def __post_init__(self) -> None:
        if self.quantised is not None and not self.offered.tensors:  # which keeps these rules too
            raise ValueError("a quantised version without tensors")
        names = {entry.name for entry in self.tensors}
        if len(names) != len(self.tensors):
            raise ValueError("a tensor is named twice")
        if any(entry.shard >= len(self.shards) for entry in self.tensors):
            raise ValueError("a tensor lies in a shard that the manifest does not list")
        if len({shard.file for shard in self.files} - {MANIFEST_FILE}) != len(self.files):
            raise ValueError("a file is named twice, or like the manifest")
        if any((shard.makes is None) != (self.base is None) for shard in self.shards):
            raise ValueError("a delta without a base or without the checksum of what it makes")
        if self.base is not None and self.adapter is not None:
            raise ValueError("an adapter that is a delta")

    @property
    def pair(self) -> Pair:
        """(epoch, version) orders versions, because two learners may use one number."""
        return self.epoch, self.version

    @property
    def kind(self) -> Literal["full", "delta", "adapter"]:
        if self.adapter is not None:
            return "adapter"
        return "full" if self.base is None else "delta"

    @property
    def files(self) -> list[Shard]:
        """All files of the version."""
        return self.shards if self.quantised is None else self.shards + self.quantised.shards

    @property
    def offered(self) -> Manifest:
        """The manifest of what engines take, and only of that: the quantised tensors where there are any."""
        if self.quantised is None:
            return self
        shards, tensors = self.quantised.shards, self.quantised.tensors
        return msgspec.structs.replace(self, shards=shards, tensors=tensors, quantised=None)

    @property
    def total_bytes(self) -> int:
        return sum(shard.bytes for shard in self.files)


class _Schema(msgspec.Struct):
    v: int


_decoder: Final = msgspec.json.Decoder(Manifest)
_schema_decoder: Final = msgspec.json.Decoder(_Schema)


def encode(manifest: Manifest) -> bytes:
    return msgspec.json.encode(manifest)


def decode(data: bytes) -> Manifest:
    """Parse a manifest; WeightsError when it is too large, of an unknown schema version, or breaks its own rules."""
    if len(data) > MAX_MANIFEST_BYTES:
        raise WeightsError(f"a manifest of {len(data)} bytes is over the limit of {MAX_MANIFEST_BYTES}")
    try:
        schema = _schema_decoder.decode(data).v
        if schema != SCHEMA:
            raise WeightsError(
                f"a version of schema {schema}, this program reads {SCHEMA}",
                "it is of another version of streamrl: the learner publishes its weights anew when it starts",
            )
        return _decoder.decode(data)
    except (msgspec.DecodeError, RecursionError) as error:
        raise WeightsError(f"not a manifest of weights: {error}") from error


def folder_name(epoch: int, version: int) -> str:
    """Both numbers are in the name, because two learners may use one version number."""
    return f"v-{epoch}-{version}"


def parse_folder(name: str) -> Pair | None:
    """(epoch, version) of a folder's name, None when it is not the folder of a version."""
    found = re.fullmatch(r"v-([0-9]{1,19})-([0-9]{1,19})", name)
    return None if found is None else (int(found[1]), int(found[2]))


def read_manifest(folder: Path) -> Manifest:
    """The manifest of the version in a folder; `WeightsError` when it is invalid, `OSError` when unreadable."""
    return decode((folder / MANIFEST_FILE).read_bytes())


def versions(root: Path) -> dict[Pair, Manifest]:
    """The versions in a folder, ascending, without those that cannot be read; a missing folder has none."""
    found: dict[Pair, Manifest] = {}
    names = [entry.name for entry in root.iterdir()] if root.is_dir() else []
    for pair in sorted(filter(None, map(parse_folder, names))):
        with contextlib.suppress(OSError, WeightsError):
            found[pair] = read_manifest(root / folder_name(*pair))
    return found
