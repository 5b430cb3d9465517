"""What a replica asks for one sample: a single turn here, an episode in `streamrl.producers.episodes.sampler`."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from hashlib import blake2b
from typing import Any, Self

from typing_extensions import override

from streamrl.config import RunConfig
from streamrl.config.sampling import OPTIONS
from streamrl.engine import Completion, Generator, Request
from streamrl.errors import DeadlineExceeded
from streamrl.images.store import ImageStore
from streamrl.producers.images import SampleImages
from streamrl.producers.stopping import StopTexts
from streamrl.producers.tokenizer import Tokenizer
from streamrl.queues import Lease
from streamrl.queues.records import RecordedTurns
from streamrl.wire import Prompt, Sample, pack_float32, pack_int32


class TurnJournal:
    """The finished turns of one sample of a leased prompt, in the ledger, so that another process can go on."""

    def __init__(self, lease: Lease, sample: int, progressed: Callable[[Lease], None]) -> None:
        self._lease, self._sample = lease, sample
        self.progressed = partial(progressed, lease)  # each finished turn, so that `lease.max_hold` counts from it
        self._next = 0
        self._writing = asyncio.Lock()

    async def recorded(self) -> RecordedTurns:
        left = await self._lease.ledger.read_journal(self._lease, self._sample)
        self._next = len(left.turns)
        return left

    async def turn(self, payload: bytes, state: bytes | None = None) -> None:
        """Keep one more payload, and `state` instead of an earlier one. Without effect for who lost the lease."""
        ledger, lease, sample = self._lease.ledger, self._lease, self._sample
        async with self._writing:
            while not await ledger.journal(lease, sample, self._next, payload, state):
                # There may be a turn whose writer was cancelled, or this one, if the first reply was lost.
                found = (await ledger.read_journal(lease, sample)).turns[self._next :]
                self._next += len(found)
                if payload in found or not found:
                    return
            self._next += 1

    async def forget(self) -> bool:
        """Remove all payloads. False, without effect: another process has the sample."""
        async with self._writing:
            self._next = 0
            return await self._lease.ledger.forget_journal(self._lease, self._sample)


@dataclass(frozen=True, slots=True)
class SampleOrder:
    prompt: Prompt
    id: str  # unique among the samples being made
    affinity: str = ""  # as in `Request`
    greedy: bool = False
    seed: str = ""  # names the random numbers that it is drawn with; empty: the engine's
    journal: TurnJournal | None = None  # None: outside of a run
    store: ImageStore | None = None  # of the large images; None: all of them travel

    def drawn(self, config: RunConfig, turn: int = 0) -> dict[str, Any]:
        draw = config.drawing(evaluation=self.prompt.evaluation)
        options = draw.model_dump(include=OPTIONS - {"max_new_tokens"})
        digest = blake2b(f"{self.seed}/{turn}".encode(), digest_size=7).digest()  # servers take 63 bits
        options["seed"] = int.from_bytes(digest) if self.seed else None
        return options | ({"temperature": 0.0} if self.greedy else {})


def seed_of(config: RunConfig, name: str, *, evaluation: bool) -> str:
    """What `SampleOrder.seed` is of the sample with this name."""
    seed = config.drawing(evaluation=evaluation).seed
    return "" if seed is None else f"{seed}/{name}"


class Sampler(ABC):
    """Makes samples with one engine, while it is open."""

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *error: object) -> None:
        return None

    @abstractmethod
    def capacity(self, slots: int) -> int:
        """How many samples to make at the same time with an engine that can decode `slots` requests; 0 for 0."""

    @abstractmethod
    async def sample(self, order: SampleOrder) -> Sample:
        """Make one sample; cancelling gives it up.

        `RetryLater`: no engine or program is available. `DataError`: this prompt can never be answered.
        `DeadlineExceeded`: it took too long. `Unreachable`: the engine died. Any other error is of the engine or of the
        user's code.
        """

    def figures(self) -> Mapping[str, int | float]:
        return {}

    def trouble(self) -> str:
        """What is wrong, in words, for `streamrl status`; empty: nothing."""
        return ""


class SingleTurn(Sampler):
    def __init__(self, config: RunConfig, engine: Generator, tokenizer: Tokenizer, name: str = "") -> None:
        self._config, self._engine, self._tokenizer, self._name = config, engine, tokenizer, name

    @override
    def capacity(self, slots: int) -> int:
        return slots

    @override
    async def sample(self, order: SampleOrder) -> Sample:
        options = order.drawn(self._config)
        stops = StopTexts(options["stop"], self._tokenizer.decode, options["min_tokens"])
        completion = stops.cut(await self._generate(order, options))
        tokens = completion.tokens.tolist()
        return Sample(
            tokens=pack_int32(completion.tokens),
            logprobs=pack_float32(completion.logprobs),
            runs=completion.runs,
            finish=completion.finish,
            text=stops.before(self._tokenizer.decode(tokens), tokens),
            engine=self._name,
            seconds=completion.seconds,
            greedy=order.greedy,
        )

    async def _generate(self, order: SampleOrder, options: dict[str, Any]) -> Completion:
        images = SampleImages(self._config, order.prompt, self._tokenizer.vision, order.store)
        await images.open()
        request = Request(
            id=order.id,
            tokens=order.prompt.token_ids,
            max_new_tokens=self._config.drawing(evaluation=order.prompt.evaluation).max_new_tokens,
            affinity=order.affinity,
            **options,
            **images.of_request(order.prompt.token_ids, order.prompt.images),
        )
        limit = self._config.lease.max_hold
        try:
            async with asyncio.timeout(limit):
                completion = await self._engine.generate(request)
        except TimeoutError as error:
            raise DeadlineExceeded(f"no response within lease.max_hold ({limit:g} s)") from error
        if completion.finish == "abort":
            raise RuntimeError("the engine aborted the request")
        return completion
