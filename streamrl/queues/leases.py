"""Leases of work: take, renew, take over from the dead, hand back.

Consumers in Redis are named `role-nonce`, one name per process. What a process holds it renews at a third of the lease;
what nobody renews for a whole lease is expired, and others take it over, one entry at a time, fewest deaths first:

* the first time together with other work;
* after a second death alone in the process (probation), so that work that kills its holder kills no neighbours;
* after `max_deliveries` deaths it is buried as a dead letter.

A clean hand-back is no death. After a connection error nobody takes over for one lease: everything looks expired then,
and the owners renew first. Work that is held for `max_hold` is buried, however well it is renewed.

```
loop            does                                              waits for
lease loop      strays, take-over, XREADGROUP; starts handlers    new entries (short BLOCK), a free place
renew loop      renews all that is held; finds lost and strays    a third of the lease
handler task    the caller's `handle`, one per lease              whatever it waits for
```
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Final, Literal, TypeAlias

from streamrl.config import LeaseConfig
from streamrl.errors import RewardImpossible, StreamrlError
from streamrl.queues import replies
from streamrl.queues.access import ReplyError
from streamrl.queues.keys import GROUP, WHOLE
from streamrl.queues.ledger import Lease, Ledger

__all__ = ["Lease", "Leases", "NotNow"]

logger = logging.getLogger(__name__)

KEEPER: Final = "handed-back"
"""Consumer that owns work which was handed back, until somebody takes it."""
_BLOCK_MS: Final = 250
_LOOK: Final = 32
"""Expired entries looked at in one go."""
_TOGETHER: Final = 2
"""Deliveries up to which work runs next to other work."""
_LEAVE_SECONDS: Final = 5.0
_STREAM_GONE: Final = frozenset({"NOGROUP", "UNBLOCKED"})
_NEVER_IDLE: Final = 1 << 40

_Place: TypeAlias = tuple[str, str]
"""Stream and entry."""


class NotNow(Exception):
    """Raised by a handler for work that cannot be done for the moment: it goes back, and that is no death of it."""


@dataclass(eq=False)
class _Held:
    """One lease in this process; without a task it is reserved for probation and not begun."""

    lease: Lease
    place: _Place
    since: float
    task: asyncio.Task[None] | None = None
    guilty: bool = False
    lost: bool = False
    gone_before: bool = False


class Leases:
    """Leases of one kind of work for one process, over several ledgers that share a connection.

    Args:
        ledgers: where to lease from.
        stage: `prompts` or `rollouts`.
        consumer: name of the role; the name in Redis gets a nonce.
        config: lease seconds, longest hold, deliveries.
        width: handlers at the same time; a function is asked each time, for work of unequal size. With several
            ledgers, one more each may be taken when a single place is free.
        handle: does the work of one lease and settles it in the ledger (emit, score, fail). It is cancelled when the
            lease is lost, was held for too long, or the drain is over. An exception other than a cancellation is
            logged and ends `run`: a handler turns failures of the work into dead letters itself. Work that it leaves
            unsettled counts as one more delivery; work that it ends with `NotNow` does not, and the next that has
            room takes it.
        drain: seconds that work in flight gets after `stop`.
        first: the one of `ledgers` whose entries are taken before those of the others; None: no order.
    """

    def __init__(  # noqa: PLR0917
        self,
        ledgers: Sequence[Ledger],
        stage: Literal["prompts", "rollouts"],
        consumer: str,
        config: LeaseConfig,
        width: int | Callable[[], int],
        handle: Callable[[Lease], Awaitable[None]],
        *,
        drain: float = 30.0,
        first: Ledger | None = None,
    ) -> None:
        self.stage = stage
        self.consumer = f"{consumer}-{secrets.token_hex(4)}"
        self._streams = {getattr(ledger.keys, stage): ledger for ledger in ledgers}
        self._first = [] if first is None else [getattr(first.keys, stage)]
        self._connection = ledgers[0].connection
        self._config = config
        self._idle_ms = int(config.seconds * 1000)
        self._width: Callable[[], int] = partial(int, width) if isinstance(width, int) else width
        self._handle = handle
        self._drain_seconds = drain
        self._held: dict[_Place, _Held] = {}
        self._freed = asyncio.Event()
        self._strays: list[tuple[_Place, int, int]] = []
        self._suspects: set[_Place] = set()
        self._ended: set[_Place] = set()
        self._unsettled: set[_Place] = set()
        self._look_at = 0.0
        self._started = 0.0
        self._stop: asyncio.Event
        self._tasks: asyncio.TaskGroup

    @property
    def held(self) -> int:
        """Pieces of work that this process holds now."""
        return len(self._held)

    def recount(self) -> None:
        """Ask the `width` function again at once, not at the next look: some work within a lease has ended."""
        self._freed.set()

    async def run(self, stop: asyncio.Event) -> None:
        """Lease and handle work until `stop`; then wait up to `drain` seconds for it and hand the rest back.

        However it ends, what was not settled is handed back without a death, except the work whose handler raised:
        that expires and counts as one. Cancelling does the same at once.

        Raises:
            Exception: what a handler raised; an `ExceptionGroup` when there were several at once.
            Unreachable, ConfigError: from the connection.
        """
        self._started = asyncio.get_running_loop().time()
        self._stop = stop
        try:
            async with asyncio.TaskGroup() as self._tasks:
                renewing = self._tasks.create_task(self._renew_loop(), name=f"renew {self.stage}")
                await self._tidy()
                await self._lease_loop()
                await self._drain()
                renewing.cancel()
        except BaseExceptionGroup as group:
            if len(group.exceptions) == 1:
                raise group.exceptions[0] from None
            raise
        finally:
            await self._leave()

    # The lease loop: the only place where work begins.

    async def _lease_loop(self) -> None:
        while not self._stop.is_set():
            try:
                if await self._adopt_strays() or await self._take_over():
                    continue
                room = self._width() - len(self._held)
                if room > 0:
                    await self._read(room)
                else:
                    await self._wait_freed()
            except ReplyError as error:
                await self._remake(error)

    async def _read(self, room: int) -> None:
        """Take new entries. A read is never cancelled in normal running, so it blocks for a short time only."""
        if self._first and await self._read_from(self._first, room):
            return
        await self._read_from(list(self._streams), max(1, room // len(self._streams)), wait_ms=_BLOCK_MS)

    async def _read_from(self, streams: Sequence[str], each: int, wait_ms: int = 0) -> bool:
        """Take up to `each` new entries of each stream; False when there was none."""
        block = ("BLOCK", wait_ms) if wait_ms else ()
        command = ("XREADGROUP", "GROUP", GROUP, self.consumer, "COUNT", each, *block, "STREAMS")
        found = replies.streams(
            await self._connection.block(*command, *streams, *(">" for _ in streams), milliseconds=wait_ms)
        )
        for stream, rows in found.items():
            for entry, fields in rows:
                held = await self._hold((stream, entry), fields, 1)
                if held is not None:
                    self._start(held)
        return bool(found)

    async def _hold(self, place: _Place, fields: dict[bytes, bytes], deliveries: int) -> _Held | None:
        """Note a lease; None for an entry that is held already or is none of ours (which is removed)."""
        if place in self._held:
            return None
        stream, entry = place
        lease = self._lease(place, fields, deliveries)
        if lease is None:
            logger.error(
                "removed an entry that is none of ours", extra={"stream": stream, "fields": repr(fields)[:500]}
            )
            await self._connection.read("XACK", stream, GROUP, entry)
            await self._connection.read("XDEL", stream, entry)
            return None
        held = self._held[place] = _Held(lease, place, asyncio.get_running_loop().time())
        return held

    def _lease(self, place: _Place, fields: dict[bytes, bytes], deliveries: int) -> Lease | None:
        """The lease of an entry; None for a foreign one."""
        stream, entry = place
        try:
            number = fields[b"k"].decode() if self.stage == "rollouts" else None
            sample = int(number) if number is not None and number != WHOLE else None
            gid, attempt = int(fields[b"g"]), int(fields[b"a"])
        except (KeyError, ValueError):
            return None
        return Lease(self._streams[stream], entry, gid, attempt, sample, deliveries, whole=number == WHOLE)

    def _start(self, held: _Held) -> None:
        held.task = self._tasks.create_task(self._work(held), name=f"{self.stage} {held.lease.gid}")

    async def _work(self, held: _Held) -> None:
        try:
            await self._handle(held.lease)
        except asyncio.CancelledError:
            raise  # whoever cancelled decides what becomes of the lease
        except NotNow as why:
            await self._give_back(held, str(why))
            return
        except Exception as error:
            held.guilty = not isinstance(error, RewardImpossible)  # any other sample would have met it
            extra = {"gid": held.lease.gid, "sample": held.lease.sample, "deliveries": held.lease.deliveries}
            logger.exception("handler failed", extra=extra)
            raise
        self._ended.add(held.place)
        self._let_go(held)

    async def _give_back(self, held: _Held, why: str) -> None:
        stream, entry = held.place
        before = max(0, held.lease.deliveries - 1)
        try:
            await self._connection.call("release", [stream], [self.consumer, KEEPER, self._idle_ms, entry, before])
        except ReplyError as error:
            await self._remake(error)
        logger.info("given back", extra={"gid": held.lease.gid, "sample": held.lease.sample, "why": why})
        self._let_go(held)

    def _let_go(self, held: _Held) -> None:
        if self._held.get(held.place) is held:
            del self._held[held.place]
        self._freed.set()

    async def _wait_freed(self) -> None:
        """Wait until a handler ends, for a short time at most: `stop` and expired entries are looked at in between."""
        self._freed.clear()
        try:
            async with asyncio.timeout(_BLOCK_MS / 1000):
                await self._freed.wait()
        except TimeoutError:
            return

    # Taking over.

    async def _take_over(self) -> bool:
        """Take what has expired, when it is time to look; True when something was there to take."""
        now = asyncio.get_running_loop().time()
        if now < self._look_at or self._connection.since_error() < self._config.seconds:
            return False
        self._look_at = now + self._config.seconds / 2
        # A new process cannot know of an outage before it: the owners get one lease to renew.
        patient = now - self._started < self._config.seconds
        took = [await self._take_over_from(stream, patient) for stream in self._streams]
        if any(took):
            self._look_at = now  # look again: there may be more
        return any(took)

    async def _take_over_from(self, stream: str, patient: bool) -> bool:
        """Take what has expired in one stream, as far as there is room; True when something was there to take."""
        owners: set[str] = set()
        start = "-"
        while True:
            rows = await self._connection.read("XPENDING", stream, GROUP, "IDLE", self._idle_ms, start, "+", _LOOK)
            # Else the neighbours of what kills its holder wait for as many restarts as it takes to bury it.
            for entry, owner, _, deaths in sorted(rows, key=lambda row: row[3]):
                place = (stream, entry.decode())
                if self._stop.is_set() or place in self._held or (patient and owner.decode() != KEEPER):
                    continue
                if not await self._accept(place, deaths, deaths + 1):
                    break
                owners.add(owner.decode())
            # What is not to be taken (its own, late to be renewed) must not hide what comes behind it.
            if len(rows) < _LOOK or self._stop.is_set() or len(self._held) >= self._width():
                break
            start = f"({rows[-1][0].decode()}"
        for owner in owners - {KEEPER, self.consumer}:
            await self._connection.call("reap", [stream], [owner, 0])
        return bool(owners)

    async def _adopt_strays(self) -> bool:
        """Begin entries that are pending as ours without our knowing: the reply that gave them to us was lost."""
        if not self._strays or len(self._held) >= self._width():
            return False
        place, before, count = self._strays.pop()
        if place not in self._held:
            await self._accept(place, before, count)
        return True

    async def _accept(self, place: _Place, before: int, count: int) -> bool:
        """Claim one entry that had `before` deliveries and begin it with `count`; False: there was no room for it."""
        if count > self._config.max_deliveries:
            fields = await self._claim(place, before, before)
            held = await self._hold(place, fields, before) if fields is not None else None
            if held is not None:
                await self._bury(held, f"{before} holders died of it")
            return True
        if count <= _TOGETHER:
            if len(self._held) >= self._width():
                return False
            fields = await self._claim(place, before, count)
            held = await self._hold(place, fields, count) if fields is not None else None
            if held is not None:
                self._start(held)
            return True
        await self._run_alone(place, before, count)
        return True

    async def _run_alone(self, place: _Place, before: int, count: int) -> None:
        """Probation: reserve the entry (uncounted, renewed), wait until nothing else is held, run it alone."""
        fields = await self._claim(place, before, before)
        held = await self._hold(place, fields, count) if fields is not None else None
        if held is None:
            return
        while len(self._held) > 1 and not self._stop.is_set() and not held.lost:
            await self._wait_freed()
        if self._stop.is_set() or held.lost:
            return  # what is reserved and not begun is handed back uncounted
        if await self._claim(place, before, count, idle_ms=_NEVER_IDLE) is None:
            self._let_go(held)
            return
        logger.warning("running alone what killed before", extra={"gid": held.lease.gid, "deliveries": count})
        held.since = asyncio.get_running_loop().time()
        self._start(held)
        while self._held.get(place) is held and not self._stop.is_set():
            await self._wait_freed()

    async def _claim(
        self, place: _Place, before: int, count: int, idle_ms: int | None = None
    ) -> dict[bytes, bytes] | None:
        stream, entry = place
        idle = self._idle_ms if idle_ms is None else idle_ms
        reply = await self._connection.call("claim", [stream], [self.consumer, entry, idle, before, count])
        return None if reply is None else replies.pairs(reply)

    async def _bury(self, held: _Held, why: str) -> None:
        extra = {"stream": held.place[0], "gid": held.lease.gid, "sample": held.lease.sample, "why": why}
        logger.error("buried", extra=extra)
        ledger, lease = held.lease.ledger, held.lease
        await (ledger.fail_prompt(lease, why) if self.stage == "prompts" else ledger.fail_score(lease, why))
        self._let_go(held)

    # Renewing.

    async def _renew_loop(self) -> None:
        while True:
            await asyncio.sleep(self._config.seconds / 3)
            found: set[_Place] = set()
            self._unsettled |= self._ended
            self._ended = set()  # what ends from here on may not be in the replies
            for stream in self._streams:
                try:
                    await self._expire(stream)
                    found |= await self._renew(stream)
                except ReplyError as error:
                    await self._remake(error)
            self._suspects = found
            self._unsettled &= found

    async def _renew(self, stream: str) -> set[_Place]:
        """Renew all leases of a stream; return the entries that are ours and not held here."""
        mine = [held for place, held in self._held.items() if place[0] == stream]
        entries = [held.lease.entry for held in mine]
        taken, gone, strays = await self._connection.call("renew", [stream], [self.consumer, *entries])
        by_entry = {held.lease.entry: held for held in mine}
        for entry in taken:
            self._lose(by_entry[entry.decode()], "somebody else holds it")
        for entry in gone:
            held = by_entry[entry.decode()]
            if held.gone_before:
                self._lose(held, "it was settled elsewhere")
            held.gone_before = True  # a handler that has just settled it gets time to end
        found: set[_Place] = set()
        known = {place for place, _, _ in self._strays}
        for entry, deliveries in strays:
            place = (stream, entry.decode())
            if place in self._held:
                continue
            found.add(place)
            if place in self._suspects and place not in known:
                # A handler that ended without settling its entry had its turn; a lost reply is nobody's fault.
                self._strays.append((place, deliveries, deliveries + (place in self._unsettled)))
        return found

    def _lose(self, held: _Held, why: str) -> None:
        if self._held.get(held.place) is not held:
            return
        logger.warning("lease lost", extra={"gid": held.lease.gid, "sample": held.lease.sample, "why": why})
        held.lost = True
        self._let_go(held)
        if held.task is not None:
            held.task.cancel()

    async def _expire(self, stream: str) -> None:
        """Bury what has been held for too long: a hung handler would renew for ever."""
        end = asyncio.get_running_loop().time() - self._config.max_hold
        for held in [held for place, held in self._held.items() if place[0] == stream and held.since <= end]:
            if held.task is not None:
                held.task.cancel()
                await self._bury(held, f"held for more than lease.max_hold = {self._config.max_hold:.0f} s")

    # Beginning and end.

    async def _remake(self, error: ReplyError) -> None:
        """A stream was deleted under us: make it again, and go on. Any other refusal is raised."""
        if error.code not in _STREAM_GONE:
            raise error
        logger.warning("a work stream was gone and is made again", extra={"stage": self.stage, "error": error.message})
        for ledger in self._streams.values():
            await ledger.ensure()

    async def _tidy(self) -> None:
        """Forget the names of processes that died without holding anything."""
        for stream in self._streams:
            try:
                await self._connection.call("reap", [stream], ["", 10 * self._idle_ms])
            except ReplyError as error:
                await self._remake(error)

    async def _drain(self) -> None:
        loop = asyncio.get_running_loop()
        end = loop.time() + self._drain_seconds
        while any(held.task is not None for held in self._held.values()) and loop.time() < end:
            await self._wait_freed()
        running = [held.task for held in self._held.values() if held.task is not None]
        for task in running:
            task.cancel()
        if running:
            await asyncio.wait(running, timeout=_LEAVE_SECONDS)

    async def _leave(self) -> None:
        """Hand back what is pending as ours (not what a handler failed on), and take the name out of Redis."""
        try:
            async with asyncio.timeout(_LEAVE_SECONDS):
                for stream in self._streams:
                    await self._hand_back(stream)
        except (StreamrlError, TimeoutError) as error:
            # The leases expire by themselves; the others only have to wait for that.
            logger.warning("work was not handed back", extra={"held": len(self._held), "error": str(error)})

    async def _hand_back(self, stream: str) -> None:
        guilty = [held.lease.entry for held in self._held.values() if held.guilty and held.place[0] == stream]
        _, _, pending = await self._connection.call("renew", [stream], [self.consumer, *guilty])
        arguments: list[Any] = []
        for entry, deliveries in pending:
            held = self._held.get((stream, entry.decode()))
            before = deliveries if held is None else held.lease.deliveries
            arguments += [entry, max(0, before - 1)]
        if arguments:
            await self._connection.call("release", [stream], [self.consumer, KEEPER, self._idle_ms, *arguments])
            logger.info("handed back", extra={"stream": stream, "entries": len(pending)})
        await self._connection.call("reap", [stream], [self.consumer, 0])
