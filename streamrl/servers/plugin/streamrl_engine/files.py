"""Reading one version of the weights inside an engine's process: safetensors files, on this host or fetched over HTTP.

Only safetensors is read, so nothing that a client names can run code here.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

xxhash: Any
try:
    import xxhash
except ImportError:  # then only the size of a fetched file and its safetensors header are compared
    xxhash = None

_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
}
_SHARED = "/dev/shm"  # noqa: S108 - a folder of its own is made in it
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")
_MAX_HEADER = 100 << 20
_BLOCK = 4 << 20
_PATIENCE = 20.0  # seconds of silence after which a connection counts as broken
_ATTEMPTS = 5  # connections in a row that bring nothing


class BadVersion(Exception):
    """The files are not a version of weights, or not the announced one."""


@dataclass(frozen=True)
class Head:
    """Type (as safetensors names it: `BF16`) and shape of one whole tensor."""

    dtype: str
    shape: tuple[int, ...]


@dataclass(frozen=True)
class Source:
    """Where one version lies. Travels as JSON with these names."""

    folder: str  # on this host
    parts: Mapping[str, tuple[str, ...]]  # tensor to its files, cut along the first dimension, in the order of the rows
    url: str = ""  # `url/FILE` serves the files to hosts that do not see the folder; empty: not served
    token_file: str = ""  # on this host, with the bearer token for `url`; empty: see $STREAMRL_WEIGHTS_TOKEN_FILE
    sizes: Mapping[str, int] = field(default_factory=dict)  # bytes; empty: as `url/manifest.json` says
    checksums: Mapping[str, str] = field(default_factory=dict)  # xxh3-128 in hexadecimal, compared after fetching

    @classmethod
    def parse(cls, data: Mapping[str, Any]) -> Source:
        """Build from parsed JSON; `BadVersion` for unknown keys, file names that leave the folder, or no tensors."""
        try:
            source = cls(**{**data, "parts": {name: tuple(files) for name, files in data["parts"].items()}})
        except (KeyError, TypeError, AttributeError) as error:
            raise BadVersion(f"not a description of a version: {error}") from error
        if not source.parts or not all(source.parts.values()):
            raise BadVersion("a version without tensors, or a tensor without a file")
        for name in source.files:
            if not isinstance(name, str) or not _NAME.fullmatch(name):
                raise BadVersion(f"{name!r} is not a file name")
        return source

    @property
    def files(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(name for files in self.parts.values() for name in files))


def table(source: Source) -> dict[str, Head]:
    """Return type and shape of every whole tensor, from the headers of the files alone.

    `BadVersion`: a file is missing, short or not safetensors, or parts are missing or do not fit together.
    """
    headers = {name: _header(Path(source.folder, name)) for name in source.files}
    found = {}
    for name, files in source.parts.items():
        missing = [file for file in files if name not in headers[file]]
        if missing:
            raise BadVersion(f"{missing[0]} in {source.folder} does not hold {name}")
        heads = [headers[file][name] for file in files]
        fitting = {(head.dtype, head.shape[1:]) for head in heads}
        if len(heads) > 1 and (len(fitting) > 1 or not all(head.shape for head in heads)):
            raise BadVersion(f"the parts of {name} do not fit together: {[head.shape for head in heads]}")
        first = heads[0]
        rows = sum(head.shape[0] for head in heads) if first.shape else 0
        found[name] = Head(first.dtype, (rows, *first.shape[1:])) if first.shape else first
    return found


def tensors(source: Source) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield every whole tensor in the order of `parts`.

    A tensor in a single file is a read-only view of the mapped file. Files stay mapped until the iterator ends.
    """
    opened: dict[str, Any] = {}
    try:
        for name in source.files:
            opened[name] = safe_open(Path(source.folder, name), framework="pt")
        for name, files in source.parts.items():
            pieces = [opened[file].get_tensor(name) for file in files]
            yield name, pieces[0] if len(pieces) == 1 else torch.cat(pieces)
    except (OSError, ValueError) as error:
        raise BadVersion(f"cannot read {source.folder}: {error}") from error
    except Exception as error:
        if type(error).__name__ != "SafetensorError":  # its module moved between releases
            raise
        raise BadVersion(f"cannot read {source.folder}: {error}") from error


class Landing:
    """Brings the files of versions to this host: uses a visible folder as it is, otherwise fetches into one of its own.

    Fetched files go to `$STREAMRL_LANDING`, or shared memory, or the temporary folder; `deadline` is in seconds and for
    one version.
    """

    def __init__(self, deadline: float = 600.0) -> None:
        self._deadline = deadline
        self._root: Path | None = None
        self._brought: tuple[Source, Source] | None = None

    def bring(self, source: Source) -> Source:
        """Return the version as files of this host; files that are here as announced are not fetched again."""
        self._brought = None
        here = source
        if not Path(source.folder).is_dir():
            if not source.url:
                raise BadVersion(
                    f"the server does not see {source.folder}: it is on another host, or the version is gone"
                )
            here = announced(source)
            # Another run may serve other bytes at the same address.
            name = _digest(f"{here.url} {sorted(here.sizes.items())} {sorted(here.checksums.items())}")
            here = fetch(here, self._made() / name, deadline=self._deadline)
        self._brought = source, here
        return here

    def local(self, source: Source) -> Source:
        """Like `bring`, but the version that was brought last is not asked for again."""
        return self._brought[1] if self._brought and self._brought[0] == source else self.bring(source)

    def clear(self, keep: Source | None = None) -> None:
        if keep is None:
            self._brought = None
        if self._root is None:
            return
        for folder in self._root.iterdir():
            if keep is None or folder != Path(keep.folder):
                shutil.rmtree(folder, ignore_errors=True)
        if keep is None:
            self._root.rmdir()
            self._root = None

    def _made(self) -> Path:
        if self._root is None:
            shared = _SHARED if os.access(_SHARED, os.W_OK) else None
            self._root = Path(tempfile.mkdtemp("", "streamrl-landing-", os.environ.get("STREAMRL_LANDING") or shared))
        return self._root


def torch_dtype(name: str) -> torch.dtype:
    if name not in _DTYPES:
        raise BadVersion(f"tensors of type {name} are not known here")
    return _DTYPES[name]


def finite(tensor: torch.Tensor) -> bool:
    """Whether all values are finite: one pass over the bytes, no copy."""
    if not tensor.is_floating_point() or tensor.numel() == 0:
        return True
    # A sum in fp32 is as fast as memory and no finite sum of finite weights overflows it.
    return bool(torch.isfinite(tensor.sum(dtype=torch.float64 if tensor.dtype == torch.float64 else torch.float32)))


def fetch(source: Source, into: Path, *, deadline: float) -> Source:
    """Bring the files of `source.url` into a folder of this host and return the source there.

    A file that is there already and whole is not fetched again; a broken connection goes on where it ended. Each file
    appears whole, under its name. `BadVersion`: not served, wrong size or checksum, or not complete within `deadline`
    seconds.
    """
    into.mkdir(parents=True, exist_ok=True)
    end = time.monotonic() + deadline
    source = announced(source)
    headers = _headers(source)
    for name in source.files:
        if name not in source.sizes:
            raise BadVersion(f"the size of {name} was not announced")
        _fetch(f"{source.url.rstrip('/')}/{name}", into / name, source, headers, end)
    return replace(source, folder=str(into), url="", token_file="")


def announced(source: Source) -> Source:
    """Return the source with the size and the checksum of each file, as `url/manifest.json` says; refuses a delta."""
    if not source.url.startswith(("http://", "https://")):
        raise BadVersion(f"{source.url} is no HTTP address")
    return source if source.sizes else _announced(source, _headers(source))


def _headers(source: Source) -> dict[str, str]:
    file = source.token_file or os.environ.get("STREAMRL_WEIGHTS_TOKEN_FILE", "")
    if not file:
        return {}
    try:
        return {"Authorization": "Bearer " + Path(file).read_text(encoding="utf-8").strip()}
    except OSError as error:
        raise BadVersion(f"the token in {file} cannot be read: {error.strerror}") from error


def _announced(source: Source, headers: dict[str, str]) -> Source:
    url = f"{source.url.rstrip('/')}/manifest.json"
    try:
        request = urllib.request.Request(url, headers=headers)  # noqa: S310 - the scheme was looked at
        with urllib.request.urlopen(request, timeout=_PATIENCE) as answer:  # noqa: S310
            shards = json.loads(answer.read(_MAX_HEADER))["shards"]
        if any(shard.get("kind", "full") != "full" for shard in shards):
            raise BadVersion(
                f"{source.url} is a delta, which only a replica on this server's own host can put together"
            )
        return replace(
            source,
            sizes={shard["file"]: int(shard["bytes"]) for shard in shards},
            checksums={shard["file"]: str(shard["checksum"]) for shard in shards},
        )
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise BadVersion(f"{url} cannot be read: {error}") from error


def _fetch(url: str, target: Path, source: Source, headers: dict[str, str], end: float) -> None:
    size, checksum = source.sizes[target.name], source.checksums.get(target.name, "")
    if target.exists() and target.stat().st_size == size:
        return
    partial = target.with_name(f".{target.name}.part")
    idle = 0
    cause: Exception | None = None
    while (have := partial.stat().st_size if partial.exists() else 0) < size:
        if idle >= _ATTEMPTS or time.monotonic() > end:
            raise BadVersion(f"{url} stopped at byte {have} of {size}: {cause or 'the deadline is over'}")
        try:
            _append(url, partial, have, headers, end)
        except urllib.error.HTTPError as error:
            if error.code < 500 and error.code != 429:
                raise BadVersion(f"{url} answers {error.code}") from error
            cause = error
        except OSError as error:
            cause = error
        got = partial.stat().st_size if partial.exists() else 0
        idle = 0 if got > have else idle + 1
        if idle:
            time.sleep(min(0.1 * 2**idle, 2.0))
    if have > size or (checksum and xxhash is not None and _checksum(partial) != checksum):
        partial.unlink()
        raise BadVersion(f"{url} is not the file that was announced ({size} bytes, xxh3 {checksum or 'unknown'})")
    partial.replace(target)


def _append(url: str, partial: Path, have: int, headers: dict[str, str], end: float) -> None:
    request = urllib.request.Request(url, headers={**headers, "Range": f"bytes={have}-"} if have else headers)  # noqa: S310
    with urllib.request.urlopen(request, timeout=_PATIENCE) as answer, partial.open("ab") as file:  # noqa: S310
        if have and answer.status != 206:
            file.truncate(0)
        while block := answer.read(_BLOCK):
            file.write(block)
            if time.monotonic() > end:
                return


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:24]


def _checksum(path: Path) -> str:
    digest = xxhash.xxh3_128()
    with path.open("rb") as file:
        while block := file.read(_BLOCK):
            digest.update(block)
    return str(digest.hexdigest())


def _header(path: Path) -> dict[str, Head]:
    try:
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            if not 2 <= length <= _MAX_HEADER:
                raise BadVersion(f"{path} is not a safetensors file")
            entries = json.loads(file.read(length))
            whole = file.seek(0, os.SEEK_END)
        entries.pop("__metadata__", None)
        ends = [entry["data_offsets"][1] for entry in entries.values()]
        heads = {name: Head(entry["dtype"], tuple(entry["shape"])) for name, entry in entries.items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError, IndexError) as error:
        raise BadVersion(f"cannot read {path}: {error}") from error
    if whole != 8 + length + max(ends, default=0):
        raise BadVersion(f"{path} has {whole} bytes, its header speaks of {8 + length + max(ends, default=0)}")
    return heads
