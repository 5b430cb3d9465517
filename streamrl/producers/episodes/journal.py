"""Finished turns in the ledger, and what another process does with them.

If the tools of the episode are deterministic, the user's code runs again, and each of its calls is answered by what is
recorded for the same tokens or the same call of a tool, until that is used up. If the code asks for something else, the
rest of the record is forgotten, and the episode goes on from there.

If an environment can restore its state, no tool runs again: all calls of a reply are answered together, and with the
last recorded answers the environment gets the state that it had after them. If it asks for something else, or cannot
take its state, the sample begins again (`BeginAgain`).

Other episodes begin again; then the journal holds no more than how often that happened.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from hashlib import blake2b
from typing import Annotated, Any, Final, Protocol, TypeAlias

import msgpack
import msgspec

from streamrl.engine import Completion, Finish
from streamrl.errors import StreamrlError
from streamrl.producers.episodes.tools import ToolResult
from streamrl.producers.sampler import CannotNow, TurnJournal
from streamrl.queues import Lease
from streamrl.queues.records import RecordedTurns
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
"""Size of the journal of one sample, its state included, from which on nothing is added: the rest is made anew after a
death."""

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


class AnswersEntry(msgspec.Struct, frozen=True, tag="answers"):
    """How all calls of one reply were answered, in their order; the state after them is kept beside the turns.

    Together, because a state that is read while another call still runs belongs to no set of answers.
    """

    key: _Key
    results: list[tuple[dict[str, Any], ToolUse]]
    waiting: list[_Key]


_Entry: TypeAlias = ReplyEntry | ToolEntry | AnswersEntry
_encode: Final = msgspec.msgpack.Encoder().encode
_decode: Final = msgspec.msgpack.Decoder(BeginEntry | _Entry).decode


class BeginAgain(StreamrlError):
    """The episode cannot go on from its record, which is forgotten: the sample begins again, in this process."""


class RestorableEnvironment(Protocol):
    """An environment whose state can be carried to another process. Both may raise anything."""

    async def state(self) -> Any:
        """The state: None, numbers, text, bytes, lists and dicts; tuples come back as lists."""
        ...

    async def restore(self, state: Any) -> None:
        """Take the state of an earlier process, after `reset`."""


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

    async def recorded(self) -> RecordedTurns:
        left = await self._lease.ledger.read_journal(self._lease, self._sample)
        self._next = len(left.turns)
        return left

    async def turn(self, payload: bytes, state: bytes | None = None) -> None:
        """Write one more payload. Without effect for who lost the lease, and after Redis went back."""
        ledger, lease, sample = self._lease.ledger, self._lease, self._sample
        async with self._writing:
            if await ledger.journal(lease, sample, self._next, payload, state):
                self._next += 1
                return
            # There may be a turn whose writer was cancelled, or this one, if the first reply was lost.
            left = (await ledger.read_journal(lease, sample)).turns
            if len(left) <= self._next:
                return
            there, self._next = payload in left[self._next :], len(left)
            if not there and await ledger.journal(lease, sample, self._next, payload, state):
                self._next += 1

    async def forget(self) -> bool:
        async with self._writing:
            self._next = 0
            return await self._lease.ledger.forget_journal(self._lease, self._sample)

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
        self._environment: RestorableEnvironment | None = None
        self._state = b""
        self._left: list[_Entry] = []
        self._again: list[_Entry] = []
        self._waiting: set[bytes] = set()
        self._size = 0
        self._full = False
        self._open = store is None
        self._writing = asyncio.Lock()
        self.replayed = self.restarts = 0

    @property
    def restores(self) -> bool:
        """Whether the answers to a reply are kept together, with the state of the environment after them."""
        return self._environment is not None

    def keep_state_of(self, environment: RestorableEnvironment) -> None:
        """Before the first reply: what this environment answers is kept with its state."""
        if self._store is not None:
            self._environment = environment

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

    async def results(self, key: bytes) -> list[ToolResult] | None:
        """How the same calls of a reply were answered, once; None: run them. Only if `restores`.

        With the last recorded answers the environment gets the state that it had after them, until then
        only `reset` has run. BeginAgain: it cannot take that state.
        """
        entry = await self._take(AnswersEntry, key)
        if not isinstance(entry, AnswersEntry):
            return None
        if not any(isinstance(later, AnswersEntry) for later in self._left):
            await self._restore()
        return [ToolResult(message, use) for message, use in entry.results]

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

    async def add_results(self, key: bytes, results: Sequence[ToolResult]) -> None:
        """Keep the answers to a reply, and the state of the environment after them. Only if `restores`."""
        entry = AnswersEntry(key, [(result.message, result.use) for result in results], self._without(key))
        assert self._environment is not None
        if self._full:
            return
        try:
            # Unlike msgspec, msgpack refuses sets, dates and the like, which would come back as something else.
            state = msgpack.packb(await self._environment.state())
        except Exception as error:  # noqa: BLE001 (code of the user)
            self._fill(f"the state of its environment cannot be kept: {type(error).__name__}: {error}")
        else:
            await self._add(entry, state)

    async def _restore(self) -> None:
        assert self._environment is not None
        try:
            await self._environment.restore(msgspec.msgpack.decode(self._state))
        except Exception as error:
            why = f"its environment cannot be restored: {type(error).__name__}: {error}"
            async with self._writing:
                await self._forget(why)
            raise BeginAgain(why) from error

    async def _opened(self) -> None:
        """Before the first call: read what an earlier process left. Errors are those of the ledger."""
        async with self._writing:
            if self._open or self._store is None:
                return
            left = await self._store.recorded()
            readable = self._keeps and self._read(left)
            if left.turns and not readable:
                self.restarts = 1 + _restarts(left.turns[0])
                self._left.clear()
                self._size = 0
                await self._store.forget()
            if not readable:
                await self._store.turn(_encode(BeginEntry(self.restarts)))
            self._open = True

    @property
    def _keeps(self) -> bool:
        return self._deterministic or self.restores

    async def _take(self, kind: type[_Entry], key: bytes) -> _Entry | None:
        """The first entry of this kind and key, which is used up then; None: there is none."""
        await self._opened()
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
            why = "it went another way than before"
            await self._forget(why)
            if self.restores:
                raise BeginAgain(why)  # its environment is in the state of `reset`, and not in that of the last turn
            for entry in self._again:
                payload = _encode(entry)
                self._size += len(payload)
                await self._store.turn(payload)

    async def _forget(self, why: str) -> None:
        """Empty the journal, and count that. CannotNow: it is another process that goes on with the sample."""
        assert self._store is not None
        extra = {"why": why, "replayed": self.replayed, "forgotten": len(self._left)}
        logger.warning("an episode cannot go on from its record", extra=extra)
        self._left.clear()
        self._size = 0
        self.restarts += 1
        if not await self._store.forget():
            raise CannotNow("another process has taken the sample over")
        await self._store.turn(_encode(BeginEntry(self.restarts)))

    async def _add(self, entry: _Entry, state: bytes | None = None) -> None:
        if self._store is None or not self._keeps:
            return
        payload = _encode(entry)
        async with self._writing:
            if self._full:  # asked here, since an entry beside this one may have filled it
                return
            if self._size + len(payload) + len(self._state if state is None else state) > _MOST_BYTES:
                self._fill(f"its journal would have more than {_MOST_BYTES} bytes")
                return
            self._size += len(payload)
            self._state = self._state if state is None else state
            if self._left:
                self._again.append(entry)
            await self._store.turn(payload, state)

    def _fill(self, why: str) -> None:
        """Add nothing more, because a gap would be worse than an early end."""
        self._full = True
        logger.warning("an episode is no longer recorded: later turns are lost if its process dies", extra={"why": why})

    def _without(self, key: bytes) -> list[bytes]:
        self._waiting.discard(key)
        return sorted(self._waiting)

    def _read(self, left: RecordedTurns) -> bool:
        """Whether there is a journal, and all of it can be read."""
        self._state = left.state or b""
        for number, payload in enumerate(left.turns):
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
        return bool(left.turns)


def _restarts(first: bytes) -> int:
    try:
        entry = _decode(first)
    except msgspec.DecodeError:
        return 0
    return entry.restarts if isinstance(entry, BeginEntry) else 0
