"""The calls of one sample's agent: which of them is a new turn, which is a repeat, and which is no part of the record.

A call with the same body is a repeat, and gets the answer of the first one, if its SDK says so (above 0 in
`x-stainless-retry-count`), if it has the same `Idempotency-Key`, or if all who asked before left without an answer. Any
other is a turn of its own. A reply that nobody got, or to an auxiliary call (`X-Streamrl-Auxiliary: 1`), is dropped
unless it was rewarded or continued.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from hashlib import blake2b
from secrets import token_hex
from typing import Final, TypeAlias

from streamrl.producers.episodes.clock import EpisodeOver
from streamrl.producers.episodes.endpoint.calls import OVERFLOW, AgentCall, CallRefused, image_bytes, refuse
from streamrl.producers.episodes.session import ContextOverflow, EpisodeSession, SampledTurn, together
from streamrl.score import finite
from streamrl.wire import Outcome, ToolUse

Gone: TypeAlias = Callable[[], bool]
"""Whether the client that asked has closed its connection."""
_NO_TRIES: Final = frozenset({"", "0"})
_TOKEN_BYTES: Final = 64  # of JSON: none has so many, with escapes and with thinking that a template leaves out
_ALWAYS_BYTES: Final = 1 << 16
MAX_CALL_BYTES: Final = 8 << 20
_WITH_IMAGES: Final = 8  # times as many: an agent sends all images of a conversation in each call


@dataclass(slots=True, eq=False)
class PendingCall:
    """A call that is being answered; `heard` when a client got the answer. `clients` are those that wait for it."""

    key: bytes
    auxiliary: bool
    task: asyncio.Task[list[SampledTurn]] = field(init=False)
    clients: list[Gone] = field(default_factory=list)
    turns: list[int] = field(default_factory=list)  # also of answers that are lost because another one failed
    heard: bool = False

    @property
    def left(self) -> bool:
        return not self.heard and all(gone() for gone in self.clients)

    @property
    def failed(self) -> bool:
        return self.task.done() and (self.task.cancelled() or self.task.exception() is not None)


class AgentDoor:
    """Answers the calls of one sample's agent, at most `most` at the same time; options in `ignored` are not obeyed."""

    def __init__(self, session: EpisodeSession, most: int, context: int, ignored: Collection[str] = ()) -> None:
        self._session = session
        self._places = asyncio.Semaphore(most)
        self._longest = max(_ALWAYS_BYTES, _TOKEN_BYTES * context)
        self.most_bytes = MAX_CALL_BYTES * (_WITH_IMAGES if session.images.sees else 1)
        self._waiting = 0
        self._calls: list[PendingCall] = []
        self._closed = False
        # `busy` is set while calls are read and answered, `over` when the session refused a call for good.
        self.called, self.busy, self.idle, self.over = (asyncio.Event() for _ in range(4))
        self.idle.set()
        self.ignored = ignored
        self.name = token_hex(4)  # tells the ids of its answers from those of other samples

    @contextlib.asynccontextmanager
    async def place(self, gone: Gone) -> AsyncIterator[None]:
        """Hold the place of one call during the block, in which its body is read too."""
        self.check_open()
        self._count(1)
        try:
            async with self._places:
                self.check_open()
                if gone():
                    raise CallRefused(408, "the client has left")
                yield
        finally:
            self._count(-1)

    def ask(self, call: AgentCall, body: bytes, headers: Mapping[str, str], gone: Gone) -> PendingCall:
        self._check_length(call, body)
        option, why = self._session.refused(call.options)
        refuse(option, bool(option), (), why)
        key = _digest(body, headers.get("Idempotency-Key", ""))
        # A repeat of one that failed may fare better.
        asked = _repeated([asked for asked in self._calls if asked.key == key and not asked.failed], headers)
        if asked is None:
            left = self._session.turns_left  # with none the episode ends, as for any call
            refuse("n", 1 <= left < call.answers, (), f"the episode has {left} turn(s) left (episode.max_turns)")
            asked = PendingCall(key, headers.get("X-Streamrl-Auxiliary", "").strip() == "1")
            sampling = together(self._sample(call, asked) for _ in range(call.answers))
            asked.task = asyncio.create_task(sampling, name="agent-call")
            self._calls.append(asked)
        asked.clients.append(gone)
        return asked

    async def count(self, call: AgentCall, body: bytes) -> int:
        self._check_length(call, body)
        return await self._session.prompt_tokens(call.messages, call.tools)

    def check_open(self) -> None:
        if self._closed or self._session.stop is not None:
            why = self._session.stop or "completed"
            raise CallRefused(410, f"the episode has ended ({why}): this key takes no more calls", "episode_over")

    def _check_length(self, call: AgentCall, body: bytes) -> None:
        self.check_open()
        if len(body) - image_bytes(call.messages) > self._longest:  # to tokenize it would hold the event loop
            raise CallRefused(400, f"a call of {len(body)} bytes leaves no room in model.context", OVERFLOW)

    def reward(self, value: float, turn: int | None) -> None:
        if self._closed:
            self.check_open()
        try:
            value = finite(value, "the reward")
        except (TypeError, ValueError) as error:
            raise CallRefused(400, str(error)) from error
        if turn is None:
            self._session.posted = value
        elif any(turn in asked.turns for asked in self._calls):
            self._session.reward(value, turn)
        else:
            raise CallRefused(400, f"turn {turn} is no answer to a call; the answers say theirs in `streamrl`")

    async def close(self) -> None:
        """Refuse further calls, give up those that are being sampled, and drop what is no part of the record."""
        self._closed = True
        for asked in self._calls:
            asked.task.cancel()
        await asyncio.gather(*(asked.task for asked in self._calls), return_exceptions=True)
        self._session.check_overflow()
        unheard = {number for asked in self._calls if asked.left or asked.failed for number in asked.turns}
        self._session.drop({number for asked in self._calls if asked.auxiliary for number in asked.turns}, unheard)

    async def _sample(self, call: AgentCall, asked: PendingCall) -> SampledTurn:
        try:
            turn = await self._session.sampled(
                call.messages, call.tools, call.max_tokens, most_calls=call.most_calls, **call.options
            )
        except ContextOverflow:
            raise
        except EpisodeOver:
            self.over.set()
            raise
        finally:
            if self._session.fault is not None:
                self.over.set()
        self._note_bad_calls(call, turn)
        asked.turns.append(turn.number)
        return replace(turn, pieces=self._session.pieces(turn)) if call.logprobs else turn

    def _note_bad_calls(self, call: AgentCall, turn: SampledTurn) -> None:
        """Whatever the agent answers to a call that cannot be carried out, the record says what was wrong with it."""
        known = {tool["function"]["name"] for tool in call.tools}
        for made in turn.reply.calls:
            outcome: Outcome = "malformed" if made.status == "malformed" else "ok" if made.name in known else "unknown"
            if outcome != "ok":
                self._session.used(made.id, ToolUse(name=made.name[:256], outcome=outcome))

    def _count(self, change: int) -> None:
        self._waiting += change
        self.called.set()
        (on, off) = (self.busy, self.idle) if self._waiting else (self.idle, self.busy)
        on.set()
        off.clear()


def _repeated(known: Sequence[PendingCall], headers: Mapping[str, str]) -> PendingCall | None:
    """Which of the calls with the same body one repeats: one that nobody waits for, else the newest if it says so."""
    left = next((asked for asked in known if asked.left), None)
    says = headers.get("x-stainless-retry-count", "") not in _NO_TRIES or "Idempotency-Key" in headers
    return left or (known[-1] if known and says else None)


def _digest(body: bytes, name: str) -> bytes:
    return blake2b(body, digest_size=16, person=blake2b(name.encode(), digest_size=16).digest()).digest()
