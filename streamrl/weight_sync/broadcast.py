"""The collective transport: the learner's host broadcasts a version to all members at once, in one round.

```
member -> host   hello
host   -> member done (the version announced last, if any)
then for each version:
host   -> member offer (manifest)          member -> host  ready (room was taken)
host   -> member go (group, rank, size)    the bytes travel in the group, over gloo or NCCL
host   -> member done (when that failed)   member -> host  got (whole or not, bytes)
host   -> member done                      a member that has not got it by now pulls it over http
```
These messages are JSON over one WebSocket each. The open WebSocket is the membership: a member whose process dies is
out of it at once. When a member dies or stalls in mid-broadcast the round fails for all of them, and each pulls the
version over http. The slowest of them is not offered the next versions, so the others get those by broadcast again.
Received files are used only if they have the checksums of the manifest.

A group is built directly, beside the group that the process trains in, and has its own name in the store, its own
thread and its own timeout. Gloo is tested with processes that are killed and stopped. NCCL was written from its
documentation and has never run, because it needs two devices; it is used only between processes that use CUDA already.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import mmap
import os
import random
import socket
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Annotated, Any, Final, Literal, Self, TypeAlias, TypeVar

import aiohttp
import msgspec
import torch
import torch.distributed
from aiohttp import WSMsgType, web
from typing_extensions import override

from streamrl.errors import CannotCreate, StreamrlError, Unreachable, WeightsError, WireError, unwrapped
from streamrl.listening import reachable
from streamrl.weight_sync.files import StagingFolder, file_checksum
from streamrl.weight_sync.manifest import MAX_MANIFEST_BYTES, Manifest, Pair, decode, encode
from streamrl.weight_sync.pull import PullSource
from streamrl.weight_sync.source import WeightSource

logger = logging.getLogger(__name__)
PATH: Final = "/members"
MAX_MESSAGE_BYTES: Final = 2 * MAX_MANIFEST_BYTES
PIECE_BYTES: Final = 16 << 20
_STALL_SHARE: Final = 0.1
"""Part of `weights.deadline` that one piece may take."""
_SHORTEST_STALL: Final = 1.0
_PROOF_BYTES_PER_SECOND: Final = 200e6
"""Rate at which a slow member still computes checksums."""
_FIRST_ABSENCE: Final = 4
"""Versions that a slow member is not offered at first; the number doubles each time that it is too slow again."""
_LONGEST_ABSENCE: Final = 64
_BEAT_SECONDS: Final = 10.0
_MAX_ANSWER_BYTES: Final = 1 << 16
_FIRST_PAUSE: Final = 0.2
_LONGEST_PAUSE: Final = 10.0
_WAIT_SHARE: Final = 0.5
"""Part of the deadline for which a member waits for a broadcast before it pulls."""
_MAX_FULL: Final = 3
_MAX_DELTAS: Final = 64
_POLL_SECONDS: Final = 0.001
_NEVER: Final = timedelta(days=1)
dist: Any = torch.distributed  # its stubs lack most of what is used here


# ---- messages

_Text: TypeAlias = Annotated[str, msgspec.Meta(max_length=256)]
_Number: TypeAlias = Annotated[int, msgspec.Meta(ge=0)]


class Hello(msgspec.Struct, frozen=True, tag="hello"):
    """`device` is the UUID of a CUDA device that the member has in use, empty when none."""

    name: _Text
    device: _Text = ""


class VersionOffer(msgspec.Struct, frozen=True, tag="offer"):
    number: _Number
    manifest: str


class Ready(msgspec.Struct, frozen=True, tag="ready"):
    number: _Number
    ok: bool


class Go(msgspec.Struct, frozen=True, tag="go"):
    """Join the group `group` with this rank and take what rank 0 sends; one piece may take `stall` seconds."""

    number: _Number
    group: _Text
    rank: Annotated[int, msgspec.Meta(ge=1)]
    size: Annotated[int, msgspec.Meta(ge=2)]
    host: _Text
    port: _Number
    backend: Literal["gloo", "nccl"]
    stall: Annotated[float, msgspec.Meta(gt=0)]


class Got(msgspec.Struct, frozen=True, tag="got"):
    """How the round ended for the member: `whole` means received and proven; `bytes` as `BroadcastGroup.begun`."""

    number: _Number
    whole: bool
    bytes: _Number


class Done(msgspec.Struct, frozen=True, tag="done"):
    """No broadcast will bring this version or an older one."""

    pair: Pair


ToHost: TypeAlias = Hello | Ready | Got
ToMember: TypeAlias = VersionOffer | Go | Done
FROM_MEMBER: Final[msgspec.json.Decoder[ToHost]] = msgspec.json.Decoder(ToHost)
FROM_HOST: Final[msgspec.json.Decoder[ToMember]] = msgspec.json.Decoder(ToMember)
_Answer = TypeVar("_Answer", Ready, Got)
_Said = TypeVar("_Said")


def pack(message: ToHost | ToMember) -> str:
    return msgspec.json.encode(message).decode()


def unpack(decoder: msgspec.json.Decoder[_Said], text: str) -> _Said:
    try:
        return decoder.decode(text)
    except msgspec.DecodeError as error:
        raise WireError(f"not a message of the broadcast: {error}") from error


# ---- the group that carries the bytes


@dataclass(frozen=True)
class GroupPlace:
    """One process in one group: rank 0 sends."""

    group: str  # name, never used twice in a store
    rank: int
    size: int
    backend: Literal["gloo", "nccl"]
    stall: float  # seconds that building the group, or one piece, may take
    address: str  # of this host, by which the others reach it


class Rendezvous:
    """The store where processes of all groups meet. It has no passwords: received bytes are only checked."""

    def __init__(self, host: str) -> None:
        try:
            listener = socket.create_server((host, 0))
        except OSError as error:
            raise CannotCreate(f"cannot listen on {host}: {error}", "set weights.host to one of this host") from error
        self.port: int = listener.getsockname()[1]
        self.store = dist.TCPStore(
            host, self.port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach()
        )


class BroadcastGroup:
    """This process in one group. Its calls wait in a thread of its own, so no other work waits.

    `store` is the rendezvous in this process, or its address. `progress` are the bytes sent or received in the present
    call, `begun` the same with the piece that is under way: the member that others wait for has begun the fewest bytes.
    """

    def __init__(self, place: GroupPlace, store: Any | tuple[str, int]) -> None:
        self.place = place
        self._store: Any = store
        self._group: _Gloo | _Nccl | None = None
        self._thread = ThreadPoolExecutor(1, thread_name_prefix=f"broadcast {place.group}")
        self.progress = self.begun = 0

    async def send(self, files: Sequence[Path]) -> None:
        """Send files to all others; after `Unreachable` (a piece took too long) the group cannot be used any more."""
        await self._in_thread(files, "rb", mmap.MAP_PRIVATE)

    async def receive(self, files: Sequence[Path]) -> None:
        """Receive into files of the final size. After a cancellation the thread writes until the stall timeout."""
        await self._in_thread(files, "r+b", mmap.MAP_SHARED)

    def leave(self) -> None:
        """Discard the group, without waiting for a call that is stuck in it."""
        self._thread.submit(self._forget)
        self._thread.shutdown(wait=False)

    def _forget(self) -> None:
        self._group = None

    async def _in_thread(self, files: Sequence[Path], mode: Literal["rb", "r+b"], flags: int) -> None:
        self.progress = self.begun = 0
        await asyncio.get_running_loop().run_in_executor(self._thread, self._pass_on, files, mode, flags)

    def _pass_on(self, files: Sequence[Path], mode: Literal["rb", "r+b"], flags: int) -> None:
        try:
            group = self._joined()
            for path in files:
                with path.open(mode) as file:
                    for piece in _pieces(file.fileno(), flags):
                        self.begun += piece.nbytes
                        group.broadcast(piece)
                        self.progress = self.begun
        except RuntimeError as error:  # all that torch raises here
            raise Unreachable(f"broadcast in {self.place.group} failed: {error}") from error

    def _joined(self) -> _Gloo | _Nccl:
        if self._group is None:
            place = self.place
            limit = timedelta(seconds=place.stall)
            if isinstance(self._store, tuple):
                host, port = self._store
                self._store = dist.TCPStore(host, port, is_master=False, wait_for_workers=False, timeout=limit)
            self._store.set_timeout(limit)
            store = dist.PrefixStore(place.group, self._store)
            self._group = _Nccl(store, place) if place.backend == "nccl" else _Gloo(store, place)
        return self._group


class _Gloo:
    def __init__(self, store: Any, place: GroupPlace) -> None:
        options = dist.ProcessGroupGloo._Options()  # noqa: SLF001  (the only way to choose the address)
        options._devices = [dist.ProcessGroupGloo.create_device(hostname=place.address)]  # noqa: SLF001
        options._timeout = timedelta(seconds=place.stall)  # noqa: SLF001
        self._group = dist.ProcessGroupGloo(store, place.rank, place.size, options)
        self._order = dist.BroadcastOptions()
        self._order.rootRank = 0
        self._order.timeout = timedelta(seconds=place.stall)

    def broadcast(self, piece: torch.Tensor) -> None:
        self._group.broadcast([piece], self._order).wait()


class _Nccl:
    """Pieces go through a buffer on the device.

    Timeouts are checked here, because NCCL's watchdog would end the process.
    """

    def __init__(self, store: Any, place: GroupPlace) -> None:
        calm = {"TORCH_NCCL_ASYNC_ERROR_HANDLING": "0", "TORCH_NCCL_ENABLE_MONITORING": "0"}
        before = {name: os.environ.get(name) for name in calm}
        os.environ.update(calm)
        try:
            options = dist.ProcessGroupNCCL.Options()
            options._timeout = _NEVER  # noqa: SLF001
            self._group = dist.ProcessGroupNCCL(store, place.rank, place.size, options)
        finally:
            for name, value in before.items():
                if value is None:
                    del os.environ[name]
                else:
                    os.environ[name] = value
        self._sends, self._stall = place.rank == 0, place.stall
        self._buffer = torch.empty(PIECE_BYTES, dtype=torch.uint8, device="cuda")
        cuda: Any = torch.cuda
        self._stream = cuda.Stream()

    def broadcast(self, piece: torch.Tensor) -> None:
        buffer = self._buffer[: piece.numel()]
        end = time.monotonic() + self._stall
        with torch.cuda.stream(self._stream):
            if self._sends:
                buffer.copy_(piece)
            order = dist.BroadcastOptions()
            order.rootRank = 0
            work = self._group.broadcast([buffer], order)
            while not work.is_completed():
                if time.monotonic() > end:
                    self._group.abort()
                    raise RuntimeError(f"a piece took longer than {self._stall:g} s")
                time.sleep(_POLL_SECONDS)
            if not self._sends:
                piece.copy_(buffer)


def _pieces(descriptor: int, flags: int) -> Iterator[torch.Tensor]:
    size = os.fstat(descriptor).st_size
    if not size:
        return
    mapped = mmap.mmap(descriptor, size, flags=flags, prot=mmap.PROT_READ | mmap.PROT_WRITE)
    whole = torch.frombuffer(mapped, dtype=torch.uint8)
    for start in range(0, size, PIECE_BYTES):
        yield whole[start : start + PIECE_BYTES]


def device_in_use() -> str:
    """UUID of the CUDA device that this process has in use; empty when it uses none."""
    cuda: Any = torch.cuda
    if not cuda.is_available() or not cuda.is_initialized():
        return ""
    return str(cuda.get_device_properties(cuda.current_device()).uuid)


# ---- the learner's host


@dataclass(eq=False)
class _Member:
    number: int
    hello: Hello
    request: web.Request
    socket: web.WebSocketResponse
    answers: asyncio.Queue[Ready | Got | None] = field(default_factory=asyncio.Queue)


@dataclass
class _Absence:
    """A member is not offered `versions` versions, of which `left` are still to come."""

    versions: int
    left: int


class Broadcaster:
    """Sends each version that is announced to all members, in one round; `deadline` is for one version.

    A member that does not answer is dropped, one that fails pulls the version over http; the learner waits for neither.
    A slow member is left out of some versions, also when it joins again under its name. While a round runs, only the
    newest announced version waits.
    """

    def __init__(self, root: Path, host: str, deadline: float) -> None:
        self._root, self._deadline = root, deadline
        self._address = reachable(host)
        self._stall = max(_SHORTEST_STALL, _STALL_SHARE * deadline)
        self._rendezvous = Rendezvous(self._address)
        self._members: dict[int, _Member] = {}
        self._absences: dict[str, _Absence] = {}
        self._numbers = itertools.count(1)
        self._group: tuple[list[int], BroadcastGroup] | None = None
        self._waiting: Manifest | None = None
        self._bell = asyncio.Event()
        self._done: Pair | None = None

    def routes(self) -> list[web.RouteDef]:
        """The route by which members join; the server asks for the token."""
        return [web.get(PATH, self._join, allow_head=False)]

    def announce(self, manifest: Manifest) -> None:
        """Send a version as soon as the one before it is through; returns at once."""
        if self._done is None or manifest.pair > self._done:
            self._waiting = manifest
            self._bell.set()

    async def run(self) -> None:
        try:
            while True:
                await self._bell.wait()
                self._bell.clear()
                manifest, self._waiting = self._waiting, None
                if manifest is not None:
                    await self._spread(manifest)
        finally:
            self._disband()
            for member in list(self._members.values()):
                await member.socket.close()

    async def _join(self, request: web.Request) -> web.WebSocketResponse:
        connection = web.WebSocketResponse(heartbeat=_BEAT_SECONDS, max_msg_size=_MAX_ANSWER_BYTES, timeout=1.0)
        await connection.prepare(request)
        member: _Member | None = None
        try:
            async for message in connection:
                if message.type is not WSMsgType.TEXT:
                    break
                said = unpack(FROM_MEMBER, message.data)
                if isinstance(said, Hello):
                    if member is None:
                        member = _Member(next(self._numbers), said, request, connection)
                        self._members[member.number] = member
                    if self._done is not None:
                        await self._tell(member, Done(self._done))
                elif member is not None:
                    member.answers.put_nowait(said)
        except WireError as error:
            logger.warning("member of the broadcast sent an invalid message", extra={"error": error.message})
        finally:
            if member is not None:
                self._members.pop(member.number, None)
                member.answers.put_nowait(None)
        return connection

    async def _spread(self, manifest: Manifest) -> None:
        left_out = {name for name, absence in self._absences.items() if absence.left}
        for name in left_out:
            self._absences[name].left -= 1
        invited: list[_Member] = []
        for member in list(self._members.values()):
            if member.hello.name in left_out:
                await self._tell(member, Done(manifest.pair))  # so it pulls at once
            else:
                invited.append(member)
        if invited:
            await self._round(manifest, invited)
        if self._done != manifest.pair:
            await self._finish(manifest.pair)

    async def _finish(self, pair: Pair) -> None:
        """End the round: a member that has not received the version pulls it."""
        self._done = pair
        for member in list(self._members.values()):
            await self._tell(member, Done(pair))

    async def _round(self, manifest: Manifest, members: Sequence[_Member]) -> None:
        number = next(self._numbers)
        offer = VersionOffer(number, encode(manifest).decode())
        for member in members:
            await self._tell(member, offer)
        readies = await self._answers(members, Ready, number, self._stall)
        taking = [member for member, ready in readies.items() if ready.ok]
        if not taking:
            return
        group = self._gather(taking)
        where = group.place
        for rank, member in enumerate(taking, 1):
            go = Go(
                number, where.group, rank, where.size, self._address, self._rendezvous.port, where.backend, self._stall
            )
            await self._tell(member, go)
        proving = manifest.total_bytes / _PROOF_BYTES_PER_SECOND
        if not await self._send(group, manifest):
            proving = 0.0
            await self._finish(manifest.pair)  # members report how far they came, and pull
        answers = await self._answers(taking, Got, number, self._stall + proving)
        self._settle(taking, answers)

    def _settle(self, taking: Sequence[_Member], answers: Mapping[_Member, Got]) -> None:
        """Leave the slowest member out of the next versions if some did not get this one.

        Members that did not answer have been left out already, and a round that a death ended says nothing about speed.
        A slow member may hold others up at its own piece, because pieces travel from member to member. So of several
        with the fewest bytes only one is left out, preferably one that was too slow before; the next round shows if
        that was wrong.
        """
        missed = {member: got.bytes for member, got in answers.items() if not got.whole}
        for member in answers.keys() - missed.keys():
            self._absences.pop(member.hello.name, None)
        if len(answers) == len(taking) and not missed:
            return
        self._disband()  # a group in which a broadcast failed cannot be used again
        if len(answers) == len(taking):
            least = min(missed.values())
            equals = [member for member in taking if missed.get(member) == least]
            self._leave_out(max(equals, key=self._times_slow), received=least)

    def _times_slow(self, member: _Member) -> int:
        absence = self._absences.get(member.hello.name)
        return 0 if absence is None else absence.versions

    def _leave_out(self, member: _Member, received: int | None = None) -> None:
        """Do not offer the next versions to a member; `received` is None when it did not answer."""
        versions = min(max(_FIRST_ABSENCE, 2 * self._times_slow(member)), _LONGEST_ABSENCE)
        self._absences[member.hello.name] = _Absence(versions, versions)
        extra = {"member": member.hello.name, "bytes": received, "versions": versions}
        logger.warning("member of the broadcast is too slow: it pulls the next versions", extra=extra)

    async def _send(self, group: BroadcastGroup, manifest: Manifest) -> bool:
        folder = self._root / manifest.folder
        try:
            async with asyncio.timeout(self._deadline):
                await group.send([folder / shard.file for shard in manifest.shards])
        except (StreamrlError, OSError, TimeoutError) as error:
            extra = {"version": manifest.version, "bytes": group.progress, "error": str(error)}
            logger.warning("weights broadcast failed", extra=extra)
            return False
        logger.info("weights broadcast", extra={"version": manifest.version, "bytes": group.progress})
        return True

    def _gather(self, members: Sequence[_Member]) -> BroadcastGroup:
        numbers = [member.number for member in members]
        if self._group is not None and self._group[0] == numbers:
            return self._group[1]
        self._disband()
        devices = [device_in_use(), *(member.hello.device for member in members)]
        nccl = all(devices) and len(set(devices)) == len(devices)
        backend: Literal["gloo", "nccl"] = "nccl" if nccl else "gloo"
        place = GroupPlace(f"g{next(self._numbers)}", 0, len(members) + 1, backend, self._stall, self._address)
        group = BroadcastGroup(place, self._rendezvous.store)
        self._group = (numbers, group)
        return group

    def _disband(self) -> None:
        if self._group is not None:
            self._group[1].leave()
            self._group = None

    async def _answers(
        self, members: Sequence[_Member], kind: type[_Answer], number: int, seconds: float
    ) -> dict[_Member, _Answer]:
        """Answers of the members; a member that does not answer in time is dropped, and left out of next versions."""
        answers: dict[_Member, _Answer] = {}

        async def hear(member: _Member) -> None:
            while (answer := await member.answers.get()) is not None:
                if isinstance(answer, kind) and answer.number == number:
                    answers[member] = answer
                    return

        hearing = [asyncio.ensure_future(hear(member)) for member in members]
        try:
            await asyncio.wait(hearing, timeout=seconds)
        finally:
            for task in hearing:
                task.cancel()
        for member in members:
            if member not in answers and member.number in self._members:
                self._leave_out(member)
                self._drop(member)
        return answers

    async def _tell(self, member: _Member, message: ToMember) -> None:
        try:
            async with asyncio.timeout(self._stall):
                await member.socket.send_str(pack(message))
        except (OSError, TimeoutError):
            self._drop(member)

    def _drop(self, member: _Member) -> None:
        if self._members.pop(member.number, None) is not None:
            logger.warning("member of the broadcast dropped", extra={"member": member.hello.name})
            member.answers.put_nowait(None)
            if member.request.transport is not None:
                member.request.transport.abort()


# ---- a replica


@dataclass
class _Round:
    number: int
    manifest: Manifest
    draft: Path
    receiving: asyncio.Task[None] | None = None


class CollectiveSource(WeightSource):
    """Takes versions from broadcasts, waiting half of `deadline`, and pulls over http what it missed."""

    def __init__(self, pulled: PullSource, staging: StagingFolder, deadline: float, token: str, *, name: str) -> None:
        self.proves = True
        self.traffic = pulled.traffic
        self.broadcasts = 0
        self._pulled, self._staging, self._deadline, self._name = pulled, staging, deadline, name
        self._session = aiohttp.ClientSession(headers={"Authorization": f"Bearer {token}"})
        self._url = ""
        self._following: asyncio.Task[None] | None = None
        self._connected = False
        self._done: Pair = (0, 0)
        self._changed = asyncio.Condition()
        self._round: _Round | None = None
        self._group: BroadcastGroup | None = None

    @override
    async def fetch(self, manifest: Manifest) -> Path:
        here = self._staging.holds(manifest)
        if here is not None:  # before `_follow`: it may be of an older learner than the one we follow
            return here
        await self._follow(manifest.sources[0] if manifest.sources else "")
        with self.traffic.timed(), contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_WAIT_SHARE * self._deadline), self._changed:
                await self._changed.wait_for(lambda: self._settled(manifest))
        return await self._pulled.fetch(manifest)

    @override
    async def base_of(self, manifest: Manifest) -> Manifest:
        return await self._pulled.base_of(manifest)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._leave()
        await self._session.close()

    async def _leave(self) -> None:
        if self._following is not None:
            self._following.cancel()
            await asyncio.wait([self._following])
            self._following = None

    def _settled(self, manifest: Manifest) -> bool:
        """Whether there is nothing to wait for: the version is here, or no broadcast will bring it."""
        over = not self._connected or self._done >= manifest.pair
        return over or self._staging.holds(manifest) is not None

    async def _follow(self, url: str) -> None:
        if self._following is not None and self._following.done():
            await self._following  # raises what ended it
        if url == self._url and self._following is not None:
            return
        await self._leave()
        if not url:
            return
        self._url, self._connected = url, True  # the first connection decides
        self._done = (0, 0)
        self._following = asyncio.create_task(self._stay(url), name="member of the broadcast")

    async def _stay(self, url: str) -> None:
        pause = _FIRST_PAUSE
        while True:
            try:
                async with self._session.ws_connect(
                    f"{url}{PATH}", heartbeat=_BEAT_SECONDS, max_msg_size=MAX_MESSAGE_BYTES
                ) as socket:
                    await socket.send_str(pack(Hello(self._name, device_in_use())))
                    await self._listen(socket)
                    pause = _FIRST_PAUSE
            except (aiohttp.ClientError, OSError, TimeoutError, StreamrlError) as error:
                logger.debug("not a member of the broadcast", extra={"url": url, "error": str(error)})
            finally:
                self._leave_round()
                self._leave_group()
                async with self._changed:
                    self._connected = False
                    self._changed.notify_all()
            await asyncio.sleep(random.uniform(pause / 2, pause))  # noqa: S311
            pause = min(2 * pause, _LONGEST_PAUSE)

    async def _listen(self, socket: aiohttp.ClientWebSocketResponse) -> None:
        with unwrapped():
            async with asyncio.TaskGroup() as tasks:
                async for message in socket:
                    if message.type is not WSMsgType.TEXT:
                        break
                    match unpack(FROM_HOST, message.data):
                        case VersionOffer() as offer:
                            await self._say(socket, Ready(offer.number, self._take_up(offer)))
                        case Go() as go:
                            self._go(socket, go, tasks)
                        case Done() as done:
                            await self._end(socket, done.pair)
                self._leave_round()

    async def _say(self, socket: aiohttp.ClientWebSocketResponse, message: ToHost) -> None:
        with contextlib.suppress(ConnectionError):  # the end of the connection is seen where it is read
            await socket.send_str(pack(message))

    def _take_up(self, offer: VersionOffer) -> bool:
        """Take room for an offered version; False when it is not wanted or there is none."""
        self._leave_round()
        try:
            manifest = decode(offer.manifest.encode())
            most = _MAX_FULL if manifest.base is None else _MAX_DELTAS
            if self._staging.holds(manifest) is not None or self._staging.count() >= most:
                return False
            draft = self._staging.draft(manifest, f"b{offer.number}")
            self._round = _Round(offer.number, manifest, draft)
            for shard in manifest.shards:
                self._staging.create(draft / shard.file, shard.bytes)
        except (WeightsError, CannotCreate, OSError) as error:
            logger.warning("offered weights not taken", extra={"error": str(error)})
            self._leave_round()
            return False
        return True

    def _go(self, socket: aiohttp.ClientWebSocketResponse, go: Go, tasks: asyncio.TaskGroup) -> None:
        taken = self._round
        if taken is None or taken.number != go.number:
            return
        if self._group is None or self._group.place.group != go.group:
            self._leave_group()
            # The others can reach this host at the address that it uses towards the learner's host.
            own = socket.get_extra_info("sockname", ("127.0.0.1",))[0]
            place = GroupPlace(go.group, go.rank, go.size, go.backend, go.stall, own)
            self._group = BroadcastGroup(place, (go.host, go.port))
        taken.receiving = tasks.create_task(self._receive(socket, taken, self._group))

    async def _receive(self, socket: aiohttp.ClientWebSocketResponse, taken: _Round, group: BroadcastGroup) -> None:
        whole = False
        try:
            await group.receive([taken.draft / shard.file for shard in taken.manifest.shards])
            self.traffic.bytes += group.progress
            whole = await asyncio.to_thread(_proven, taken.draft, taken.manifest)
            if whole:
                self._staging.finish(taken.manifest, taken.draft)
                self.broadcasts += 1
                extra = {"version": taken.manifest.version, "bytes": group.progress, "broadcasts": self.broadcasts}
                logger.info("weights received by broadcast", extra=extra)
        except (StreamrlError, OSError) as error:
            logger.debug("broadcast missed", extra={"version": taken.manifest.version, "error": str(error)})
        finally:
            if not whole:
                self._staging.drop(taken.draft)
        self._round = None
        await self._say(socket, Got(taken.number, whole, group.begun))
        async with self._changed:
            self._changed.notify_all()

    async def _end(self, socket: aiohttp.ClientWebSocketResponse, pair: Pair) -> None:
        """No broadcast brings this version any more: when it is still under way here, the round failed."""
        taken = self._round
        if taken is not None and taken.manifest.pair <= pair:
            begun = self._group.begun if self._group is not None and taken.receiving is not None else 0
            self._leave_round()
            self._leave_group()
            await self._say(socket, Got(taken.number, whole=False, bytes=begun))
        async with self._changed:
            self._connected, self._done = True, max(self._done, pair)
            self._changed.notify_all()

    def _leave_round(self) -> None:
        if self._round is not None:
            if self._round.receiving is not None:
                self._round.receiving.cancel()
            self._staging.drop(self._round.draft)
            self._round = None

    def _leave_group(self) -> None:
        if self._group is not None:
            self._group.leave()
            self._group = None


def _proven(folder: Path, manifest: Manifest) -> bool:
    return all(file_checksum(folder / shard.file) == shard.checksum for shard in manifest.shards)
