"""Finished turns in the ledger, and what another process does with them.

If the tools of the episode are deterministic, the user's code runs again, and each of its calls is answered by what is
recorded for the same tokens or the same call of a tool, until that is used up. If the code asks for something else, the
rest of the record is forgotten, and the episode goes on from there. Other episodes begin again; then the journal holds
no more than how often that happened.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from hashlib import blake2b
from typing import Annotated, Any, Final, TypeAlias

import msgspec

from streamrl.engine import Completion, Finish
from streamrl.producers.episodes.tools import ToolResult
from streamrl.producers.sampler import TurnJournal
from streamrl.queues import Lease
from streamrl.wire import (
    MAX_TOKENS,
    Int32Array,
    ToolUse,
    pack_float32,
    pack_int32,
    unpack_float32,
    unpack_int32,
)

logger = logging.getLogger(__name__)

_VERSION: Final = 1
_MOST_BYTES: Final = 16 << 20
"""Size of the journal of one sample, from which on nothing is added: the rest is made anew after a death."""

_Key: TypeAlias = Annotated[bytes, msgspec.Meta(max_length=32)]
_Packed: TypeAlias = Annotated[bytes, msgspec.Meta(max_length=4 * MAX_TOKENS)]


class BeginEntry(msgspec.Struct, frozen=True, tag="begin"):
    """The episode began, after `restarts` that came to nothing. It is the first entry; `v` is that of all."""

    restarts: int
    v: int = _VERSION


class ReplyEntry(msgspec.Struct, frozen=True, tag="reply"):
    """What was sampled after the tokens of `key`, while the calls of `waiting` had no answer yet.

    The observed tokens before it are not here: rendering makes them again, and `key` says whether they are the same.
    """

    key: _Key
    tokens: _Packed
    logprobs: _Packed
    runs: list[tuple[int, int]]
    finish: Finish
    prompt_tokens: int
    seconds: float
    waiting: list[_Key]
    cached_tokens: int = 0


class ToolEntry(msgspec.Struct, frozen=True, tag="tool"):
    """How the call `key` was answered, while the calls of `waiting` had no answer yet."""

    key: _Key
    message: dict[str, Any]
    use: ToolUse
    waiting: list[_Key]


_encode: Final = msgspec.msgpack.Encoder().encode
_decode: Final = msgspec.msgpack.Decoder(BeginEntry | ReplyEntry | ToolEntry).decode


def reply_key(ids: Int32Array) -> bytes:
    """Key of the reply that is sampled after these tokens."""
    return blake2b(pack_int32(ids), digest_size=16).digest()


class LedgerJournal:
    """The journal of one sample of a leased prompt, in the ledger.

    `progressed` is told when a turn is finished, so that `lease.max_hold` counts from there.
    """

    def __init__(self, lease: Lease, sample: int, progressed: Callable[[Lease], None]) -> None:
        self._lease = lease
        self._sample = sample
        self._progressed = progressed
        self._next = 0
        self._writing = asyncio.Lock()

    async def recorded(self) -> list[bytes]:
        left = await self._lease.ledger.read_journal(self._lease, self._sample)
        self._next = len(left)
        return left

    async def turn(self, payload: bytes) -> None:
        """Write one more payload. Without effect for who lost the lease, and after Redis went back."""
        ledger, lease, sample = self._lease.ledger, self._lease, self._sample
        async with self._writing:
            if await ledger.journal(lease, sample, self._next, payload):
                self._next += 1
                return
            # There may be a turn whose writer was cancelled, or this one, if the first reply was lost.
            left = await ledger.read_journal(lease, sample)
            if len(left) <= self._next:
                return
            there, self._next = payload in left[self._next :], len(left)
            if not there and await ledger.journal(lease, sample, self._next, payload):
                self._next += 1

    async def forget(self) -> None:
        async with self._writing:
            await self._lease.ledger.forget_journal(self._lease, self._sample)
            self._next = 0

    def progressed(self) -> None:
        self._progressed(self._lease)


class EpisodeJournal:
    """The journal of one episode; `store` None: nothing is kept.

    `replayed` counts the turns that were answered from it, `restarts` the times that the episode began again, or went
    another way than the record.
    """

    def __init__(self, store: TurnJournal | None, *, deterministic: bool) -> None:
        self._store = store
        self._deterministic = deterministic
        self._left: list[ReplyEntry | ToolEntry] = []
        self._again: list[ReplyEntry | ToolEntry] = []
        self._waiting: set[bytes] = set()
        self._size = 0
        self._writing = asyncio.Lock()
        self.replayed = self.restarts = 0

    async def open(self) -> None:
        """Read what an earlier process left. Errors are those of the ledger."""
        if self._store is None:
            return
        left = await self._store.recorded()
        readable = self._deterministic and self._read(left)
        if left and not readable:
            self.restarts = 1 + _restarts(left[0])
            self._left.clear()
            await self._store.forget()
        if not readable:
            await self._store.turn(_encode(BeginEntry(self.restarts)))

    async def reply(self, key: bytes) -> Completion | None:
        """What was sampled after the same tokens, once; None: sample it."""
        entry = await self._take(ReplyEntry, key)
        if not isinstance(entry, ReplyEntry):
            return None
        self.replayed += 1
        return Completion(
            unpack_int32(entry.tokens),
            unpack_float32(entry.logprobs),
            entry.runs,
            entry.finish,
            entry.prompt_tokens,
            entry.seconds,
            entry.cached_tokens,
        )

    async def result(self, key: bytes) -> ToolResult | None:
        """How the same call was answered, once; None: run it."""
        entry = await self._take(ToolEntry, key)
        return ToolResult(entry.message, entry.use) if isinstance(entry, ToolEntry) else None

    def waits(self) -> None:
        """Nobody is at work on this sample: `lease.max_hold` begins anew."""
        if self._store is not None:
            self._store.progressed()

    async def add_reply(self, key: bytes, completion: Completion) -> None:
        """Keep a finished turn."""
        if self._store is not None:
            self._store.progressed()
        await self._add(
            ReplyEntry(
                key,
                pack_int32(completion.tokens),
                pack_float32(completion.logprobs),
                completion.runs,
                completion.finish,
                completion.prompt_tokens,
                completion.seconds,
                self._without(key),
                completion.cached_tokens,
            )
        )

    async def add_result(self, key: bytes, result: ToolResult) -> None:
        """Keep the answer of a tool."""
        await self._add(ToolEntry(key, result.message, result.use, self._without(key)))

    async def _take(self, kind: type[ReplyEntry | ToolEntry], key: bytes) -> ReplyEntry | ToolEntry | None:
        """The first entry of this kind and key, which is used up then; None: there is none."""
        at = next((at for at, entry in enumerate(self._left) if isinstance(entry, kind) and entry.key == key), None)
        if at is not None:
            entry = self._left.pop(at)
            self._again.append(entry)
            return entry
        # Calls that ran beside recorded ones are rightly missing: their process died before they ended.
        if self._left and not any(key in entry.waiting for entry in self._left):
            await self._diverge()
        self._waiting.add(key)
        return None

    async def _diverge(self) -> None:
        """The user's code asks for something that is not recorded: what is left belongs to another episode."""
        async with self._writing:
            if not self._left or self._store is None:
                return
            logger.warning(
                "an episode that is declared deterministic went another way than before",
                extra={"replayed": self.replayed, "forgotten": len(self._left)},
            )
            self._left.clear()
            self.restarts += 1
            await self._store.forget()
            for entry in (BeginEntry(self.restarts), *self._again):
                await self._store.turn(_encode(entry))

    async def _add(self, entry: ReplyEntry | ToolEntry) -> None:
        if self._store is None or not self._deterministic:
            return
        payload = _encode(entry)
        async with self._writing:
            if self._size + len(payload) > _MOST_BYTES:
                self._size = _MOST_BYTES  # a gap would be worse than an early end
                return
            self._size += len(payload)
            if self._left:
                self._again.append(entry)
            await self._store.turn(payload)

    def _without(self, key: bytes) -> list[bytes]:
        self._waiting.discard(key)
        return sorted(self._waiting)

    def _read(self, left: list[bytes]) -> bool:
        """Whether there is a journal, and all of it can be read."""
        for number, payload in enumerate(left):
            try:
                entry = _decode(payload)
            except msgspec.DecodeError:
                return False
            if isinstance(entry, BeginEntry) != (number == 0):
                return False
            if isinstance(entry, BeginEntry):
                if entry.v != _VERSION:
                    return False
                self.restarts = entry.restarts
            else:
                self._left.append(entry)
            self._size += len(payload)
        return bool(left)


def _restarts(first: bytes) -> int:
    try:
        entry = _decode(first)
    except msgspec.DecodeError:
        return 0
    return entry.restarts if isinstance(entry, BeginEntry) else 0
