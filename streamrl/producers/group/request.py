"""A request that moves between servers: what was sampled of it so far, and what is still to be asked for."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from typing import Final

import numpy as np

from streamrl.engine import Completion, Finish, Request, Runs
from streamrl.errors import DataError, Unreachable
from streamrl.producers.group.flights import ServerDied

ALONE: Final = 2
"""Servers that died under a request before it gave a single token; after so many it is tried on a server of its own."""
BREAKS: Final = 3
"""Times in a row that a response may break off without a token."""


def join_runs(before: Runs, count: int, after: Runs) -> Runs:
    """Runs of `count` tokens followed by those of another piece; the same version on both sides is one run."""
    joined = [*before, *((first + count, version) for first, version in after)]
    return [run for at, run in enumerate(joined) if at == 0 or run[1] != joined[at - 1][1]]


def first_tokens(piece: Completion, count: int) -> Completion:
    if count >= len(piece.tokens):
        return piece
    runs = [run for run in piece.runs if run[0] < count]
    return replace(piece, tokens=piece.tokens[:count], logprobs=piece.logprobs[:count], runs=runs)


class PartialResponse:
    """What was sampled so far for one request, in pieces; `stops` end it, and so does a full `context`."""

    def __init__(self, request: Request, stops: frozenset[int], context: int) -> None:
        self._request = request
        self._stops = stops
        self._limit = min(request.max_new_tokens, context - len(request.tokens))
        self._tokens = np.zeros(0, dtype=np.int32)
        self._logprobs = np.zeros(0, dtype=np.float32)
        self._runs: Runs = []
        self._cached: int | None = None  # of the first piece: later ones begin with what was sampled here

    def __len__(self) -> int:
        return len(self._tokens)

    async def complete(self, ask: Callable[[Request], Awaitable[Completion | None]]) -> Completion:
        """Ask for the rest after every abort until the response has ended; `ask` returns None to end it as it is."""
        loop = asyncio.get_running_loop()
        start = loop.time()
        while (piece := await ask(self.rest())) is not None:
            if piece.finish != "abort":
                return self.joined(piece, loop.time() - start)
            self.add(piece)
            if self.finish is not None:
                return self.ended(self.finish, loop.time() - start)
        return self.ended("abort", loop.time() - start)

    @property
    def version(self) -> int:
        """Version of the last token; -1 without one. Versions never go back, so an older server may not continue it."""
        return self._runs[-1][1] if self._runs else -1

    @property
    def finish(self) -> Finish | None:
        """Why the response is complete; None when tokens are left to sample."""
        if len(self) and int(self._tokens[-1]) in self._stops:
            return "stop"
        return "length" if len(self) and len(self) >= self._limit else None

    def add(self, piece: Completion) -> None:
        tokens = piece.tokens[: max(0, self._limit - len(self))].tolist()
        count = next((at + 1 for at, token in enumerate(tokens) if token in self._stops), len(tokens))
        whole = self.joined(first_tokens(piece, count), 0.0)
        self._tokens, self._logprobs, self._runs = whole.tokens, whole.logprobs, whole.runs
        self._cached = whole.cached_tokens

    def rest(self) -> Request:
        request, seed = self._request, self._request.seed
        return replace(
            request,
            tokens=np.concatenate([request.tokens, self._tokens]),
            max_new_tokens=request.max_new_tokens - len(self),
            min_tokens=max(0, request.min_tokens - len(self)),
            # Another server would draw the numbers again that the first tokens were drawn with.
            seed=None if seed is None else seed + len(self),
        )

    def joined(self, last: Completion, seconds: float) -> Completion:
        return replace(
            last,
            tokens=np.concatenate([self._tokens, last.tokens]),
            logprobs=np.concatenate([self._logprobs, last.logprobs]),
            runs=join_runs(self._runs, len(self), last.runs),
            prompt_tokens=len(self._request.tokens),
            seconds=seconds,
            cached_tokens=last.cached_tokens if self._cached is None else self._cached,
        )

    def ended(self, finish: Finish, seconds: float) -> Completion:
        return Completion(
            tokens=self._tokens,
            logprobs=self._logprobs,
            runs=list(self._runs),
            finish=finish,
            prompt_tokens=len(self._request.tokens),
            seconds=seconds,
            cached_tokens=self._cached or 0,
        )


class RoutedRequest:
    """A request in a group, from `generate` to its completion, on however many servers."""

    def __init__(self, request: Request, stops: frozenset[int], context: int) -> None:
        self.request = request
        self.partial = PartialResponse(request, stops, context)  # only tokens whose version is sure
        self.aborting = False  # the caller wants its end
        self.sampled = 0  # includes tokens that were lost with a server
        self._deaths = 0
        self._breaks = 0
        self._here = 0

    @property
    def alone(self) -> bool:
        """Whether servers died of it, so that it must not share a server with other requests."""
        return self._deaths >= ALONE

    @property
    def over(self) -> bool:
        return self.aborting or self._breaks >= BREAKS

    def tokens(self, expected: float) -> int:
        """Tokens that it occupies on a server: the prompt, and the expected response or the present one when longer."""
        ahead = min(self.request.max_new_tokens, round(expected))
        return len(self.request.tokens) + max(ahead, len(self.partial) + self._here)

    def begin(self) -> None:
        self._here = 0

    def hear(self, tokens: Sequence[int], logprobs: Sequence[float]) -> None:
        del logprobs
        self._here += len(tokens)
        self.sampled += len(tokens)

    def came(self, piece: Completion) -> None:
        """A server is done with it; some servers report their tokens only now."""
        self.sampled += max(0, len(piece.tokens) - self._here)

    def died(self, error: Unreachable) -> Completion:
        """Its server died: return the tokens whose version is sure. `DataError` when servers die of this request."""
        heard = error if isinstance(error, ServerDied) else ServerDied(error.message)
        piece = Completion(
            tokens=np.asarray(heard.tokens, dtype=np.int32),
            logprobs=np.asarray(heard.logprobs, dtype=np.float32),
            runs=heard.runs,
            finish="abort",
            prompt_tokens=len(self.request.tokens),
            seconds=0.0,
        )
        alone = self.alone
        self._deaths = 0 if heard.tokens and heard.proved else self._deaths + 1
        if alone and self._deaths:
            raise DataError(
                f"{self._deaths} servers died of request {self.request.id!r} before its first token, the last one"
                f" while running nothing else: {error.message}"
            )
        return first_tokens(piece, heard.proved)

    def broke_off(self, piece: Completion) -> Completion:
        """A server that is alive ended it without being asked to: return the tokens whose version is sure.

        The request continues until that has brought no token for `BREAKS` times in a row. Where the server could not
        say which version sampled what, only the tokens up to the first change of the weights are sure.
        """
        sure = first_tokens(piece, next((first for first, _ in piece.runs[1:]), len(piece.tokens)))
        self._breaks = 0 if len(sure.tokens) else self._breaks + 1
        return sure
