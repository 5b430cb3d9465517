"""Leases of work: take, renew, take over from the dead, hand back.

A consumer in Redis is named `role-nonce`, one name per process. A process renews its leases at a third of their time.
An entry that is not renewed for a whole lease is expired, and other processes take it over, one at a time, fewest
deaths first:

* the first time together with other work;
* after a second death alone in the process (probation), so that work that kills its process kills no other work;
* after `max_deliveries` deaths never again: it becomes a dead letter.

Only a death that the work may be to blame for counts. Of a host that died no work is suspected. A process that held
more than a few pieces makes each a suspect only once; after its next death they run few at a time, so that the one that
kills is soon held with few others, and those count. Work of which a part has become durable is suspected of nothing.

A clean hand-back is no death. After a connection error no process takes over for one lease: everything looks expired
then, and the owners renew first. Work that is leased for `max_hold` becomes a dead letter, however well it is renewed;
`progressed` begins that time anew.

```
loop            does                                                  waits for
lease loop      undelivered entries, take-over, XREADGROUP            new entries (short BLOCK), a free place
renew loop      renews all leases; finds lost and undelivered ones    a third of the lease
handler task    the caller's `handle`, one per lease                  whatever it waits for
```

An entry is *undelivered* when Redis has given it to this process and the reply was lost.
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
from streamrl.errors import RetryLater, RewardImpossible, StreamrlError, unwrapped
from streamrl.queues import replies
from streamrl.queues.access import ReplyError
from streamrl.queues.connection import Connection
from streamrl.queues.keys import ALL_SAMPLES, GROUP
from streamrl.queues.ledger import Lease, Ledger

__all__ = ["Lease", "Leases"]

logger = logging.getLogger(__name__)

UNOWNED: Final = "handed-back"
"""Consumer that holds handed-back work until a process takes it."""
_BLOCK_MS: Final = 250
_PAGE: Final = 32
"""Expired entries in one reply."""
_TOGETHER: Final = 2
"""Deliveries up to which work runs next to other work."""
_FEW: Final = 4
"""Pieces of work of which each is a suspect when their process dies."""
_LEAVE_SECONDS: Final = 5.0
_STREAM_GONE: Final = frozenset({"NOGROUP", "UNBLOCKED"})
_NEVER_IDLE: Final = 1 << 40

_Place: TypeAlias = tuple[str, str]
"""Stream and entry."""


def deliveries_after(deaths: int, held: int) -> int:
    """Deliveries of work after one more death of its holder, which held `held` pieces; 0: its host died."""
    if held == 0:
        return max(1, deaths)
    return deaths + 1 if held <= _FEW else max(deaths, min(deaths + 1, _TOGETHER))


@dataclass(eq=False)
class _Work:
    """One lease in this process; without a task it is reserved and has not begun. `few`: may run with few others."""

    lease: Lease
    place: _Place
    since: float
    task: asyncio.Task[None] | None = None
    few: bool = False
    suspect: bool = False
    lost: bool = False
    gone_before: bool = False


class Leases:
    """Leases of one kind of work for one process, over several ledgers that share a connection.

    Args:
        width: handlers at the same time; a function is asked each time, for work of unequal size. With several
            ledgers, each may exceed it by one.
        handle: does the work of one lease and settles it in the ledger (emit, score, fail). It is cancelled when the
            lease is lost, makes no progress for `max_hold`, or the drain is over. An exception is logged and ends
            `run`: a handler turns failures of the work into dead letters itself. Work that it leaves unsettled counts
            as one more delivery; work that it ends with `RetryLater` does not, and another process takes it.
        drain: seconds that work in flight gets after `stop`.
        first: the one of `ledgers` whose entries are taken first; None: no order.
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
        self._keys = ledgers[0].keys
        self._streams = {getattr(ledger.keys, stage): ledger for ledger in ledgers}
        self._first = [] if first is None else [getattr(first.keys, stage)]
        self._connection = ledgers[0].connection
        self._config = config
        self._idle_ms = int(config.seconds * 1000)
        self._width: Callable[[], int] = partial(int, width) if isinstance(width, int) else width
        self._handle = handle
        self._drain_seconds = drain
        self._leased: dict[_Place, _Work] = {}
        self._freed = asyncio.Event()
        self._undelivered: list[tuple[_Place, int, int]] = []
        self._undelivered_before: set[_Place] = set()
        self._ended: set[_Place] = set()
        self._unsettled: set[_Place] = set()
        self._scan_at = 0.0
        self._started = 0.0
        self._stop: asyncio.Event
        self._tasks: asyncio.TaskGroup

    @property
    def leased(self) -> int:
        return len(self._leased)

    def recount(self) -> None:
        """Ask the `width` function again at once, because some work within a lease has ended."""
        self._freed.set()

    def progressed(self, lease: Lease) -> None:
        """Count `max_hold` anew for a lease, because a part of its work is finished and durable.

        An episode may take longer than any single answer; what hangs makes no progress.
        """
        work = self._leased.get((getattr(lease.ledger.keys, self.stage), lease.entry))
        if work is not None:
            work.since = asyncio.get_running_loop().time()

    async def run(self, stop: asyncio.Event) -> None:
        """Lease and handle work until `stop`; then wait up to `drain` seconds for it and hand the rest back.

        Cancellation hands back at once. Handed-back work does not count as a delivery, except work whose handler
        raised: its lease expires and counts. Raises what a handler raised; of several errors the one that
        `errors.unwrap` finds.
        """
        self._started = asyncio.get_running_loop().time()
        self._stop = stop
        try:
            with unwrapped():
                async with asyncio.TaskGroup() as self._tasks:
                    renewing = self._tasks.create_task(self._renew_loop(), name=f"renew {self.stage}")
                    await self._tidy()
                    await self._lease_loop()
                    await self._drain()
                    renewing.cancel()
        finally:
            await self._leave()

    # The lease loop: the only place where work begins.

    async def _lease_loop(self) -> None:
        while not self._stop.is_set():
            try:
                if await self._begin_undelivered() or await self._take_over():
                    continue
                if (room := self._room()) > 0:
                    await self._read(room)
                else:
                    await self._wait_freed()
            except ReplyError as error:
                await self._remake(error)

    def _room(self) -> int:
        few = any(work.few for work in self._leased.values())
        return (min(_FEW, self._width()) if few else self._width()) - len(self._leased)

    async def _read(self, room: int) -> None:
        """Take new entries. It blocks for a short time only, because cancelling a read loses its reply."""
        if self._first and await self._read_from(self._first, room):
            return
        await self._read_from(list(self._streams), max(1, room // len(self._streams)), wait_ms=_BLOCK_MS)

    async def _read_from(self, streams: Sequence[str], each: int, wait_ms: int = 0) -> bool:
        block = ("BLOCK", wait_ms) if wait_ms else ()
        command = ("XREADGROUP", "GROUP", GROUP, self.consumer, "COUNT", each, *block, "STREAMS")
        found = replies.streams(
            await self._connection.block(*command, *streams, *(">" for _ in streams), milliseconds=wait_ms)
        )
        for stream, rows in found.items():
            for entry, fields in rows:
                work = await self._note((stream, entry), fields, 1)
                if work is not None:
                    self._start(work)
        return bool(found)

    async def _note(self, place: _Place, fields: dict[bytes, bytes], deliveries: int) -> _Work | None:
        """Note a lease; None for an entry that is leased already, or foreign (which is removed)."""
        if place in self._leased:
            return None
        stream, entry = place
        lease = self._lease(place, fields, deliveries)
        if lease is None:
            replies.report_foreign(stream, [fields])
            await self._connection.read("XACK", stream, GROUP, entry)
            await self._connection.read("XDEL", stream, entry)
            return None
        work = self._leased[place] = _Work(lease, place, asyncio.get_running_loop().time())
        return work

    def _lease(self, place: _Place, fields: dict[bytes, bytes], deliveries: int) -> Lease | None:
        stream, entry = place
        try:
            number = fields[b"k"].decode() if self.stage == "rollouts" else None
            sample = int(number) if number is not None and number != ALL_SAMPLES else None
            group_id, attempt = int(fields[b"g"]), int(fields[b"a"])
        except (KeyError, ValueError):
            return None
        return Lease(
            *(self._streams[stream], entry, group_id, attempt, sample, deliveries),
            is_group=number == ALL_SAMPLES,
            consumer=self.consumer,
        )

    def _start(self, work: _Work) -> None:
        work.task = self._tasks.create_task(self._settle(work), name=f"{self.stage} {work.lease.group_id}")

    async def _settle(self, work: _Work) -> None:
        try:
            await self._handle(work.lease)
        except asyncio.CancelledError:
            raise  # the canceller decides what happens to the lease
        except RetryLater as why:
            await self._give_back(work, why.message)
            return
        except Exception as error:
            work.suspect = not isinstance(error, RewardImpossible)  # any other sample would have failed too
            extra = {"group": work.lease.group_id, "sample": work.lease.sample, "deliveries": work.lease.deliveries}
            logger.exception("handler failed", extra=extra)
            raise
        self._ended.add(work.place)
        self._let_go(work)

    async def _give_back(self, work: _Work, why: str) -> None:
        stream, entry = work.place
        try:
            await self._connection.call("release", [stream], [self.consumer, UNOWNED, self._idle_ms, entry, 1])
        except ReplyError as error:
            await self._remake(error)
        logger.info("given back", extra={"group": work.lease.group_id, "sample": work.lease.sample, "why": why})
        self._let_go(work)

    def _let_go(self, work: _Work) -> None:
        work.lease.ended.set()
        if self._leased.get(work.place) is work:
            del self._leased[work.place]
        self._freed.set()

    async def _wait_freed(self) -> None:
        """Wait until a handler ends, but not for long, so that `stop` and expired entries are noticed."""
        self._freed.clear()
        try:
            async with asyncio.timeout(_BLOCK_MS / 1000):
                await self._freed.wait()
        except TimeoutError:
            return

    # Taking over.

    async def _take_over(self) -> bool:
        now = asyncio.get_running_loop().time()
        if now < self._scan_at or self._connection.since_error() < self._config.seconds:
            return False
        self._scan_at = now + self._config.seconds / 2
        # A new process cannot know of an outage before it: the owners get one lease to renew.
        patient = now - self._started < self._config.seconds
        took = [await self._take_over_from(stream, patient) for stream in self._streams]
        if any(took):
            self._scan_at = now  # scan again: there may be more
        return any(took)

    async def _take_over_from(self, stream: str, patient: bool) -> bool:
        owners: set[str] = set()
        start = "-"
        while True:
            rows = await self._connection.read("XPENDING", stream, GROUP, "IDLE", self._idle_ms, start, "+", _PAGE)
            # Fewest deaths first: otherwise other work waits until an entry that kills its process is a dead letter.
            for entry, who, silent_ms, deaths in sorted(rows, key=lambda row: row[3]):
                place, owner = (stream, entry.decode()), who.decode()
                if self._stop.is_set() or place in self._leased or (patient and owner != UNOWNED):
                    continue
                held = 1 if owner == UNOWNED else await self._suspects(owner, silent_ms)
                if held is None:
                    continue
                few = held > _FEW and deaths == _TOGETHER
                if not await self._accept(place, deaths, deliveries_after(deaths, held), few=few):
                    break
                owners.add(owner)
            # Entries that are not taken (its own, renewed late) must not hide those behind them.
            if len(rows) < _PAGE or self._stop.is_set() or self._room() <= 0:
                break
            start = f"({rows[-1][0].decode()}"
        for owner in owners - {UNOWNED, self.consumer}:
            await self._connection.call("reap", [stream], [owner, 0])
        return bool(owners)

    async def _suspects(self, owner: str, silent_ms: int) -> int | None:
        keys = [self._keys.deaths, self._keys.hosts, *self._streams]
        role = owner.rpartition("-")[0]
        held = await self._connection.call("suspects", keys, [owner, role, silent_ms, self._idle_ms])
        return None if held is None else int(held)

    async def _begin_undelivered(self) -> bool:
        if not self._undelivered or self._room() <= 0:
            return False
        place, before, count = self._undelivered.pop()
        if place not in self._leased:
            await self._accept(place, before, count)
        return True

    async def _accept(self, place: _Place, before: int, count: int, *, few: bool = False) -> bool:
        """Claim one entry that had `before` deliveries and begin it with `count`; False: there was no room for it."""
        if count > self._config.max_deliveries:
            work = await self._take(place, before, before)
            if work is not None:
                await self._dead_letter(work, f"{before} holders died of it")
            return True
        if count <= _TOGETHER and not few:
            if self._room() <= 0:
                return False
            work = await self._take(place, before, count)
            if work is not None:
                self._start(work)
            return True
        await self._run_apart(place, before, count, few=few)
        return True

    async def _run_apart(self, place: _Place, before: int, count: int, *, few: bool) -> None:
        """Reserve the entry (uncounted, renewed), wait until little or nothing else is leased, and run it so."""
        reserved = min(before, count - 1)  # beginning it counts one, which handing it back takes away
        work = await self._take(place, before, count, reserved=reserved)
        if work is None:
            return
        work.few = few
        while len(self._leased) > (_FEW if few else 1) and not self._stop.is_set() and not work.lost:
            await self._wait_freed()
        if self._stop.is_set() or work.lost:
            return  # reserved and not begun: it is handed back uncounted
        if await self._claim(place, reserved, count, idle_ms=_NEVER_IDLE) is None:
            self._let_go(work)
            return
        extra = {"group": work.lease.group_id, "deliveries": count, "with": _FEW - 1 if few else 0}
        logger.warning("running apart what was held by a process that died", extra=extra)
        work.since = asyncio.get_running_loop().time()
        self._start(work)
        while not few and self._leased.get(place) is work and not self._stop.is_set():
            await self._wait_freed()

    async def _take(self, place: _Place, before: int, count: int, *, reserved: int | None = None) -> _Work | None:
        """Claim an entry and note its lease with `count` deliveries; None: another process has it."""
        fields = await self._claim(place, before, count if reserved is None else reserved)
        return None if fields is None else await self._note(place, fields, count)

    async def _claim(
        self, place: _Place, before: int, count: int, idle_ms: int | None = None
    ) -> dict[bytes, bytes] | None:
        stream, entry = place
        idle = self._idle_ms if idle_ms is None else idle_ms
        reply = await self._connection.call("claim", [stream], [self.consumer, entry, idle, before, count])
        return None if reply is None else replies.pairs(reply)

    async def _dead_letter(self, work: _Work, why: str) -> None:
        extra = {"stream": work.place[0], "group": work.lease.group_id, "sample": work.lease.sample, "why": why}
        logger.error("dead-lettered", extra=extra)
        ledger, lease = work.lease.ledger, work.lease
        await (ledger.fail_prompt(lease, why) if self.stage == "prompts" else ledger.fail_score(lease, why))
        self._let_go(work)

    # Renewing.

    async def _renew_loop(self) -> None:
        while True:
            await asyncio.sleep(self._config.seconds / 3)
            found: set[_Place] = set()
            self._unsettled |= self._ended
            self._ended = set()  # the replies may not cover handlers that end from here on
            for stream in self._streams:
                try:
                    await self._expire(stream)
                    found |= await self._renew(stream)
                except ReplyError as error:
                    await self._remake(error)
            self._undelivered_before = found
            self._unsettled &= found

    async def _renew(self, stream: str) -> set[_Place]:
        """Renew all leases of a stream; return the entries that are pending for this process and not leased in it."""
        mine = [work for place, work in self._leased.items() if place[0] == stream]
        entries = [work.lease.entry for work in mine]
        keys = [stream, self._keys.deaths]
        taken, gone, undelivered = await self._connection.call("renew", keys, [self.consumer, *entries])
        by_entry = {work.lease.entry: work for work in mine}
        for entry in taken:
            self._lose(by_entry[entry.decode()], "somebody else holds it")
        for entry in gone:
            work = by_entry[entry.decode()]
            if work.gone_before:
                self._lose(work, "it was settled elsewhere")
            work.gone_before = True  # a handler that has just settled it gets time to end
        found: set[_Place] = set()
        known = {place for place, _, _ in self._undelivered}
        for entry, deliveries in undelivered:
            place = (stream, entry.decode())
            if place in self._leased:
                continue
            found.add(place)
            if place in self._undelivered_before and place not in known:
                # Only a handler that ended without settling its entry counts as a delivery; a lost reply does not.
                self._undelivered.append((place, deliveries, deliveries + (place in self._unsettled)))
        return found

    async def renew_meanwhile(self, connection: Connection) -> None:
        """Renew all leases from another thread, while the event loop stands still.

        It learns later what the replies say: a repeat gets the same.
        """
        leased = list(self._leased)
        for stream in self._streams:
            entries = [entry for each, entry in leased if each == stream]
            await connection.call("renew", [stream, self._keys.deaths], [self.consumer, *entries])

    def _lose(self, work: _Work, why: str) -> None:
        if self._leased.get(work.place) is not work:
            return
        logger.warning("lease lost", extra={"group": work.lease.group_id, "sample": work.lease.sample, "why": why})
        work.lost = True
        self._let_go(work)
        if work.task is not None:
            work.task.cancel()

    async def _expire(self, stream: str) -> None:
        """Make dead letters of work that is leased for too long: a hung handler would be renewed forever."""
        end = asyncio.get_running_loop().time() - self._config.max_hold
        for work in [work for place, work in self._leased.items() if place[0] == stream and work.since <= end]:
            if work.task is not None:
                work.task.cancel()
                await self._dead_letter(work, f"held for more than lease.max_hold = {self._config.max_hold:.0f} s")

    # Beginning and end.

    async def _remake(self, error: ReplyError) -> None:
        if error.code not in _STREAM_GONE:
            raise error
        logger.warning("a work stream was gone and is made again", extra={"stage": self.stage, "error": error.message})
        for ledger in self._streams.values():
            await ledger.ensure()

    async def _tidy(self) -> None:
        """Remove the names of dead processes without work."""
        for stream in self._streams:
            try:
                await self._connection.call("reap", [stream], ["", 10 * self._idle_ms])
            except ReplyError as error:
                await self._remake(error)

    async def _drain(self) -> None:
        loop = asyncio.get_running_loop()
        end = loop.time() + self._drain_seconds
        while any(work.task is not None for work in self._leased.values()) and loop.time() < end:
            await self._wait_freed()
        running = [work.task for work in self._leased.values() if work.task is not None]
        for task in running:
            task.cancel()
        if running:
            await asyncio.wait(running, timeout=_LEAVE_SECONDS)

    async def _leave(self) -> None:
        """Hand back all that is pending for this process, except what a handler failed on; remove its name."""
        try:
            async with asyncio.timeout(_LEAVE_SECONDS):
                for stream in self._streams:
                    await self._hand_back(stream)
        except (StreamrlError, TimeoutError) as error:
            # The leases expire by themselves; the others only have to wait for that.
            logger.warning("work was not handed back", extra={"held": len(self._leased), "error": str(error)})

    async def _hand_back(self, stream: str) -> None:
        suspect = [work.lease.entry for work in self._leased.values() if work.suspect and work.place[0] == stream]
        keys = [stream, self._keys.deaths]
        _, _, pending = await self._connection.call("renew", keys, [self.consumer, *suspect])
        arguments: list[Any] = []
        for entry, _ in pending:
            work = self._leased.get((stream, entry.decode()))
            arguments += [entry, int(work is None or work.task is not None)]
        if arguments:
            await self._connection.call("release", [stream], [self.consumer, UNOWNED, self._idle_ms, *arguments])
            logger.info("handed back", extra={"stream": stream, "entries": len(pending)})
        await self._connection.call("reap", [stream], [self.consumer, 0])
