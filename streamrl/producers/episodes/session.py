"""One sample that is being made. A turn: messages -> History.place -> Engine.generate -> History.record -> Reply."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Collection, Coroutine, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from functools import partial
from itertools import count
from typing import Any, Final, TypeVar

import msgspec
import numpy as np

from streamrl import wire
from streamrl.config import EpisodeConfig, RunConfig
from streamrl.config.base import SERVER_KINDS
from streamrl.config.sampling import OPTIONS
from streamrl.engine import Completion, Finish, Generator, Request, first_tokens, join_runs
from streamrl.errors import DataError, DeadlyRequest, unwrapped
from streamrl.producers.episodes.clock import EpisodeClock, EpisodeOver
from streamrl.producers.episodes.history import History, NextTurn, calls_key
from streamrl.producers.episodes.journal import EpisodeJournal, reply_key
from streamrl.producers.episodes.rendering import ChatRenderer, Message, Reply, ToolCall, ToolSchema
from streamrl.producers.episodes.tools import Toolbox, ToolResult
from streamrl.producers.images import SampleImages
from streamrl.producers.sampler import SampleOrder
from streamrl.producers.stopping import StopTexts
from streamrl.producers.tokenizer import Tokenizer
from streamrl.score import Score, finite
from streamrl.wire import PROMPT, Float32Array, Int32Array, Sample, SampleScore, StopReason, ToolUse

_T = TypeVar("_T")
_REFUSED_SECONDS: Final = 0.1  # each call waits so long after one that found the end, or a conversation too long
_CLOSE_SECONDS: Final = 1.0  # how long the end of an episode waits for what was cancelled


class ContextOverflow(EpisodeOver):
    """A conversation leaves no room in the model's context. Shorter ones of the same episode go on."""

    def __init__(self, tokens: int, context: int) -> None:
        # The words of OpenAI, which agents that compact look for.
        most = f"This model's maximum context length is {context} tokens (model.context)."
        super().__init__("context_overflow", f"{most} However, your messages resulted in {tokens} tokens.")


@dataclass(frozen=True, slots=True, eq=False)
class SampledTurn:
    """One reply of the policy; `text` is all of it, its thinking and calls as written, without special tokens."""

    reply: Reply
    number: int  # of its turn
    finish: Finish
    prompt_tokens: int
    tokens: Int32Array  # the end of turn included
    logprobs: Float32Array
    cut: StopReason | None  # the limit that cut it off, where `finish` is `length`
    text: str
    stopped: str = ""  # the text that ended it, which is not in `reply`
    pieces: Sequence[str] = ()


@dataclass(frozen=True, slots=True, eq=False)
class _OpenTurn:
    place: NextTurn
    longest: int
    limit: StopReason


class EpisodeSession:
    """One sample being made; several turns may be sampled at the same time. After a `stop` none is sampled."""

    def __init__(
        self,
        config: RunConfig,
        engine: Generator,
        renderer: ChatRenderer,
        tokenizer: Tokenizer,
        order: SampleOrder,
        *,
        deterministic: bool = False,
    ) -> None:
        self._config, self._engine, self._order = config, engine, order
        self._renderer, self._tokenizer = renderer, tokenizer
        self._longest_reply = config.drawing(evaluation=order.prompt.evaluation).max_new_tokens
        self._history = History(renderer, order.prompt.token_ids, order.prompt.images)
        self._numbers = count()
        self._noted: dict[str, ToolUse] = {}
        self._turns = self._calls = self._tokens = self._unread = 0
        self._open_turns: set[_OpenTurn] = set()
        self._turn_ended = asyncio.Event()
        self._working: dict[asyncio.Future[None], asyncio.Task[Any]] = {}
        self._closed = self._refused = False
        self._version = 0
        self.limits: EpisodeConfig = config.episode
        most = self.limits.max_turns
        self.images = SampleImages(config, order.prompt, tokenizer.vision, order.store)
        self.journal = EpisodeJournal(order.journal, self.images, deterministic=deterministic, most_turns=most)
        self.clock = EpisodeClock(config.episode, self.end)
        self.part = self.clock.part
        self.stop: StopReason | None = None
        self.fault: BaseException | None = None  # of the engine or the ledger, whatever the user's code made of it
        self.posted: float | None = None  # the score that an agent sent for the episode
        self.overflowed = False  # the newest conversation was too long
        self.generating = self.dropped = self.auxiliary = 0

    @property
    def forks(self) -> int:
        return self._history.forks

    @property
    def turns_left(self) -> int:
        return self._config.episode.max_turns - self._turns

    @property
    def replied(self) -> bool:
        return any(turn.sampled for turn in self._history.turns)

    async def sampled(
        self,
        messages: Sequence[Message],
        tools: Sequence[ToolSchema] = (),
        max_tokens: int | None = None,
        *,
        most_calls: int | None = None,
        **options: Any,
    ) -> SampledTurn:
        """Sample the message that follows the conversation, and record it. Cancelling records nothing of this turn.

        At most `most_calls` calls of tools are read; 0: they stay text; None: all. `options` of `engine.Request`
        replace those of the run. Errors: as `Chat.__call__`, also DataError: an option is `refused`; Unreachable.
        """
        option, why = self.refused(options)
        if option:
            raise DataError(f"{option}: {why}")
        # Code that goes on after a refusal must not keep the event loop busy.
        await asyncio.sleep(_REFUSED_SECONDS if self._refused or self.overflowed else 0)
        self._check_open()
        begun = asyncio.get_running_loop().time()
        async with self._owned():
            messages = await self.images.canonical(messages)
            open_turn = await self._begin_turn(messages, tools, max_tokens)
            place = open_turn.place
            try:
                asked = options if max_tokens is None else {**options, "max_tokens": max_tokens}
                key = reply_key(place.ids, asked, place.images)
                completion, ends = await self._completion(place, open_turn.longest, options, key)
            except BaseException:
                self._turns -= 1
                raise
            finally:
                self._open_turns.remove(open_turn)
                self._turn_ended.set()
        tokens = completion.tokens.tolist()
        reply = self._renderer.parse(tokens, tools if most_calls != 0 else None, prompt=place.ids.tolist())
        reply, text, stopped = self._ended(replace(reply, calls=reply.calls[:most_calls]), tokens, ends)
        self._calls += len(reply.calls)
        self._unread = self._unread + 1 if any(call.status == "malformed" for call in reply.calls) else 0
        uses, away = self._uses(place), self._away(place, begun)
        number = self._history.record(place, completion, reply, uses=uses, away=away, stopped=stopped)
        turn = self._history.turns[number]
        turn.ended_at, turn.text = asyncio.get_running_loop().time(), text
        cut = open_turn.limit if completion.finish == "length" else None
        return SampledTurn(
            reply, number, completion.finish, len(place.ids), completion.tokens, completion.logprobs, cut, text, stopped
        )

    def _ended(self, reply: Reply, tokens: list[int], ends: StopTexts) -> tuple[Reply, str, str]:
        """The reply and its text before the text of `stop` that ended it, which is the third."""
        text = self._tokenizer.decode(tokens)
        if not ends.ends(tokens):
            return reply, text, ""
        text, stopped = ends.split(text, tokens)
        reasoning = reply.reasoning if reply.content else ends.before(reply.reasoning, tokens)
        return replace(reply, content=ends.before(reply.content, tokens), reasoning=reasoning), text, stopped

    def refused(self, options: Mapping[str, Any]) -> tuple[str, str]:
        """The option of a reply that it cannot have, and why; empty: it can have all."""
        kind = self._config.engine.kind
        if "json_schema" in options and kind not in SERVER_KINDS:
            return "response_format", f"engine.kind {kind} keeps no reply to a schema; vllm and sglang do"
        if self._order.prompt.evaluation or self._order.greedy:
            return "", ""
        # The log-probabilities of what is trained must be those that it was sampled with.
        draw = self._config.sampling.model_copy(update={name: options[name] for name in OPTIONS & options.keys()})
        if draw.temperature == 0:
            return "temperature", "at 0 all samples of a group are alike, which trains nothing"
        return self._config.untold(draw)

    def pieces(self, turn: SampledTurn) -> list[str]:
        return [self._all_text([token]) for token in turn.tokens.tolist()]

    async def prompt_tokens(self, messages: Sequence[Message], tools: Sequence[ToolSchema] = ()) -> int:
        """How many tokens `sampled` would put before a reply. DataError: the messages cannot be rendered."""
        return len(self._history.place(await self.images.canonical(messages), tools).ids)

    def reward(self, value: float, turn: int) -> None:
        """Add a finite number to the reward of a sampled turn."""
        rewarded = self._history.turns[turn]
        rewarded.reward = (rewarded.reward or 0.0) + finite(value, "the reward of a turn")

    async def answers(self, calls: Sequence[ToolCall], toolbox: Toolbox) -> list[Message]:
        async with self._owned(), self._faults():
            if self.journal.restores:
                results = await self.journal.answers(calls_key(calls), partial(self._run, calls, toolbox))
            else:
                results = await together([self._answer(call, toolbox) for call in calls])
        for call, result in zip(calls, results, strict=True):
            self.used(call.id, result.use)
        return [result.message for result in results]

    async def _answer(self, call: ToolCall, toolbox: Toolbox) -> ToolResult:
        run = partial(self._run, [call], toolbox)
        [result] = await (run() if toolbox.keeps_state(call.name) else self.journal.answers(calls_key([call]), run))
        return result

    async def _run(self, calls: Sequence[ToolCall], toolbox: Toolbox) -> list[ToolResult]:
        deadline, longest = self.limits.tool_deadline, self.limits.max_tool_response
        results = await together([toolbox.call(call, deadline=deadline, longest=longest) for call in calls])
        return [await self._shown(result) for result in results]

    async def _shown(self, result: ToolResult) -> ToolResult:
        """With its images in the form of inside; the model is told of one that cannot be used."""
        try:
            [message] = await self.images.canonical([result.message])
        except DataError as error:
            message = {**result.message, "content": f"error: {error.message}"}
            return ToolResult(message, msgspec.structs.replace(result.use, outcome="error"))
        return ToolResult(message, result.use)

    def used(self, call_id: str, use: ToolUse) -> None:
        """Note how the call of a tool went, before its message is in `sampled`; else it counts as `ok`."""
        self._noted[call_id] = use

    def check_calls(self) -> None:
        """EpisodeOver: `episode.max_tool_calls` or `max_parse_errors` is reached."""
        most, errors = self._config.episode.max_tool_calls, self._config.episode.max_parse_errors
        if errors is not None and self._unread >= errors:
            said = f"the calls in {self._unread} replies in a row cannot be read (episode.max_parse_errors {errors})"
            self._over("parse_error", said)
        if most is not None and self._calls > most:
            self._over("max_tool_calls", f"it called tools {self._calls} times (episode.max_tool_calls {most})")

    def check_overflow(self) -> None:
        if self.overflowed:  # nothing went on after it
            self.end("context_overflow")

    def drop(self, auxiliary: Collection[int], unheard: Collection[int]) -> None:
        gone = self._history.drop({*auxiliary, *unheard})
        self.auxiliary = len(gone & set(auxiliary))
        self.dropped = len(gone) - self.auxiliary

    def end(self, stop: StopReason) -> None:
        if not self._closed:
            self.stop = self.stop or stop

    async def close(self) -> None:
        """Refuse further turns, and cancel what tasks that the user's code left behind are doing here."""
        self._closed = True
        for task in set(self._working.values()):
            task.cancel()
        if self._working:
            await asyncio.wait(list(self._working), timeout=_CLOSE_SECONDS)

    def sample(self, score: Score | None = None, engine: str = "") -> Sample:
        """What was recorded; one turn on the prompt alone is a sample without turns. DataError: no sampled token."""
        turns = self._history.turns
        replies = [turn.completion for turn in turns if turn.completion is not None]
        if not replies:
            why = self.clock.late or self.stop or "it has no reply that is kept"
            line = self._order.prompt.line
            raise DataError(f"the episode of line {line} of the data set ended without a single sampled token: {why}")
        runs: list[tuple[int, int]] = []
        begin = 0
        for reply in replies:
            runs = join_runs(runs, begin, reply.runs)
            begin += len(reply.tokens)
        stop = self.stop or "completed"
        plain = len(turns) == 1 and turns[0].parent == PROMPT and turns[0].reward is None
        plain = plain and not (self.journal.replayed or self.journal.restarts) and stop in ("completed", "max_tokens")
        images = [name for turn in turns for name in turn.media]
        return Sample(
            v=1 if plain else wire.SCHEMA if images else wire.TURNS,
            tokens=wire.pack_int32(np.concatenate([reply.tokens for reply in replies])),
            logprobs=wire.pack_float32(np.concatenate([reply.logprobs for reply in replies])),
            runs=runs,
            finish=replies[-1].finish,
            text=[turn.text for turn in turns if turn.sampled][-1],
            engine=engine,
            seconds=sum(reply.seconds for reply in replies),
            greedy=self._order.greedy,
            turns=[] if plain else self._history.wire(),
            stop=None if plain else stop,
            replayed=self.journal.replayed,
            restarts=self.journal.restarts,
            dropped=self.dropped,
            auxiliary=self.auxiliary,
            score=None if score is None else SampleScore(value=score.value, parts=dict(score.parts)),
            blobs=self.images.travelling(images),
        )

    # --- one turn -----------------------------------------------------------------------------------------------------

    async def _begin_turn(
        self, messages: Sequence[Message], tools: Sequence[ToolSchema], max_tokens: int | None
    ) -> _OpenTurn:
        most = self._config.episode.max_sampled_tokens
        while True:
            place = self._history.place(messages, tools)
            open_turn = _OpenTurn(place, *self._longest(place, max_tokens))
            self._check_limits(place)
            reserved = sum(other.longest for other in self._open_turns)
            if most is None or not reserved or open_turn.longest <= most - self._tokens - reserved:
                break
            self._turn_ended.clear()
            async with self.part("model"):  # others have reserved what this one may need, and seldom use all of it
                await self._turn_ended.wait()
            self._check_open()
        self._open_turns.add(open_turn)
        self._turns += 1
        return open_turn

    def _longest(self, place: NextTurn, max_tokens: int | None) -> tuple[int, StopReason]:
        longest, most = self._longest_reply, self._config.episode.max_sampled_tokens
        context = self._config.model.context
        room = context - len(place.ids)
        self.overflowed = room < 1
        if self.overflowed:
            raise ContextOverflow(len(place.ids), context)
        wanted = min(max_tokens or longest, longest)
        limits: list[tuple[int, StopReason]] = [(wanted, "max_tokens"), (room, "context_overflow")]
        if most is not None:
            if self._tokens >= most:
                self._over("max_sampled_tokens", f"it sampled {self._tokens} tokens (max_sampled_tokens {most})")
            limits.append((most - self._tokens, "max_sampled_tokens"))
        return min(limits, key=lambda limit: limit[0])

    def _check_open(self) -> None:
        if self.fault is not None or self._closed or self.stop is not None:
            self._refused = True
            raise self.fault or EpisodeOver(self.stop or "completed")

    @asynccontextmanager
    async def _owned(self) -> AsyncIterator[None]:
        """Let `close` cancel this block, which runs in a task of the user's code."""
        if self._closed:
            raise EpisodeOver(self.stop or "completed")
        task, left = asyncio.current_task(), asyncio.get_running_loop().create_future()
        assert task is not None
        self._working[left] = task
        try:
            yield
        finally:
            del self._working[left]
            left.set_result(None)

    def _check_limits(self, place: NextTurn) -> None:
        episode, room = self._config.episode, wire.MAX_TURNS - len(self._history.turns) - 2 * len(self._open_turns)
        if self._turns >= episode.max_turns or room < 2:
            self._over("max_turns", f"it has {self._turns} turns (episode.max_turns {episode.max_turns})")
        forks = self._history.forks_with([place, *(open_turn.place for open_turn in self._open_turns)])
        if forks > episode.max_forks:
            self._over("max_turns", f"it forked {forks - 1} times (episode.max_forks {episode.max_forks})")
        self.check_calls()

    def _over(self, stop: StopReason, why: str) -> None:
        self.end(stop)
        raise EpisodeOver(stop, f"the episode ended: {why}")

    async def _completion(
        self, place: NextTurn, longest: int, own: Mapping[str, Any], key: bytes
    ) -> tuple[Completion, StopTexts]:
        """What the journal has for this conversation, else what the engine samples; what texts may have ended it."""
        number = next(self._numbers)
        options = self._order.drawn(self._config, number) | dict(own)
        options["stop"] = tuple(options["stop"])
        if self._order.greedy:
            options["temperature"] = 0.0
        ends = StopTexts(options["stop"], self._all_text, options["min_tokens"])

        async def sampled() -> Completion:
            return ends.cut(await self._generate(place, longest, number, options))

        async with self._faults(schema="json_schema" in own):
            completion = await self.journal.reply(key, sampled)
        self._tokens += len(completion.tokens)
        return completion, ends

    @asynccontextmanager
    async def _faults(self, *, schema: bool = False) -> AsyncIterator[None]:
        """Keep errors of the engine and the ledger; one that refuses a `schema`, which may not compile, is no fault."""
        try:
            yield
        except EpisodeOver:
            raise
        except Exception as error:
            if schema and isinstance(error, DataError) and not isinstance(error, DeadlyRequest):
                raise DataError(f"`response_format`: the engine refuses the call: {error.message}") from error
            self.fault = error
            raise

    def _all_text(self, tokens: Sequence[int]) -> str:
        return self._tokenizer.decode(tokens, special=True)

    async def _generate(self, place: NextTurn, longest: int, number: int, options: dict[str, Any]) -> Completion:
        sticky = self._config.episode.prefix_cache == "sample"
        self._version = self._version or self._engine.load().version
        request = Request(
            id=f"{self._order.id}-{number}",
            tokens=place.ids,
            max_new_tokens=longest,
            **options,
            affinity=f"{self._order.affinity}/{self._order.id}",
            cache_version=(self._version or None) if sticky else None,
            **self.images.of_request(place.ids, place.images),
        )
        self.generating += 1
        try:
            async with self.part("model"):
                completion = await self._engine.generate(request)
        finally:
            self.generating -= 1
        if completion.finish == "abort":
            raise RuntimeError("the engine aborted the request")
        return _up_to_stop(completion, self._renderer.stops)

    def _uses(self, place: NextTurn) -> list[ToolUse]:
        calls = [call for message in place.messages for call in message.get("tool_calls") or ()]
        names = {call.get("id"): (call.get("function") or {}).get("name") for call in calls}
        uses = []
        for message in place.messages[place.agreed :]:
            if message.get("role") == "tool":
                call_id = message.get("tool_call_id")
                name = names.get(call_id) or message.get("name") or ""
                uses.append(self._noted.pop(str(call_id), ToolUse(name=str(name)[:256])))
        return uses

    def _away(self, place: NextTurn, now: float) -> float:
        before = self._history.turns[place.parent] if place.parent >= 0 else None
        return now - before.ended_at if before is not None and before.sampled else 0.0


async def together(calls: Iterable[Coroutine[Any, Any, _T]]) -> list[_T]:
    with unwrapped():
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(call) for call in calls]
    return [task.result() for task in tasks]


def _up_to_stop(completion: Completion, stops: frozenset[int]) -> Completion:
    """A turn ends with the first token that ends one, also where the engine knows fewer of them."""
    at = next((at for at, token in enumerate(completion.tokens.tolist()) if token in stops), None)
    return completion if at is None else replace(first_tokens(completion, at + 1), finish="stop")
