"""The http transport's client: pulls the shards of a version in pieces, side by side, and proves them.

Each piece is one range request. What a broken transfer brought is kept, and the next request asks for the rest, of
whichever server is the best by then. A file whose checksum is wrong is pulled anew, but not from the same neighbours.
"""

from __future__ import annotations

import asyncio
import logging
import os
import random
import time
from collections import deque
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Final, Self

import aiohttp

from streamrl.errors import Unreachable, WeightsError, unwrap
from streamrl.weight_sync.bearer import read_token
from streamrl.weight_sync.checksums import file_checksum
from streamrl.weight_sync.hosts import Board, Host, Hosts, neighbours
from streamrl.weight_sync.manifest import MAX_MANIFEST_BYTES, Manifest, Shard, decode, folder_name
from streamrl.weight_sync.shard_server import BUSY_HEADER
from streamrl.weight_sync.sources import Traffic, base_pair, checked_base
from streamrl.weight_sync.spool import MANIFEST_FILE, Spool

logger = logging.getLogger(__name__)
PIECE_BYTES: Final = 16 << 20
_SIDE_BY_SIDE: Final = 4
_BUFFER_BYTES: Final = 4 << 20
_CONNECT_SECONDS: Final = 5.0
_SILENCE_SHARE: Final = 0.25
"""Part of the deadline for which a server may be silent before another one is asked."""
_ASKED_AT_ONCE: Final = 4
_PROBE_SECONDS: Final = 1.0
_PROOFS: Final = 3
_BUSY_PAUSE: Final = 0.5
_LOOK_SECONDS: Final = 0.5
"""Time between two looks for neighbours that have the version by now."""


class _Gone(Exception):
    """This server does not have the version."""


class _Busy(Exception):
    """This server has enough to do."""


@dataclass
class _Piece:
    shard: Shard
    at: int
    end: int


@dataclass
class _Draft:
    """A version on its way: what is missing, and which servers each file came from."""

    manifest: Manifest
    folder: Path
    files: dict[str, int] = field(default_factory=dict)
    missing: deque[_Piece] = field(default_factory=deque)
    origins: dict[str, set[str]] = field(default_factory=dict)
    proven: set[str] = field(default_factory=set)

    def want(self, shard: Shard) -> None:
        """Note that all of a file is missing."""
        self.origins[shard.file] = set()
        for start in range(0, shard.bytes, PIECE_BYTES):
            self.missing.append(_Piece(shard, start, min(start + PIECE_BYTES, shard.bytes)))

    def close(self) -> None:
        """Close the files."""
        for descriptor in self.files.values():
            os.close(descriptor)
        self.files.clear()


class HttpSource:
    """Pulls versions from the learner's host and from neighbours that relay (see `Source`).

    Args:
        spool: where the files go; open.
        run_dir: the token lies there.
        deadline: seconds for one version.
        name: of the own role, which is no neighbour.
        board: where neighbours announce themselves; None: no neighbours.

    Raises:
        ConfigError: there is no token.
    """

    proves = True

    def __init__(self, spool: Spool, run_dir: Path, deadline: float, *, name: str, board: Board | None = None) -> None:
        self.traffic = Traffic()
        self._spool, self._run_dir, self._deadline, self._name, self._board = spool, run_dir, deadline, name, board
        self._draft: _Draft | None = None
        self._looked = 0.0
        self._session: aiohttp.ClientSession | None = None

    async def __aenter__(self) -> Self:
        silence = max(1.0, _SILENCE_SHARE * self._deadline)
        self._session = aiohttp.ClientSession(
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=_CONNECT_SECONDS, sock_read=silence),
            connector=aiohttp.TCPConnector(limit=0, limit_per_host=2 * _SIDE_BY_SIDE),
            headers={"Accept-Encoding": "identity", **self._bearer()},
            read_bufsize=_BUFFER_BYTES,
            auto_decompress=False,
        )
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        del kind, error, trace
        self._forget()
        if self._session is not None:
            await self._session.close()

    @property
    def session(self) -> aiohttp.ClientSession:
        """The open session, whose requests bear the token."""
        if self._session is None:
            raise Unreachable("the http source is not open")
        return self._session

    async def fetch(self, manifest: Manifest) -> Path:
        """See `Source`."""
        here = self._spool.holds(manifest)
        if here is not None:
            return here
        with self.traffic.timed():
            try:
                async with asyncio.timeout(self._deadline):
                    draft = self._begin(manifest)
                    await self._pull(draft)
            except BaseExceptionGroup as error:
                raise unwrap(error) from error
            except TimeoutError as error:
                raise Unreachable(
                    f"version {manifest.version} was not fetched within {self._deadline:g} s from {manifest.sources}",
                    "look whether the learner's host can be reached from here, or raise weights.deadline",
                ) from error
            draft.close()
            self._draft = None
            return self._spool.finish(manifest, draft.folder)

    async def base_of(self, manifest: Manifest) -> Manifest:
        """See `Source`."""
        folder = folder_name(*base_pair(manifest))
        hosts = Hosts(manifest.sources, {})
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
            raise Unreachable(f"no manifest of {folder} within {self._deadline:g} s from {manifest.sources}") from error

    def _bearer(self) -> dict[str, str]:
        return {"Authorization": f"Bearer {read_token(self._run_dir)}"}

    def _begin(self, manifest: Manifest) -> _Draft:
        """Go on with the draft of this version, or begin one in the place of any other."""
        draft = self._draft
        if draft is not None and draft.manifest.pair == manifest.pair and draft.manifest.shards == manifest.shards:
            draft.manifest = manifest
            return draft
        self._forget()
        self._draft = draft = _Draft(manifest, self._spool.draft(manifest))
        try:
            for shard in manifest.shards:
                self._spool.create(draft.folder / shard.file, shard.bytes)
                draft.files[shard.file] = os.open(draft.folder / shard.file, os.O_WRONLY | os.O_CLOEXEC)
                draft.want(shard)
        except OSError:
            self._forget()
            raise
        return draft

    def _forget(self) -> None:
        if self._draft is not None:
            self._draft.close()
            self._spool.drop(self._draft.folder)
            self._draft = None

    async def _pull(self, draft: _Draft) -> None:
        folder = draft.manifest.folder
        hosts = Hosts(draft.manifest.sources, await self._relays(folder))
        for _ in range(_PROOFS):
            async with asyncio.TaskGroup() as group:
                for _ in range(min(_SIDE_BY_SIDE, len(draft.missing))):
                    group.create_task(self._work(draft, hosts))
            if await self._prove(draft, hosts):
                return
        raise WeightsError(
            f"version {draft.manifest.version} does not have the checksums of its manifest, however often it is pulled"
        )

    async def _work(self, draft: _Draft, hosts: Hosts) -> None:
        while draft.missing:
            piece = draft.missing.popleft()
            try:
                while piece.at < piece.end:
                    await self._get(draft, piece, hosts)
            finally:
                if piece.at < piece.end:
                    draft.missing.appendleft(piece)

    async def _get(self, draft: _Draft, piece: _Piece, hosts: Hosts) -> None:
        """Ask the best server for the rest of a piece and keep what comes."""
        host = await self._next(hosts, draft.manifest.folder)
        draft.origins[piece.shard.file].add(host.url)
        url = f"{host.url}/{draft.manifest.folder}/{piece.shard.file}"
        wanted = {"Range": f"bytes={piece.at}-{piece.end - 1}"}
        host.busy += 1
        began = piece.at
        try:
            async with self.session.get(url, headers=wanted, allow_redirects=False) as response:
                self._check(response, piece, host)
                async for data in response.content.iter_any():
                    if len(data) > piece.end - piece.at:
                        raise aiohttp.ClientPayloadError("more bytes than asked for")
                    _write(draft.files[piece.shard.file], data, piece.at)
                    piece.at += len(data)
                    self.traffic.bytes += len(data)
        except _Gone:
            host.banned = True
        except _Busy:
            hosts.failed(host, time.monotonic(), longest=_BUSY_PAUSE)
        except (aiohttp.ClientError, ConnectionError, TimeoutError) as error:
            self._note(hosts, host, error)
        finally:
            host.busy -= 1
            if piece.at > began:
                hosts.worked(host)

    def _check(self, response: aiohttp.ClientResponse, piece: _Piece, host: Host) -> None:
        """Refuse any answer but the bytes that were asked for."""
        status = response.status
        if status in (404, 410):
            raise _Gone
        if status in (401, 403):
            self._refused(host)
        found = response.headers.get("Content-Range", "")
        if status == 416 or (status == 206 and not found.endswith(f"/{piece.shard.bytes}")):
            if host.relay:
                raise _Gone
            raise WeightsError(f"{response.url} does not have the {piece.shard.bytes} bytes of its manifest ({found})")
        whole = status == 200 and piece.at == 0 and piece.end == piece.shard.bytes
        if not whole and (status != 206 or not found.startswith(f"bytes {piece.at}-{piece.end - 1}/")):
            if status == 503:
                raise _Busy
            raise aiohttp.ClientPayloadError(f"answered {status} {found}")

    def _refused(self, host: Host) -> None:
        if host.relay:
            raise _Gone
        raise WeightsError(
            f"{host.url} refuses the token of this host",
            "the learner's host has another RUN_DIR/weights.token: copy it here ($STREAMRL_WEIGHTS_TOKEN_FILE)",
        )

    async def _next(self, hosts: Hosts, folder: str) -> Host:
        """Return a server to ask; while all of them rest, neighbours are looked for."""
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

    def _note(self, hosts: Hosts, host: Host, error: BaseException) -> None:
        hosts.failed(host, time.monotonic())
        extra = {"url": host.url, "failures": host.failures, "error": str(error) or type(error).__name__}
        logger.log(logging.WARNING if host.failures == 3 else logging.DEBUG, "weights transfer broken", extra=extra)

    async def _relays(self, folder: str) -> dict[str, int]:
        """Neighbours that have the version, and how many transfers run there."""
        if self._board is None:
            return {}
        urls = await neighbours(self._board, self._name)
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

    async def _manifest(self, host: Host, folder: str) -> bytes:
        async with self.session.get(f"{host.url}/{folder}/{MANIFEST_FILE}", allow_redirects=False) as response:
            if response.status in (404, 410):
                raise _Gone
            if response.status in (401, 403):
                self._refused(host)
            response.raise_for_status()
            data = await response.content.read(MAX_MANIFEST_BYTES + 1)
            while chunk := await response.content.read(MAX_MANIFEST_BYTES + 1 - len(data)):
                data += chunk
            return data

    async def _prove(self, draft: _Draft, hosts: Hosts) -> bool:
        """Prove all files; those that are wrong are wanted again, of others than they came from."""
        wrong = []
        for shard in draft.manifest.shards:
            if shard.file not in draft.proven:
                found = await asyncio.to_thread(file_checksum, draft.folder / shard.file)
                if found == shard.checksum:
                    draft.proven.add(shard.file)
                else:
                    wrong.append(shard)
        for shard in wrong:
            origins = sorted(draft.origins[shard.file])
            logger.warning("weights corrupt on their way", extra={"file": shard.file, "sources": origins})
            hosts.ban_relays(origins)
            draft.want(shard)
        return not wrong


def _write(descriptor: int, data: bytes, at: int) -> None:
    view = memoryview(data)
    while view.nbytes:
        written = os.pwrite(descriptor, view, at)
        view, at = view[written:], at + written
