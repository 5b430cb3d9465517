"""The http transport's client: pulls the shards of a version, some side by side, and proves them.

Bytes of a broken transfer are kept, and a range request asks for the rest from the server that is best by then:
the least busy neighbour that has the version, else the learner's host. A file whose checksum is wrong is pulled again,
but not from the same neighbours.
"""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import logging
import os
import random
import socket
import threading
import time
from collections import deque
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, Self
from urllib.parse import urlsplit

import aiohttp
import xxhash
from typing_extensions import override

from streamrl.errors import CannotCreate, Unreachable, WeightsError, unwrap
from streamrl.queues.registry import RoleRegistry
from streamrl.weight_sync.files import StagingFolder, read_token
from streamrl.weight_sync.manifest import MANIFEST_FILE, MAX_MANIFEST_BYTES, Manifest, Shard, decode, folder_name
from streamrl.weight_sync.serve import BUSY_HEADER
from streamrl.weight_sync.source import Traffic, WeightSource, base_pair, checked_base

logger = logging.getLogger(__name__)
RELAY_FIELD: Final = "weights_relay"
"""Field of a role on the board of roles: URL under which it serves what it has fetched."""
_OPEN_PORT: Final = (
    "weights.host must be an address of the learner's host that this host reaches, and weights.port open to it"
    " (0 is another port at each start); or raise weights.deadline"
)
_FIRST_PAUSE: Final = 0.05
_LONGEST_PAUSE: Final = 5.0
_CONNECT_SECONDS: Final = 5.0
_BUFFER_BYTES: Final = 1 << 20
_NO_LONGER_THERE: Final = (404, 410)
_REFUSED: Final = (401, 403)
_SIDE_BY_SIDE: Final = 4
_SILENCE_SHARE: Final = 0.25
"""Part of the deadline for which a server may be silent before another one is asked."""
_ASKED_AT_ONCE: Final = 4
_PROBE_SECONDS: Final = 1.0
_PROOFS: Final = 3
_BUSY_PAUSE: Final = 0.5
_LOOK_SECONDS: Final = 0.5
"""Time between two looks for neighbours that have the version by now."""


# ---- which server is asked


@dataclass
class PeerHost:
    """One server that may have the version; a neighbour (`relay`) is asked before the learner's host."""

    url: str
    relay: bool
    busy: int = 0  # transfers that run there, as it said last
    failures: int = 0  # in a row
    rests_until: float = 0.0  # monotonic time before which it is not asked
    banned: bool = False


class PeerHosts:
    """The servers of one fetch: URLs of the learner's host, and neighbours with the transfers that run there.

    Pure but for the jitter: the clock is an argument.
    """

    def __init__(self, sources: list[str], relays: Mapping[str, int]) -> None:
        self._all = {url: PeerHost(url, relay=False) for url in sources}
        self.add(relays)

    def add(self, relays: Mapping[str, int]) -> None:
        """A ban stays."""
        for url, busy in relays.items():
            self._all.setdefault(url, PeerHost(url, relay=True)).busy = busy

    def pick(self, now: float) -> PeerHost | None:
        ready = [host for host in self._all.values() if not host.banned and host.rests_until <= now]
        return min(ready, key=lambda host: (not host.relay, host.busy), default=None)

    def pause(self, now: float) -> float:
        """Seconds until a server may be asked again."""
        rests = (host.rests_until - now for host in self._all.values() if not host.banned)
        return max(0.001, min(rests, default=0.001))

    @property
    def exhausted(self) -> bool:
        return all(host.banned for host in self._all.values())

    def failed(self, host: PeerHost, now: float, *, longest: float = _LONGEST_PAUSE) -> None:
        """Leave a server alone for a while, twice as long after each failure, with jitter."""
        host.failures += 1
        pause = min(longest, _FIRST_PAUSE * 2 ** min(host.failures, 10))
        host.rests_until = now + random.uniform(pause / 2, pause)  # noqa: S311

    def ban_relays(self, urls: list[str]) -> None:
        """Do not ask these neighbours again; the learner's host stays: it may be the only one with the version."""
        for url in urls:
            host = self._all.get(url)
            if host is not None and host.relay:
                host.banned = True

    def worked(self, host: PeerHost) -> None:
        """Forget the failures of a server that sent something, however the transfer ended; a rest stays."""
        host.failures = 0


# ---- one file on its way


class _Gone(Exception):
    pass


class _Busy(Exception):
    """This server runs enough transfers already."""


class _Broken(Exception):
    """The transfer ended early, or the answer is not what was asked for; another try may succeed."""


class _Denied(Exception):
    """This server does not accept the token."""


@dataclass
class PartialFile:
    """A file of a version on its way: `at` bytes are here, from `origins`, and `state` is their checksum."""

    shard: Shard
    at: int = 0
    state: xxhash.xxh3_128 = field(default_factory=xxhash.xxh3_128)
    origins: set[str] = field(default_factory=set)

    @property
    def whole(self) -> bool:
        return self.at >= self.shard.bytes

    @property
    def proven(self) -> bool:
        return self.whole and self.state.hexdigest() == self.shard.checksum

    def reset(self) -> None:
        self.at, self.state, self.origins = 0, xxhash.xxh3_128(), set()


class Transfer:
    """One request for the rest of a file. It runs in a thread: the event loop of a replica has tokens to receive.

    `part` moves on with every byte that was written to `path`. The server may be silent for `silence` seconds.
    """

    def __init__(self, url: str, headers: Mapping[str, str], part: PartialFile, path: Path, silence: float) -> None:
        self._url, self._headers, self._part, self._path, self._silence = url, headers, part, path, silence
        self._given_up = threading.Event()
        self._socket: socket.socket | None = None

    def give_up(self) -> None:
        """End `run` soon; may be called from any thread, and before `run`."""
        self._given_up.set()
        if self._socket is not None:
            with contextlib.suppress(OSError):
                self._socket.shutdown(socket.SHUT_RDWR)

    def run(self) -> None:
        """Fetch; returns when the file is whole, or when it was given up. Bytes before an error are in the file."""
        address = urlsplit(self._url)
        kind = http.client.HTTPSConnection if address.scheme == "https" else http.client.HTTPConnection
        connection = kind(address.hostname or "", address.port, timeout=_CONNECT_SECONDS)
        try:
            connection.connect()
            self._socket = connection.sock
            if self._given_up.is_set():
                return
            connection.sock.settimeout(self._silence)
            span = f"bytes={self._part.at}-{self._part.shard.bytes - 1}"
            wanted = {**self._headers, "Range": span, "Accept-Encoding": "identity", "Connection": "close"}
            connection.request("GET", address.path, headers=wanted)
            answer = connection.getresponse()
            self._check(answer)
            self._copy(answer)
        except (http.client.HTTPException, OSError) as error:
            if isinstance(error, CannotCreate):
                raise
            raise _Broken(str(error) or type(error).__name__) from error
        finally:
            connection.close()

    def _check(self, answer: http.client.HTTPResponse) -> None:
        """Refuse any answer but the bytes that were asked for."""
        part, status = self._part, answer.status
        found = answer.headers.get("Content-Range", "")
        if status in _NO_LONGER_THERE:
            raise _Gone
        if status in _REFUSED:
            raise _Denied
        if status == 503:
            raise _Busy
        if status == 416 or (status == 206 and not found.endswith(f"/{part.shard.bytes}")):
            raise WeightsError(f"{self._url} does not have the {part.shard.bytes} bytes of its manifest ({found})")
        whole = status == 200 and part.at == 0
        rest = status == 206 and found.startswith(f"bytes {part.at}-{part.shard.bytes - 1}/")
        if not (whole or rest) or answer.length != part.shard.bytes - part.at:
            raise _Broken(f"answered {status} {found}, {answer.length} bytes")

    def _copy(self, answer: http.client.HTTPResponse) -> None:
        part = self._part
        buffer = memoryview(bytearray(min(_BUFFER_BYTES, part.shard.bytes - part.at)))
        with self._path.open("r+b", buffering=0) as file:
            while part.at < part.shard.bytes:
                # One read of the socket at a time: what came before the connection broke is kept.
                count = answer.fp.readinto1(buffer[: part.shard.bytes - part.at])
                if self._given_up.is_set():
                    return
                if not count:
                    raise _Broken("the answer ended early")
                self._write(file.fileno(), buffer[:count])

    def _write(self, descriptor: int, data: memoryview) -> None:
        while data.nbytes:
            try:
                written = os.pwrite(descriptor, data, self._part.at)
            except OSError as error:
                hint = "give this host a larger /dev/shm (container: --shm-size)"
                raise CannotCreate(f"cannot write {self._path}: {error}", hint) from error
            self._part.state.update(data[:written])  # while it is in the processor's cache
            self._part.at += written
            data = data[written:]


# ---- a version


@dataclass
class _Draft:
    manifest: Manifest
    folder: Path
    parts: list[PartialFile]


class HttpSource(WeightSource):
    """Pulls versions from the learner's host and from neighbours that relay; used as a context manager.

    `deadline` is for one version, `name` the own role, which is no neighbour; `session` bears the token of the run.
    """

    session: aiohttp.ClientSession

    def __init__(
        self, staging: StagingFolder, run_dir: Path, deadline: float, *, name: str, board: RoleRegistry | None
    ) -> None:
        self.proves = True
        self.traffic = Traffic()
        self._bearer = {"Authorization": f"Bearer {read_token(run_dir)}"}
        self._staging, self._name, self._board = staging, name, board
        self._deadline, self._silence = deadline, max(1.0, _SILENCE_SHARE * deadline)
        self._draft: _Draft | None = None
        self._looked = 0.0
        self._failure = ""  # of the last transfer that broke, in words
        self._one_at_a_time = asyncio.Lock()  # there is one draft
        self._threads = ThreadPoolExecutor(_SIDE_BY_SIDE, thread_name_prefix="pull")

    async def __aenter__(self) -> Self:
        limits = aiohttp.ClientTimeout(total=None, sock_connect=_CONNECT_SECONDS, sock_read=self._silence)
        self.session = aiohttp.ClientSession(timeout=limits, headers=self._bearer)
        return self

    async def __aexit__(self, *_: object) -> None:
        try:
            self._forget()
            self._threads.shutdown()
        finally:
            await self.session.close()

    @override
    async def fetch(self, manifest: Manifest) -> Path:
        with self.traffic.timed():
            try:
                async with asyncio.timeout(self._deadline), self._one_at_a_time:
                    here = self._staging.holds(manifest)
                    if here is not None:
                        return here
                    draft = self._begin(manifest)
                    await self._pull(draft)
                    self._draft = None
                    return self._staging.finish(manifest, draft.folder)
            except BaseExceptionGroup as error:
                cause = unwrap(error)
                if isinstance(cause, CannotCreate):
                    self._forget()  # others may need the room
                raise cause from error
            except TimeoutError as error:
                raise Unreachable(
                    f"version {manifest.version} was not fetched within {self._deadline:g} s from {manifest.sources}"
                    f"{self._failure}",
                    _OPEN_PORT,
                ) from error

    @override
    async def base_of(self, manifest: Manifest) -> Manifest:
        folder = folder_name(*base_pair(manifest))
        hosts = PeerHosts(manifest.sources, {})
        try:
            async with asyncio.timeout(self._deadline):
                while True:
                    host = await self._next(hosts, folder)
                    try:
                        return checked_base(decode(await self._manifest(host, folder)), manifest)
                    except _Gone:
                        host.banned = True
                    except (aiohttp.ClientError, OSError, TimeoutError) as error:
                        self._note(hosts, host, error)
        except TimeoutError as error:
            raise Unreachable(
                f"no manifest of {folder} within {self._deadline:g} s from {manifest.sources}{self._failure}",
                _OPEN_PORT,
            ) from error

    def _begin(self, manifest: Manifest) -> _Draft:
        """Go on with the draft of this version, or begin one in the place of any other."""
        draft = self._draft
        if draft is not None and draft.manifest.pair == manifest.pair and draft.folder.is_dir():
            draft.manifest = manifest
            return draft
        self._forget()
        folder = self._staging.draft(manifest)
        for shard in manifest.shards:
            (folder / shard.file).touch(mode=0o600)
        self._draft = draft = _Draft(manifest, folder, [PartialFile(shard) for shard in manifest.shards])
        return draft

    def _forget(self) -> None:
        if self._draft is not None:
            self._staging.drop(self._draft.folder)
            self._draft = None

    async def _pull(self, draft: _Draft) -> None:
        folder = draft.manifest.folder
        hosts = PeerHosts(draft.manifest.sources, await self._relays(folder))
        for _ in range(_PROOFS):
            missing = deque(part for part in draft.parts if not part.proven)
            async with asyncio.TaskGroup() as group:
                for _ in range(min(_SIDE_BY_SIDE, len(missing))):
                    group.create_task(self._work(draft, missing, hosts))
            wrong = [part for part in draft.parts if not part.proven]
            if not wrong:
                return
            for part in wrong:
                origins = sorted(part.origins)
                logger.warning("weights corrupt on their way", extra={"file": part.shard.file, "sources": origins})
                hosts.ban_relays(origins)
                part.reset()
        raise WeightsError(
            f"version {draft.manifest.version} does not have the checksums of its manifest, however often it is pulled"
        )

    async def _work(self, draft: _Draft, missing: deque[PartialFile], hosts: PeerHosts) -> None:
        while missing:
            part = missing.popleft()
            while not part.whole:
                await self._get(draft, part, hosts)

    async def _get(self, draft: _Draft, part: PartialFile, hosts: PeerHosts) -> None:
        """Ask the best server for the rest of a file and keep what comes."""
        host = await self._next(hosts, draft.manifest.folder)
        part.origins.add(host.url)
        url = f"{host.url}/{draft.manifest.folder}/{part.shard.file}"
        path = draft.folder / part.shard.file
        began = part.at
        host.busy += 1
        try:
            await self._run(Transfer(url, self._bearer, part, path, self._silence))
        except _Gone:
            host.banned = True
        except _Denied:
            self._denied(host)
        except _Busy:
            hosts.failed(host, time.monotonic(), longest=_BUSY_PAUSE)
        except _Broken as error:
            self._note(hosts, host, error)
        except WeightsError:
            if not host.relay:
                raise
            host.banned = True
        finally:
            host.busy -= 1
            self.traffic.bytes += part.at - began
            if part.at > began:
                hosts.worked(host)

    async def _run(self, transfer: Transfer) -> None:
        """Run a transfer in a thread. After a cancellation nothing is written any more."""
        running = asyncio.get_running_loop().run_in_executor(self._threads, transfer.run)
        try:
            await asyncio.shield(running)
        except asyncio.CancelledError:
            transfer.give_up()
            await asyncio.wait([running])
            if not running.cancelled():
                running.exception()  # marks it as read
            raise

    def _denied(self, host: PeerHost) -> None:
        if not host.relay:
            raise WeightsError(
                f"{host.url} refuses the token of this host",
                "the learner's host has another RUN_DIR/weights.token: copy it here ($STREAMRL_WEIGHTS_TOKEN_FILE)",
            )
        host.banned = True

    async def _next(self, hosts: PeerHosts, folder: str) -> PeerHost:
        """Return a server to ask; while all of them rest, look for neighbours."""
        while True:
            if hosts.exhausted:
                raise FileNotFoundError(f"no server has {folder} any more")
            host = hosts.pick(time.monotonic())
            if host is not None:
                return host
            await asyncio.sleep(hosts.pause(time.monotonic()))
            if time.monotonic() - self._looked > _LOOK_SECONDS:
                self._looked = time.monotonic()
                hosts.add(await self._relays(folder))

    def _note(self, hosts: PeerHosts, host: PeerHost, error: BaseException) -> None:
        hosts.failed(host, time.monotonic())
        said = str(error) or type(error).__name__
        self._failure = f", at last {host.url}: {said}"
        extra = {"url": host.url, "failures": host.failures, "error": said, "hint": _OPEN_PORT}
        logger.log(logging.WARNING if host.failures == 3 else logging.DEBUG, "weights transfer broken", extra=extra)

    async def _relays(self, folder: str) -> dict[str, int]:
        """Neighbours that have the version, and how many transfers run there."""
        if self._board is None:
            return {}
        roles = await self._board.read()
        urls = sorted(url for name, fields in roles.items() if name != self._name and (url := fields.get(RELAY_FIELD)))
        urls = random.sample(urls, min(len(urls), _ASKED_AT_ONCE))
        async with asyncio.TaskGroup() as group:
            asked = [group.create_task(self._has(url, folder)) for url in urls]
        return {url: busy for url, task in zip(urls, asked, strict=True) if (busy := task.result()) is not None}

    async def _has(self, url: str, folder: str) -> int | None:
        try:
            async with (
                asyncio.timeout(_PROBE_SECONDS),
                self.session.head(f"{url}/{folder}/{MANIFEST_FILE}", allow_redirects=False) as response,
            ):
                return int(response.headers.get(BUSY_HEADER, "0")) if response.status == 200 else None
        except (aiohttp.ClientError, OSError, TimeoutError, ValueError):
            return None

    async def _manifest(self, host: PeerHost, folder: str) -> bytes:
        async with self.session.get(f"{host.url}/{folder}/{MANIFEST_FILE}", allow_redirects=False) as response:
            if response.status in _NO_LONGER_THERE:
                raise _Gone
            if response.status in _REFUSED:
                self._denied(host)
                raise _Gone
            response.raise_for_status()
            data = await response.content.read(MAX_MANIFEST_BYTES + 1)
            while chunk := await response.content.read(MAX_MANIFEST_BYTES + 1 - len(data)):
                data += chunk
            return data
