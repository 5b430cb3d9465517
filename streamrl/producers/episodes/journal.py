"""The record of one episode, from which another process goes on when this one dies.

A process that goes on runs the user's code again. Each question takes the next recorded answer to the same question,
once; one without an answer is asked. If the tools are deterministic, each call of one has an entry. If an environment
can restore its state, all calls of a reply have one, and with the last recorded answers it gets the state after them;
if it leaves its record before, the sample begins again (`BeginAgain`). Of other episodes only restarts are counted.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import partial
from hashlib import blake2b
from typing import Any, Final, TypeAlias

import msgpack
import msgspec
import orjson

from streamrl.engine import Completion, Finish
from streamrl.errors import RetryLater, StreamrlError
from streamrl.images.encoded import names_of
from streamrl.producers.episodes.tools import ToolResult, call_function
from streamrl.producers.images import SampleImages
from streamrl.producers.sampler import TurnJournal
from streamrl.wire import Int32Array, ToolUse, pack_float32, pack_int32, unpack_float32, unpack_int32

logger = logging.getLogger(__name__)

_MOST_BYTES: Final = 16 << 20  # of one record, its state included; what would be added is made anew after a death


class BeginEntry(msgspec.Struct, frozen=True, tag="begin"):
    """The episode began, after `restarts` that came to nothing. It is the first entry."""

    restarts: int


class ReplyEntry(msgspec.Struct, frozen=True, tag="reply"):
    """What was sampled after the tokens of `key`: a `Completion`, whose arrays are packed."""

    key: bytes
    tokens: bytes
    logprobs: bytes
    runs: list[tuple[int, int]]
    finish: Finish
    seconds: float
    cached_tokens: int = 0


class AnswersEntry(msgspec.Struct, frozen=True, tag="answers", omit_defaults=True):
    """How the calls of `key` were answered: all of a reply if the state is kept, which belongs to none of them.

    `blobs` are the bytes of the small images among the answers.
    """

    key: bytes
    results: list[tuple[dict[str, Any], ToolUse]]
    blobs: list[bytes] = []


_Entry: TypeAlias = ReplyEntry | AnswersEntry
_encode: Final = msgspec.msgpack.encode


class BeginAgain(StreamrlError):
    """The episode cannot go on from its record, which is forgotten: the sample begins again, in this process."""


def reply_key(ids: Int32Array, options: Mapping[str, Any], images: Sequence[str] = ()) -> bytes:
    own = orjson.dumps(options, option=orjson.OPT_SORT_KEYS) if options else b""
    return blake2b(pack_int32(ids) + own + "".join(images).encode(), digest_size=16).digest()


class EpisodeJournal:
    """The record of one episode in `store`; None: nothing is kept. `replayed` turns came from it."""

    def __init__(
        self, store: TurnJournal | None, images: SampleImages, *, deterministic: bool, most_turns: int
    ) -> None:
        self._store, self._deterministic, self._most_turns = store, deterministic, most_turns
        self._images = images
        self._environment: Any = None
        self._deadline = 0.0
        self._left: list[_Entry] = []
        self._state = b""
        self._size = self._turns = 0
        self._open = self._full = False
        self._opening = asyncio.Lock()
        self.replayed = self.restarts = 0

    @property
    def restores(self) -> bool:
        """Whether the answers to a reply are kept together, with the state of the environment after them."""
        return self._environment is not None

    def keep_state_of(self, environment: Any, deadline: float) -> None:
        """Before the first reply: keep its state too; `get_state` and `set_state` may take `deadline` seconds."""
        if self._store is not None:
            self._environment, self._deadline = environment, deadline

    async def reply(self, key: bytes, sample: Callable[[], Awaitable[Completion]]) -> Completion:
        """What was sampled after the same tokens, else what `sample` returns."""
        entry = await self._take(key)
        if isinstance(entry, ReplyEntry):
            self.replayed += 1
            _, tokens, logprobs, *others = msgspec.structs.astuple(entry)
            return Completion(unpack_int32(tokens), unpack_float32(logprobs), *others)
        done = await sample()
        if self._store is not None:
            self._store.progressed()
        tokens, logprobs = pack_int32(done.tokens), pack_float32(done.logprobs)
        await self._add(ReplyEntry(key, tokens, logprobs, done.runs, done.finish, done.seconds, done.cached_tokens))
        return done

    async def answers(self, key: bytes, run: Callable[[], Awaitable[list[ToolResult]]]) -> list[ToolResult]:
        """How the same calls were answered, else what `run` returns: of one call, or of a reply if `restores`."""
        entry = await self._take(key)
        if not isinstance(entry, AnswersEntry):
            results = await run()
            messages = [result.message for result in results]
            blobs = self._images.travelling(names_of(messages))
            await self._add(AnswersEntry(key, [(result.message, result.use) for result in results], blobs))
            return results
        await self._images.fetch(names_of(message for message, _ in entry.results), entry.blobs)
        if self.restores and not any(isinstance(later, AnswersEntry) for later in self._left):
            await self._restore()  # until then only `reset` has run
        return [ToolResult(message, use) for message, use in entry.results]

    async def _take(self, key: bytes) -> _Entry | None:
        async with self._opening:
            if not self._open and self._store is not None:
                await self._read(self._store)
                self._open = True
        for at, entry in enumerate(self._left):
            if entry.key == key:
                return self._left.pop(at)
        if self.restores and self._left:
            await self._forget()
            raise BeginAgain("it went another way than before")
        return None

    async def _read(self, store: TurnJournal) -> None:
        self._full = not (self._deterministic or self.restores)
        turns, state = await store.recorded()
        if not turns:
            await store.turn(_encode(BeginEntry(0)))
            return
        entries = None
        with contextlib.suppress(msgspec.DecodeError):  # another version of streamrl wrote it
            self.restarts = msgspec.msgpack.decode(turns[0], type=BeginEntry).restarts
            entries = [msgspec.msgpack.decode(turn, type=_Entry) for turn in turns[1:]]
        if self._full or entries is None:
            await self._forget()
            return
        self._left, self._state, self._size = entries, state or b"", sum(map(len, turns))
        self._turns = sum(isinstance(entry, ReplyEntry) for entry in entries)

    async def _restore(self) -> None:
        try:
            state = msgspec.msgpack.decode(self._state)
            async with asyncio.timeout(self._deadline):
                await call_function(partial(self._environment.set_state, state), {}, "set_state")
        except Exception as error:
            await self._forget()
            raise BeginAgain(f"its environment cannot be restored: {type(error).__name__}: {error}") from error

    async def _forget(self) -> None:
        assert self._store is not None
        self.restarts += 1
        if not await self._store.forget():
            raise RetryLater("another process has taken the sample over")
        await self._store.turn(_encode(BeginEntry(self.restarts)))

    async def _add(self, entry: _Entry) -> None:
        """Keep an answer. What cannot be kept ends the record: a gap would be worse than an early end."""
        if self._store is None or self._full:
            return
        payload, state, why = _encode(entry), None, ""
        if self.restores and isinstance(entry, AnswersEntry):
            try:
                async with asyncio.timeout(self._deadline):
                    now = await call_function(self._environment.get_state, {}, "get_state")
                # Unlike msgspec, msgpack refuses sets, dates and the like, which would come back as something else.
                state = self._state = msgpack.packb(now)
            except Exception as error:  # noqa: BLE001 (code of the user)
                why = f"the state of its environment cannot be kept: {type(error).__name__}: {error}"
        self._size += len(payload)
        self._turns += isinstance(entry, ReplyEntry)
        if self._size + len(self._state) > _MOST_BYTES:
            why = f"its record would have more than {_MOST_BYTES} bytes"
        if self._turns > self._most_turns:  # else one that kills each process would never be found to be the cause
            why = "it has more turns than an episode may have: it went another way in each process"
        if not why:
            await self._store.turn(payload, state)
            return
        self._full = True
        logger.warning("an episode is no longer recorded: later turns are lost if its process dies", extra={"why": why})
