"""The learner host's side of the collective transport: who is a member, and one round after the other.

A member that does not answer is dropped, one that fails pulls the version over http; nobody ever waits for either. What
is announced while a round runs waits, and only the newest of it.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, Literal, TypeVar

from aiohttp import WSMsgType, web

from streamrl.errors import StreamrlError, WireError
from streamrl.listening import reachable
from streamrl.weight_sync.collective import Membership, Party, Rendezvous, device_in_use
from streamrl.weight_sync.manifest import Manifest, Pair, encode
from streamrl.weight_sync.rounds import PATH, Abandon, Done, Go, Got, Hello, Offer, Ready, ToMember, pack
from streamrl.weight_sync.rounds import unpack_from_member as unpack

logger = logging.getLogger(__name__)
_ROUNDS: Final = 2
_STALL_SHARE: Final = 0.1
"""Part of `weights.deadline` that one piece may take."""
_SHORTEST_STALL: Final = 1.0
_PROOF_BYTES_PER_SECOND: Final = 200e6
"""A slow member still proves so many bytes."""
_BEAT_SECONDS: Final = 10.0
_MAX_ANSWER_BYTES: Final = 1 << 16
_Answer = TypeVar("_Answer", Ready, Got)


@dataclass(eq=False)
class _Member:
    """One replica that takes part.

    `got` and `left_out` are the newest version that it has, or that it is not sent any more.
    """

    number: int
    hello: Hello
    request: web.Request
    socket: web.WebSocketResponse
    answers: asyncio.Queue[Ready | Got | None] = field(default_factory=asyncio.Queue)
    got: Pair | None = None
    left_out: Pair | None = None


class Broadcaster:
    """Sends each version that is announced to all members.

    Args:
        root: folder that holds the folders of the versions.
        host: address that the rendezvous and this end of the group listen on.
        deadline: seconds for one version; one piece may take a tenth of it.

    Raises:
        CannotCreate: the address cannot be listened on.
    """

    def __init__(self, root: Path, host: str, deadline: float) -> None:
        self._root, self._deadline = root, deadline
        self._address = reachable(host)
        self._stall = max(_SHORTEST_STALL, _STALL_SHARE * deadline)
        self._rendezvous = Rendezvous(self._address)
        self._members: dict[int, _Member] = {}
        self._numbers = itertools.count(1)
        self._party: tuple[list[int], Party, str] | None = None
        self._waiting: Manifest | None = None
        self._bell = asyncio.Event()
        self._done: Pair | None = None

    def routes(self) -> list[web.RouteDef]:
        """Return the route by which members join; whoever serves it asks for the token."""
        return [web.get(PATH, self._join, allow_head=False)]

    def announce(self, manifest: Manifest) -> None:
        """Send a version as soon as the one before it is through; returns at once."""
        if self._done is None or manifest.pair > self._done:
            self._waiting = manifest
            self._bell.set()

    async def run(self) -> None:
        """Send what is announced, until it is cancelled."""
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
                said = unpack(message.data)
                if isinstance(said, Hello):
                    member = member or self._welcome(said, request, connection)
                    if self._done is not None:
                        await self._tell(member, Done(self._done))
                elif member is not None:
                    member.answers.put_nowait(said)
        except WireError as error:
            logger.warning("member of the broadcast talks nonsense", extra={"error": error.message})
        finally:
            if member is not None:
                self._members.pop(member.number, None)
                member.answers.put_nowait(None)
        return connection

    def _welcome(self, hello: Hello, request: web.Request, connection: web.WebSocketResponse) -> _Member:
        member = _Member(next(self._numbers), hello, request, connection)
        self._members[member.number] = member
        return member

    async def _spread(self, manifest: Manifest) -> None:
        pair = manifest.pair
        for _ in range(_ROUNDS):
            lacking = [m for m in self._members.values() if pair not in (m.got, m.left_out)]
            if not lacking or self._waiting is not None:
                break
            await self._round(manifest, lacking)
        self._done = pair
        for member in list(self._members.values()):
            await self._tell(member, Done(pair))

    async def _round(self, manifest: Manifest, members: Sequence[_Member]) -> None:
        number = next(self._numbers)
        offer = Offer(number, encode(manifest).decode())
        readies = await self._ask(members, [offer] * len(members), Ready, number, self._stall)
        for member, ready in readies.items():
            if not ready.ok:
                member.left_out = manifest.pair
        taking = [member for member, ready in readies.items() if ready.ok]
        if not taking:
            return
        party, group, backend = self._gather(taking)
        size = len(taking) + 1
        for rank, member in enumerate(taking, 1):
            place = (self._address, self._rendezvous.port)
            await self._tell(member, Go(number, group, rank, size, *place, backend, self._stall))
        failed = await self._send(party, manifest)
        if failed:
            self._disband()
        farewell = [Abandon(number)] * len(taking) if failed else []
        proving = 0.0 if failed else manifest.total_bytes / _PROOF_BYTES_PER_SECOND
        answers = await self._ask(taking, farewell, Got, number, self._stall + proving)
        self._settle(manifest, answers, complete=len(answers) == len(taking))

    async def _send(self, party: Party, manifest: Manifest) -> bool:
        """Send the files; True when that failed."""
        folder = self._root / manifest.folder
        try:
            async with asyncio.timeout(self._deadline):
                await party.send([folder / shard.file for shard in manifest.shards])
        except (StreamrlError, OSError, TimeoutError) as error:
            extra = {"version": manifest.version, "bytes": party.progress, "error": str(error)}
            logger.warning("weights broadcast failed", extra=extra)
            return True
        logger.info("weights broadcast", extra={"version": manifest.version, "bytes": party.progress})
        return False

    def _settle(self, manifest: Manifest, answers: dict[_Member, Got], *, complete: bool) -> None:
        """Note who has the version; of those who answered without it, the slowest get no second chance."""
        missed = {member: got for member, got in answers.items() if not got.whole}
        for member, got in answers.items():
            if got.whole:
                member.got = manifest.pair
        if complete and missed:  # nobody died, so somebody is slow
            least = min(got.bytes for got in missed.values())
            for member, got in missed.items():
                if got.bytes == least:
                    member.left_out = manifest.pair

    def _gather(self, members: Sequence[_Member]) -> tuple[Party, str, Literal["gloo", "nccl"]]:
        """Return this host's place in a group with these members; the last group is used again when it has the same."""
        numbers = [member.number for member in members]
        devices = [device_in_use(), *(member.hello.device for member in members)]
        nccl = all(devices) and len(set(devices)) == len(devices)
        backend: Literal["gloo", "nccl"] = "nccl" if nccl else "gloo"
        if self._party is not None and self._party[0] == numbers:
            return self._party[1], self._party[2], backend
        self._disband()
        group = f"g{next(self._numbers)}"
        who = Membership(group, 0, len(members) + 1, backend, self._stall, self._address)
        party = Party(who, self._rendezvous.store)
        self._party = (numbers, party, group)
        return party, group, backend

    def _disband(self) -> None:
        if self._party is not None:
            self._party[1].leave()
            self._party = None

    async def _ask(
        self,
        members: Sequence[_Member],
        messages: Sequence[ToMember],
        kind: type[_Answer],
        number: int,
        seconds: float,
    ) -> dict[_Member, _Answer]:
        """Return what members answer; those that do not answer in time are dropped."""
        for member, message in zip(members, messages, strict=False):
            await self._tell(member, message)
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
            if member not in answers:
                self._drop(member)
        return answers

    async def _tell(self, member: _Member, message: ToMember) -> None:
        """Send a message; a member that does not take it in time is dropped."""
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
