"""The http transport's client: pulls the shards of a version, some side by side, and proves them.

What a broken transfer brought is kept, and a range request asks for the rest, of whichever server is the best by then.
A file whose checksum is wrong is pulled anew, but not from the same neighbours.
"""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections import deque
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Final, Self

import aiohttp

from streamrl.errors import CannotCreate, Unreachable, WeightsError, unwrap
from streamrl.weight_sync.bearer import read_token
from streamrl.weight_sync.hosts import Board, Host, Hosts, neighbours
from streamrl.weight_sync.manifest import MANIFEST_FILE, MAX_MANIFEST_BYTES, Manifest, decode, folder_name
from streamrl.weight_sync.shard_server import BUSY_HEADER
from streamrl.weight_sync.sources import Traffic, base_pair, checked_base
from streamrl.weight_sync.spool import Spool
from streamrl.weight_sync.transfer import Broken, Busy, Denied, Gone, Part, Transfer

logger = logging.getLogger(__name__)
_SIDE_BY_SIDE: Final = 4
_CONNECT_SECONDS: Final = 5.0
_SILENCE_SHARE: Final = 0.25
"""Part of the deadline for which a server may be silent before another one is asked."""
_ASKED_AT_ONCE: Final = 4
_PROBE_SECONDS: Final = 1.0
_PROOFS: Final = 3
_BUSY_PAUSE: Final = 0.5
_LOOK_SECONDS: Final = 0.5
"""Time between two looks for neighbours that have the version by now."""


@dataclass
class _Draft:
    """A version on its way."""

    manifest: Manifest
    folder: Path
    parts: list[Part]


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
        self._spool, self._deadline, self._name, self._board = spool, deadline, name, board
        self._draft: _Draft | None = None
        self._looked = 0.0
        self._one_at_a_time = asyncio.Lock()  # there is one draft
        self._silence = max(1.0, _SILENCE_SHARE * deadline)
        self._bearer = {"Authorization": f"Bearer {read_token(run_dir)}"}
        self._threads = ThreadPoolExecutor(_SIDE_BY_SIDE, thread_name_prefix="pull")
        self._session: aiohttp.ClientSession | None = None

    async def __aenter__(self) -> Self:
        self._session = aiohttp.ClientSession(
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=_CONNECT_SECONDS, sock_read=self._silence),
            headers=self._bearer,
        )
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        del kind, error, trace
        self._forget()
        self._threads.shutdown()
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
        with self.traffic.timed():
            try:
                async with asyncio.timeout(self._deadline), self._one_at_a_time:
                    here = self._spool.holds(manifest)
                    if here is not None:
                        return here
                    draft = self._begin(manifest)
                    await self._pull(draft)
                    self._draft = None
                    return self._spool.finish(manifest, draft.folder)
            except BaseExceptionGroup as error:
                cause = unwrap(error)
                if isinstance(cause, CannotCreate):
                    self._forget()  # others may need the room
                raise cause from error
            except TimeoutError as error:
                raise Unreachable(
                    f"version {manifest.version} was not fetched within {self._deadline:g} s from {manifest.sources}",
                    "look whether the learner's host can be reached from here, or raise weights.deadline",
                ) from error

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
                    except Gone:
                        host.banned = True
                    except (aiohttp.ClientError, OSError, TimeoutError) as error:
                        self._note(hosts, host, error)
        except TimeoutError as error:
            raise Unreachable(f"no manifest of {folder} within {self._deadline:g} s from {manifest.sources}") from error

    def _begin(self, manifest: Manifest) -> _Draft:
        """Go on with the draft of this version, or begin one in the place of any other."""
        draft = self._draft
        if draft is not None and draft.manifest.pair == manifest.pair and draft.folder.is_dir():
            draft.manifest = manifest
            return draft
        self._forget()
        folder = self._spool.draft(manifest)
        for shard in manifest.shards:
            (folder / shard.file).touch(mode=0o600)
        self._draft = draft = _Draft(manifest, folder, [Part(shard) for shard in manifest.shards])
        return draft

    def _forget(self) -> None:
        if self._draft is not None:
            self._spool.drop(self._draft.folder)
            self._draft = None

    async def _pull(self, draft: _Draft) -> None:
        folder = draft.manifest.folder
        hosts = Hosts(draft.manifest.sources, await self._relays(folder))
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

    async def _work(self, draft: _Draft, missing: deque[Part], hosts: Hosts) -> None:
        while missing:
            part = missing.popleft()
            while not part.whole:
                await self._get(draft, part, hosts)

    async def _get(self, draft: _Draft, part: Part, hosts: Hosts) -> None:
        """Ask the best server for the rest of a file and keep what comes."""
        host = await self._next(hosts, draft.manifest.folder)
        part.origins.add(host.url)
        url = f"{host.url}/{draft.manifest.folder}/{part.shard.file}"
        path = draft.folder / part.shard.file
        began = part.at
        host.busy += 1
        try:
            await self._run(Transfer(url, self._bearer, part, path, self._silence))
        except Gone:
            host.banned = True
        except Denied:
            self._denied(host)
        except Busy:
            hosts.failed(host, time.monotonic(), longest=_BUSY_PAUSE)
        except Broken as error:
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
        """Run a transfer in a thread. Whoever cancels it may rely on it that nothing is written afterwards."""
        running = asyncio.get_running_loop().run_in_executor(self._threads, transfer.run)
        try:
            await asyncio.shield(running)
        except asyncio.CancelledError:
            transfer.give_up()
            await asyncio.wait([running])
            if not running.cancelled():
                running.exception()  # whatever it was: nobody wants it any more
            raise

    def _denied(self, host: Host) -> None:
        if not host.relay:
            raise WeightsError(
                f"{host.url} refuses the token of this host",
                "the learner's host has another RUN_DIR/weights.token: copy it here ($STREAMRL_WEIGHTS_TOKEN_FILE)",
            )
        host.banned = True

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
                raise Gone
            if response.status in (401, 403):
                self._denied(host)
                raise Gone
            response.raise_for_status()
            data = await response.content.read(MAX_MANIFEST_BYTES + 1)
            while chunk := await response.content.read(MAX_MANIFEST_BYTES + 1 - len(data)):
                data += chunk
            return data
