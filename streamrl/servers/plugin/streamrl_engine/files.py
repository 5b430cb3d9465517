"""Reading one version of the weights inside an engine's process: safetensors files, on this host or fetched over HTTP.

Only safetensors is read, so nothing that a client names can run code here.
"""

from __future__ import annotations

import errno
import hashlib
import json
import logging
import os
import shutil
import socket
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from .lane import Member, device_in_use

logger = logging.getLogger(__name__)
xxhash: Any
try:
    import xxhash
except ImportError:  # then nothing is fetched
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
_BLOCK = 4 << 20
_PATIENCE = 20.0  # seconds of silence after which a connection counts as broken
_ATTEMPTS = 5  # connections in a row that bring nothing
_DEADLINE = 600.0  # seconds for one version
NOT_FETCHED = "not fetched: "
"""Begins the message of a `BadVersion` of which nothing is known but that its files did not come."""
Everyone = Callable[[Any], "list[Any]"]  # returns what each rank gives, in the order of the ranks; all must call it


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

    folder: str  # on this host; empty: the files are only served
    files: Sequence[str]  # safetensors files of whole tensors
    structure: str  # digest of all names, types and shapes: what was found out of one version holds for the next
    url: str = ""  # `url/FILE` serves the files to hosts that do not see the folder; empty: not served
    proofs: Sequence[tuple[int, str]] = ()  # bytes and xxh3-128 of each file that is served
    lane: Mapping[str, Any] | None = None  # where the learner broadcasts the version, too

    @property
    def visible(self) -> bool:
        return bool(self.folder) and Path(self.folder).is_dir()


class Opened:
    """The files of a version, mapped: they stay readable when they lose their names."""

    def __init__(self, source: Source) -> None:
        self._files: list[Any] = []
        for name in source.files:
            path = Path(source.folder, name)
            try:
                self._files.append(safe_open(path, framework="pt"))
            except (OSError, SafetensorError) as error:
                raise BadVersion(f"cannot read {path}: {error}") from error

    def heads(self) -> dict[str, Head]:
        """Type and shape of every tensor, from the headers alone."""
        slices = {name: file.get_slice(name) for file in self._files for name in file.keys()}  # noqa: SIM118
        return {name: Head(each.get_dtype(), tuple(each.get_shape())) for name, each in slices.items()}

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield every tensor, as a read-only view of the mapped file."""
        for file in self._files:
            for name in file.keys():  # noqa: SIM118
                yield name, file.get_tensor(name)


def gathered(mine: Any, group: Any) -> list[Any]:
    """What each rank of a group has, as JSON and never pickle; all ranks must ask."""
    if group.world_size == 1:
        return [mine]
    data = torch.tensor(list(json.dumps(mine).encode()), dtype=torch.uint8)
    sizes = [torch.zeros(1, dtype=torch.int64) for _ in range(group.world_size)]
    torch.distributed.all_gather(sizes, torch.tensor([len(data)]), group=group.cpu_group)
    texts = [torch.zeros(max(map(int, sizes)), dtype=torch.uint8) for _ in sizes]
    padded = torch.nn.functional.pad(data, (0, len(texts[0]) - len(data)))
    torch.distributed.all_gather(texts, padded, group=group.cpu_group)
    return [json.loads(bytes(text[:size].tolist())) for text, size in zip(texts, map(int, sizes), strict=True)]


def torch_dtype(name: str) -> torch.dtype:
    if name not in _DTYPES:
        raise BadVersion(f"tensors of type {name} are not known here")
    return _DTYPES[name]


class Landing:
    """Brings the files of versions to this host: uses a visible folder as it is, otherwise fetches into one of its own.

    The first rank of each host fetches, in a thread, by the lane or over HTTP, while the engine generates.
    """

    def __init__(self) -> None:
        self._root: Path | None = None
        self._applied: Path | None = None
        self._member = Member()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="landing")
        self._wanted: Source | None = None
        self._fetching: Future[str] | None = None
        self._first = -1  # rank that fetches for this host

    def begin(self, source: Source, everyone: Everyone, deadline: float = _DEADLINE) -> bool:
        """Begin to bring a version here, once; whether that has ended on all ranks, which must all call."""
        if source != self._wanted:
            me = [socket.gethostname(), Path("/proc/sys/kernel/random/boot_id").read_text(), os.getpid()]
            ranks = everyone(me)
            self._first = next(rank for rank, other in enumerate(ranks) if other[:2] == me[:2])
            if self._fetching is not None and not self._fetching.done():  # given up: its host may be gone
                self._thread.shutdown(wait=False, cancel_futures=True)
                self._member, self._thread = Member(), ThreadPoolExecutor(1, thread_name_prefix="landing")
            self._wanted, self._fetching = source, None
            if not source.visible and ranks[self._first] == me:
                end = time.monotonic() + deadline
                self._fetching = self._thread.submit(self._fetch, source, end, device_in_use(), self._member)
        return all(everyone(self._fetching is None or self._fetching.done()))

    def bring(self, source: Source, everyone: Everyone, deadline: float = _DEADLINE) -> Source:
        """Wait for what was begun, and return the version as files of this host. All ranks must call it.

        `BadVersion`: wrong bytes, or not allowed; with `NOT_FETCHED`: not here within `deadline` seconds.
        """
        self.begin(source, everyone, deadline)
        folder, problem = source.folder, ""
        if self._fetching is not None:
            if error := self._fetching.exception():
                problem = f"{'' if isinstance(error, BadVersion) else NOT_FETCHED}{str(error) or type(error).__name__}"
            else:
                folder = self._fetching.result()
        ranks = everyone([folder, problem])
        if not source.visible:
            folder, problem = ranks[self._first]
        self._wanted = None  # another try begins anew, as what is served there may be another run's then
        if problem:
            raise BadVersion(problem)
        return replace(source, folder=folder, url="", lane=None)

    def clear(self, keep: Source | None = None) -> None:
        self._applied = None if keep is None else Path(keep.folder)
        self._keep(self._applied)
        if keep is None:
            self._wanted = None
            if self._root is not None:
                shutil.rmtree(self._root, ignore_errors=True)
                self._root = None

    def _keep(self, *folders: Path | None) -> None:
        for folder in self._root.glob("*") if self._root is not None else ():
            if folder not in folders:
                shutil.rmtree(folder, ignore_errors=True)

    def _fetch(self, source: Source, end: float, device: tuple[int, str], member: Member) -> str:
        """Return the folder of the files, which appear under their names whole; those that are there stay."""
        if not source.url:
            problem = "the server does not see it, and it is not served whole: it is on another host, or gone"
            raise FileNotFoundError(f"{source.folder}: {problem}")
        if xxhash is None:
            raise BadVersion("fetched files cannot be proven: install xxhash in the server's environment")
        if wrong := [name for name in source.files if "/" in name]:
            raise BadVersion(f"{wrong[0]} is not the name of a file")
        about = [source.url, [*source.files], [*source.proofs]]  # another run may have the same address
        folder = self._made() / hashlib.sha256(json.dumps(about).encode()).hexdigest()[:24]
        self._keep(folder, self._applied)  # all others were given up
        folder.mkdir(exist_ok=True)
        files = [(folder / name, *proof) for name, proof in zip(source.files, source.proofs, strict=True)]
        need = sum(size for _, size, _ in files) - sum(path.stat().st_size for path in folder.iterdir())
        if need > (free := shutil.disk_usage(folder).free):
            hint = "give the host (or container: --shm-size) a larger /dev/shm"
            raise OSError(errno.ENOSPC, f"{need >> 20} MiB needed, {free >> 20} MiB free: {hint}", str(folder))

        def given_up() -> bool:
            return time.monotonic() > end or source is not self._wanted

        if source.lane is not None and not all(path.exists() for path, *_ in files):
            drafts = [(path.with_name(f".{path.name}.lane"), size) for path, size, _ in files]
            version = source.url.rpartition("/")[2]
            try:
                member.receive(source.lane, version, drafts, device, given_up, token=_token())
                for (draft, _), (path, _, checksum) in zip(drafts, files, strict=True):
                    if _checksum(draft) != checksum:
                        raise BadVersion(f"{path.name} came with other bytes than announced")
                    draft.replace(path)
            except (BadVersion, RuntimeError, OSError, ValueError, LookupError, TypeError) as error:
                logger.warning("lane missed, the files are fetched: %s", error)
            finally:
                for draft, _ in drafts:
                    draft.unlink(missing_ok=True)
        for path, size, checksum in files:
            _download(f"{source.url}/{path.name}", path, size, checksum, given_up)
        return str(folder)

    def _made(self) -> Path:
        if self._root is None or not self._root.is_dir():
            shared = _SHARED if os.access(_SHARED, os.W_OK) else tempfile.gettempdir()
            place = os.environ.get("STREAMRL_LANDING") or shared
            Path(place).mkdir(mode=0o700, parents=True, exist_ok=True)
            self._root = Path(tempfile.mkdtemp(prefix="streamrl-landing-", dir=place))
        return self._root


def _download(url: str, target: Path, size: int, checksum: str, given_up: Callable[[], bool]) -> None:
    """Bring one file, which appears whole under its name; a broken connection goes on where it ended."""
    if target.exists():
        return
    partial = target.with_name(f".{target.name}.part")
    partial.touch()
    idle, have = 0, partial.stat().st_size
    cause: OSError | None = None
    while have < size:
        if idle >= _ATTEMPTS or given_up():
            raise TimeoutError(f"{url} stopped at byte {have} of {size}: {cause or 'it was given up'}")
        try:
            with _open(url, have) as answer, partial.open("ab") as file:
                if have and answer.status != 206:
                    file.truncate(0)
                while not given_up() and (block := answer.read(_BLOCK)):
                    file.write(block)
        except OSError as error:
            if isinstance(error, urllib.error.HTTPError) and error.code < 500 and error.code != 429:
                kind = FileNotFoundError if error.code == 404 else BadVersion
                hint = ": $STREAMRL_WEIGHTS_TOKEN_FILE names no token of this run" if error.code in {401, 403} else ""
                raise kind(f"{url} answers {error.code}{hint}") from error
            cause = error
        before, have = have, partial.stat().st_size
        idle = 0 if have > before else idle + 1
        if idle:
            time.sleep(min(0.1 * 2**idle, 2.0))
    if have > size or _checksum(partial) != checksum:
        partial.unlink()
        raise BadVersion(f"{url} is not the file that was announced ({size} bytes, xxh3 {checksum})")
    partial.replace(target)


def _open(url: str, start: int = 0) -> Any:
    if not url.startswith(("http://", "https://")):
        raise BadVersion(f"{url} is no HTTP address")
    request = urllib.request.Request(url, headers={"Range": f"bytes={start}-"} if start else {})  # noqa: S310
    if token := _token():
        request.add_header("Authorization", f"Bearer {token}")
    return urllib.request.urlopen(request, timeout=_PATIENCE)  # noqa: S310


def _token() -> str:
    file = os.environ.get("STREAMRL_WEIGHTS_TOKEN_FILE")
    try:
        return Path(file).read_text(encoding="utf-8").strip() if file else ""
    except OSError as error:
        raise BadVersion(f"the token in {file} cannot be read: {error.strerror}") from error


def _checksum(path: Path) -> str:
    digest = xxhash.xxh3_128()
    with path.open("rb") as file:
        while block := file.read(_BLOCK):
            digest.update(block)
    return str(digest.hexdigest())
