"""A replica's side of the collective transport: takes part in broadcasts, and pulls over http what it missed."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Final, Self

import aiohttp

from streamrl.errors import CannotCreate, StreamrlError, WeightsError, unwrap
from streamrl.weight_sync.checksums import file_checksum
from streamrl.weight_sync.collective import Membership, Party, device_in_use
from streamrl.weight_sync.manifest import Manifest, Pair, decode
from streamrl.weight_sync.pull import HttpSource
from streamrl.weight_sync.rounds import (
    MAX_MESSAGE_BYTES,
    PATH,
    Abandon,
    Done,
    Go,
    Got,
    Hello,
    Offer,
    Ready,
    ToHost,
    pack,
)
from streamrl.weight_sync.rounds import unpack_from_host as unpack
from streamrl.weight_sync.sources import Traffic
from streamrl.weight_sync.spool import Spool

logger = logging.getLogger(__name__)
_BEAT_SECONDS: Final = 10.0
_FIRST_PAUSE: Final = 0.2
_LONGEST_PAUSE: Final = 10.0
_WAIT_SHARE: Final = 0.5
"""Part of the deadline for which a version is waited for before it is pulled."""
_MAX_FULL: Final = 3
_MAX_DELTAS: Final = 64


@dataclass
class _Round:
    """The round that this member takes part in."""

    number: int
    manifest: Manifest
    draft: Path
    receiving: asyncio.Task[None] | None = None
    party: Party | None = None


class CollectiveSource:
    """Takes versions from broadcasts of the learner's host (see `Source`).

    Attributes:
        broadcasts: versions that came whole by broadcast since the start.

    Args:
        pulled: fetches what was missed, and has the session.
        spool: where the files go; open.
        deadline: seconds for one version; half of it is waited for a broadcast.
        name: of the own role.
    """

    proves = True

    def __init__(self, pulled: HttpSource, spool: Spool, deadline: float, *, name: str) -> None:
        self._pulled, self._spool, self._deadline, self._name = pulled, spool, deadline, name
        self._url = ""
        self._following: asyncio.Task[None] | None = None
        self._connected = False
        self._done: Pair = (0, 0)
        self._changed = asyncio.Condition()
        self._round: _Round | None = None
        self._party: tuple[str, Party] | None = None
        self.broadcasts = 0

    @property
    def traffic(self) -> Traffic:
        """What was fetched, by either way."""
        return self._pulled.traffic

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        del kind, error, trace
        await self._unfollow()

    async def fetch(self, manifest: Manifest) -> Path:
        """See `Source`."""
        here = self._spool.holds(manifest)
        if here is not None:  # it may be older than the learner whose member we are
            return here
        await self._follow(manifest.sources[0] if manifest.sources else "")
        with self.traffic.timed(), contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_WAIT_SHARE * self._deadline), self._changed:
                await self._changed.wait_for(lambda: self._settled(manifest))
        return await self._pulled.fetch(manifest)

    async def base_of(self, manifest: Manifest) -> Manifest:
        """See `Source`."""
        return await self._pulled.base_of(manifest)

    def _settled(self, manifest: Manifest) -> bool:
        """Whether nothing is to be waited for: the version is here, or no broadcast will bring it."""
        over = not self._connected or self._done >= manifest.pair
        return over or self._spool.holds(manifest) is not None

    async def _follow(self, url: str) -> None:
        """Be a member at this host, and at no other."""
        if self._following is not None and self._following.done():
            await self._following  # raises what ended it
        if url == self._url and self._following is not None:
            return
        await self._unfollow()
        if not url:
            return
        self._url, self._connected = url, True  # the first connection decides
        self._done = (0, 0)
        self._following = asyncio.create_task(self._stay(url), name="member of the broadcast")

    async def _unfollow(self) -> None:
        if self._following is not None:
            self._following.cancel()
            await asyncio.wait([self._following])
            self._following = None

    async def _stay(self, url: str) -> None:
        """Connect to the host, again and again, until it is cancelled."""
        pause = _FIRST_PAUSE
        while True:
            try:
                async with self._pulled.session.ws_connect(
                    f"{url}{PATH}", heartbeat=_BEAT_SECONDS, max_msg_size=MAX_MESSAGE_BYTES
                ) as socket:
                    await socket.send_str(pack(Hello(self._name, device_in_use())))
                    await self._listen(socket)
                    pause = _FIRST_PAUSE
            except (aiohttp.ClientError, OSError, TimeoutError, StreamrlError) as error:
                logger.debug("not a member of the broadcast", extra={"url": url, "error": str(error)})
            finally:
                self._leave_round()
                if self._party is not None:
                    self._party[1].leave()
                    self._party = None
                async with self._changed:
                    self._connected = False
                    self._changed.notify_all()
            await asyncio.sleep(random.uniform(pause / 2, pause))  # noqa: S311
            pause = min(2 * pause, _LONGEST_PAUSE)

    async def _listen(self, socket: aiohttp.ClientWebSocketResponse) -> None:
        """Do what the host says until the connection ends."""
        try:
            async with asyncio.TaskGroup() as group:
                await self._obey(socket, group)
        except BaseExceptionGroup as error:
            raise unwrap(error) from error

    async def _obey(self, socket: aiohttp.ClientWebSocketResponse, group: asyncio.TaskGroup) -> None:
        async for message in socket:
            if message.type is not aiohttp.WSMsgType.TEXT:
                break
            said = unpack(message.data)
            match said:
                case Offer():
                    await self._say(socket, Ready(said.number, self._take_up(said)))
                case Go():
                    self._go(socket, said, group)
                case Abandon():
                    await self._abandon(socket, said)
                case Done():
                    async with self._changed:
                        self._connected, self._done = True, max(self._done, said.pair)
                        self._changed.notify_all()
        self._leave_round()

    async def _say(self, socket: aiohttp.ClientWebSocketResponse, message: ToHost) -> None:
        with contextlib.suppress(ConnectionError):  # the end of the connection is seen where it is read
            await socket.send_str(pack(message))

    def _take_up(self, offer: Offer) -> bool:
        """Take room for an offered version; False when it is not wanted or there is none."""
        self._leave_round()
        try:
            manifest = decode(offer.manifest.encode())
            if self._spool.holds(manifest) is not None or self._spool.count() >= self._most(manifest):
                return False
            draft = self._spool.draft(manifest, f"b{offer.number}")
            self._round = _Round(offer.number, manifest, draft)
            for shard in manifest.shards:
                self._spool.create(draft / shard.file, shard.bytes)
        except (WeightsError, CannotCreate, OSError) as error:
            logger.warning("offered weights not taken", extra={"error": str(error)})
            self._leave_round()
            return False
        return True

    def _most(self, manifest: Manifest) -> int:
        return _MAX_FULL if manifest.base is None else _MAX_DELTAS

    def _go(self, socket: aiohttp.ClientWebSocketResponse, go: Go, group: asyncio.TaskGroup) -> None:
        taken = self._round
        if taken is None or taken.number != go.number:
            return
        taken.party = self._join(socket, go)
        taken.receiving = group.create_task(self._receive(socket, taken, taken.party))

    def _join(self, socket: aiohttp.ClientWebSocketResponse, go: Go) -> Party:
        if self._party is None or self._party[0] != go.group:
            if self._party is not None:
                self._party[1].leave()
            # the address by which the host is reached is the one by which it reaches us
            own = socket.get_extra_info("sockname", ("127.0.0.1",))[0]
            who = Membership(go.group, go.rank, go.size, go.backend, go.stall, own)
            self._party = (go.group, Party(who, (go.host, go.port)))
        return self._party[1]

    async def _receive(self, socket: aiohttp.ClientWebSocketResponse, taken: _Round, party: Party) -> None:
        whole = False
        try:
            await party.receive([taken.draft / shard.file for shard in taken.manifest.shards])
            self.traffic.bytes += party.progress
            whole = await asyncio.to_thread(_proven, taken.draft, taken.manifest)
            if whole:
                self._spool.finish(taken.manifest, taken.draft)
                self.broadcasts += 1
                extra = {"version": taken.manifest.version, "bytes": party.progress, "broadcasts": self.broadcasts}
                logger.info("weights received by broadcast", extra=extra)
        except (StreamrlError, OSError) as error:
            logger.debug("broadcast missed", extra={"version": taken.manifest.version, "error": str(error)})
        finally:
            if not whole:
                self._spool.drop(taken.draft)
        self._round = None
        await self._say(socket, Got(taken.number, whole, party.progress))
        async with self._changed:
            self._changed.notify_all()

    async def _abandon(self, socket: aiohttp.ClientWebSocketResponse, order: Abandon) -> None:
        taken = self._round
        if taken is None or taken.number != order.number:
            return
        progress = taken.party.progress if taken.party is not None else 0
        self._leave_round()
        if self._party is not None:
            self._party[1].leave()
            self._party = None
        await self._say(socket, Got(order.number, whole=False, bytes=progress))

    def _leave_round(self) -> None:
        if self._round is not None:
            if self._round.receiving is not None:
                self._round.receiving.cancel()
            self._spool.drop(self._round.draft)
            self._round = None


def _proven(folder: Path, manifest: Manifest) -> bool:
    return all(file_checksum(folder / shard.file) == shard.checksum for shard in manifest.shards)
