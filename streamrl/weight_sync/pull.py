"""Pulls the files of a version by ranges, some side by side, from the learner's host or from an object store.

What came before a transfer broke is kept, and the rest is asked for until `weights.deadline`. A file with a wrong
checksum is pulled again, three times at most, and never used.
"""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import logging
import os
import random
import re
import shutil
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, Self, TypeAlias, TypeVar
from urllib.parse import urlsplit

import xxhash
from typing_extensions import override

from streamrl.errors import CannotCreate, StreamrlError, Unreachable, WeightsError, unwrapped
from streamrl.store import ObjectStore, ReadableFile
from streamrl.weight_sync.files import StagingFolder
from streamrl.weight_sync.manifest import MANIFEST_FILE, MAX_MANIFEST_BYTES, Manifest, Shard
from streamrl.weight_sync.source import Traffic, WeightSource, base_folder, checked_base

logger = logging.getLogger(__name__)
_SIDE_BY_SIDE: Final = 4
_BUFFER_BYTES: Final = 1 << 20
_SILENCE: Final = 5.0  # seconds until the rest is asked for again; a cancelled fetch ends within them
_FIRST_PAUSE: Final = 0.05
_LONGEST_PAUSE: Final = 2.0
_PROOFS: Final = 3
_HINT: Final = (
    "weights.host must be an address of the learner's host that this host reaches, and weights.port open to it"
    " (0 is another port at each start); or raise weights.deadline"
)
_STORE_HINT: Final = "fix the address or the credentials of weights.url on this host, or raise weights.deadline"
_T = TypeVar("_T")


# Opens FOLDER/FILE of a version at a byte, and tells its size; blocks.
# `FileNotFoundError` and `WeightsError` are final; after any other OSError another try may succeed.
OpenFile: TypeAlias = Callable[[Manifest, str, int], AbstractContextManager[tuple[ReadableFile, int]]]


def from_learner(token: str) -> OpenFile:
    """Files come from the server of the learner's host, which the manifest names."""

    @contextlib.contextmanager
    def open_file(manifest: Manifest, path: str, at: int) -> Iterator[tuple[ReadableFile, int]]:
        if not manifest.sources:
            raise WeightsError(f"version {manifest.version} names no server")
        url = manifest.sources[0]
        address = urlsplit(url)
        kind = http.client.HTTPSConnection if address.scheme == "https" else http.client.HTTPConnection
        connection = kind(address.hostname or "", address.port, timeout=_SILENCE)
        wanted = {"Authorization": f"Bearer {token}", "Range": f"bytes={at}-", "Accept-Encoding": "identity"}
        try:
            connection.request("GET", f"{address.path}/{path}", headers=wanted)
            answer = connection.getresponse()
            yield answer, _size(answer, url, path, at)
        except http.client.HTTPException as error:
            raise OSError(f"{url}: {str(error) or type(error).__name__}") from error
        finally:
            connection.close()

    return open_file


def from_store(store: ObjectStore) -> OpenFile:
    """Files come from the store at `weights.url`, where the learner copies each version."""
    return lambda _, path, at: store.open(path, at)


def _size(answer: http.client.HTTPResponse, url: str, path: str, at: int) -> int:
    """The size of the whole file; refuses any answer but its bytes from `at` on."""
    found = answer.headers.get("Content-Range", "")
    if answer.status in {404, 410}:
        raise FileNotFoundError(f"{url} has no {path} any more")
    if answer.status in {401, 403}:
        raise WeightsError(
            f"{url} refuses the token of this host",
            "the learner's host has another RUN_DIR/weights.token: copy it here ($STREAMRL_WEIGHTS_TOKEN_FILE)",
        )
    if answer.status == 416 and (size := re.fullmatch(r"bytes \*/(\d+)", found)):
        return int(size[1])
    span = re.fullmatch(rf"bytes {at}-(\d+)/(\d+)", found)
    if answer.status != 206 or span is None or int(span[1]) + 1 != int(span[2]):
        raise OSError(f"{url} answered {answer.status} {found} for {path} from byte {at} on")
    return int(span[2])


@dataclass
class PartialFile:
    """A file of a version on its way: `at` bytes are here, and `state` is their checksum."""

    shard: Shard
    path: Path
    at: int = 0
    state: xxhash.xxh3_128 = field(default_factory=xxhash.xxh3_128)

    @property
    def proven(self) -> bool:
        return self.at == self.shard.bytes and self.state.hexdigest() == self.shard.checksum

    def reset(self) -> None:
        self.at, self.state = 0, xxhash.xxh3_128()

    def read(self, stream: ReadableFile, size: int, given_up: threading.Event) -> None:
        """Take what is missing, a piece at a time; what came before an error is kept."""
        if size != self.shard.bytes:
            raise WeightsError(f"{self.shard.file} does not have the {self.shard.bytes} bytes of its manifest: {size}")
        buffer = memoryview(bytearray(min(_BUFFER_BYTES, self.shard.bytes)))
        with self.path.open("r+b", buffering=0) as file:
            while self.at < self.shard.bytes:
                count = stream.readinto(buffer[: self.shard.bytes - self.at])
                if given_up.is_set():
                    return
                if not count:
                    raise OSError(f"the transfer of {self.shard.file} ended after {self.at} bytes")
                self._write(file.fileno(), buffer[:count])

    def _write(self, descriptor: int, data: memoryview) -> None:
        while data.nbytes:
            try:
                written = os.pwrite(descriptor, data, self.at)
            except OSError as error:
                hint = "give this host a larger /dev/shm (container: --shm-size)"
                raise CannotCreate(f"cannot write {self.path}: {error}", hint) from error
            self.state.update(data[:written])  # while it is in the processor's cache
            self.at += written
            data = data[written:]


@dataclass
class _Draft:
    manifest: Manifest
    folder: Path
    parts: list[PartialFile]


class PullSource(WeightSource):
    """Pulls versions into the staging folder; used as a context manager. `deadline` is for one version.

    The copying runs in threads, because the event loop of a replica has tokens to receive.
    """

    def __init__(self, staging: StagingFolder, open_file: OpenFile, deadline: float) -> None:
        self.proves = True
        self.traffic = Traffic()
        self._staging, self._open, self._deadline = staging, open_file, deadline
        self._draft: _Draft | None = None
        self._one_at_a_time = asyncio.Lock()  # there is one draft
        self._threads = ThreadPoolExecutor(_SIDE_BY_SIDE, thread_name_prefix="pull")

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        self._forget()
        self._threads.shutdown()

    @override
    async def fetch(self, manifest: Manifest) -> Path:
        began = time.monotonic()
        try:
            async with self._in_time(manifest.folder, manifest), self._one_at_a_time:
                return self._staging.holds(manifest) or await self._pull(manifest)
        finally:
            self.traffic.seconds += time.monotonic() - began

    async def _pull(self, manifest: Manifest) -> Path:
        draft = self._begin(manifest)
        try:
            with unwrapped():
                async with asyncio.TaskGroup() as group:
                    for part in draft.parts:
                        group.create_task(self._get(draft, part))
        except CannotCreate:
            self._forget()  # others may need the room
            raise
        self._draft = None
        return self._staging.finish(manifest, draft.folder)

    @override
    async def base_of(self, manifest: Manifest) -> Manifest:
        folder = base_folder(manifest)

        def read(_: threading.Event) -> bytes:
            with self._open(manifest, f"{folder}/{MANIFEST_FILE}", 0) as (stream, size):
                data = stream.read(min(size, MAX_MANIFEST_BYTES + 1))
            if len(data) < size:
                raise OSError(f"{folder}/{MANIFEST_FILE} ended after {len(data)} bytes")
            return data

        async with self._in_time(folder, manifest):
            return checked_base(await self._persist(read), manifest)

    def _begin(self, manifest: Manifest) -> _Draft:
        """Go on with the draft of this version, or begin one in the place of any other."""
        if self._draft is None or self._draft.manifest != manifest or not self._draft.folder.is_dir():
            self._forget()
            folder = self._staging.draft(manifest)
            parts = [PartialFile(shard, folder / shard.file) for shard in manifest.shards]
            for part in parts:
                part.path.touch(mode=0o600)
            self._draft = _Draft(manifest, folder, parts)
        return self._draft

    def _forget(self) -> None:
        if self._draft is not None:
            shutil.rmtree(self._draft.folder, ignore_errors=True)
            self._draft = None

    async def _get(self, draft: _Draft, part: PartialFile) -> None:
        path = f"{draft.manifest.folder}/{part.shard.file}"

        def read(given_up: threading.Event) -> None:
            if part.at < part.shard.bytes:
                with self._open(draft.manifest, path, part.at) as (stream, size):
                    part.read(stream, size, given_up)

        for _ in range(_PROOFS):
            began = part.at
            try:
                await self._persist(read)
            finally:
                self.traffic.bytes += part.at - began
            if part.proven:
                return
            logger.warning("weights corrupt on their way", extra={"file": path})
            part.reset()
        raise WeightsError(f"{path} does not have the checksum of its manifest, however often it is pulled")

    async def _persist(self, call: Callable[[threading.Event], _T]) -> _T:
        """Call in a thread until it succeeds or its error is final; after a cancellation it writes nothing more."""
        pause = _FIRST_PAUSE
        while True:
            given_up = threading.Event()
            running = asyncio.get_running_loop().run_in_executor(self._threads, call, given_up)
            try:
                return await asyncio.shield(running)
            except asyncio.CancelledError:
                given_up.set()
                await asyncio.gather(running, return_exceptions=True)
                raise
            except (StreamrlError, FileNotFoundError):
                raise
            except OSError as error:
                self._failure = f", at last: {str(error) or type(error).__name__}"
            await asyncio.sleep(random.uniform(pause / 2, pause))  # noqa: S311
            pause = min(2 * pause, _LONGEST_PAUSE)

    @contextlib.asynccontextmanager
    async def _in_time(self, folder: str, manifest: Manifest) -> AsyncIterator[None]:
        self._failure = ""
        try:
            async with asyncio.timeout(self._deadline):
                yield
        except TimeoutError as error:
            place = ", ".join(manifest.sources) or "weights.url"
            raise Unreachable(
                f"{folder} was not fetched within {self._deadline:g} s from {place}{self._failure}",
                _HINT if manifest.sources else _STORE_HINT,
            ) from error
