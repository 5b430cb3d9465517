"""Requests in flight at one server: what each has heard so far, and which version sampled which token."""

from __future__ import annotations

import asyncio
import itertools
import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from streamrl.engine import Completion, Finish, Listener, Request, Runs
from streamrl.errors import Unreachable, WireError
from streamrl.servers.dialect import Chunk


class ServerDied(Unreachable):
    """The server died while it answered a request; carries what had been heard until then.

    The boundaries in `runs` are those observed when the server was told to resume after an update. A server that
    collects tokens before it sends them (`engine.stream_interval`) may have sampled the first few of a run before.
    `proved` counts the leading tokens whose version is sure: those heard before the first change of the weights.
    """

    def __init__(  # noqa: PLR0917 - errors take positional arguments only, so that they can be copied
        self,
        message: str,
        hint: str = "",
        tokens: Sequence[int] = (),
        logprobs: Sequence[float] = (),
        runs: Sequence[tuple[int, int]] = (),
        proved: int | None = None,
    ) -> None:
        super().__init__(message, hint)
        self.proved = len(tokens) if proved is None else proved
        self.tokens = list(tokens)
        self.logprobs = list(logprobs)
        self.runs: Runs = list(runs)

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.message, self.hint, self.tokens, self.logprobs, self.runs, self.proved)


class InFlightRequest:
    """One request at one server, from `generate` to its completion."""

    def __init__(self, request: Request, wire_id: str, listener: Listener | None, now: float) -> None:
        self.request = request
        self.wire_id = wire_id  # never used twice, and of one length because SGLang aborts by prefix
        self.outcome: asyncio.Future[Completion] = asyncio.get_running_loop().create_future()
        self.sent = False
        self.aborting = False
        self.adapter: str | None = None  # sent with this version, an adapter, which samples all of its tokens
        self.conversation: asyncio.Task[None] | None = None
        self._listener = listener
        self._began = now
        self._tokens: list[int] = []
        self._logprobs: list[float] = []
        self._runs: Runs = []
        self._proved: int | None = None
        self._cached: int | None = None

    @property
    def heard(self) -> int:
        return len(self._tokens)

    def send(self, version: int, adapter: str | None = None) -> None:
        self.sent, self.adapter = True, adapter
        self._runs = [(0, version)]

    def turn(self, version: int) -> None:
        """Tokens heard from now on come from another version."""
        if not self.sent:
            return
        # Tokens that the server has sampled and not sent yet still belong to the version before.
        self._proved = self.heard if self._proved is None else self._proved
        if self._runs[-1][0] == self.heard:
            self._runs.pop()
        self._runs.append((self.heard, version))

    def hear(self, chunk: Chunk) -> None:
        """Take the tokens of a message and pass them on; `WireError` for unequal counts, infinite log-probabilities."""
        if len(chunk.tokens) != len(chunk.logprobs):
            raise WireError(
                f"request {self.request.id!r}: {len(chunk.tokens)} tokens with {len(chunk.logprobs)} log-probabilities"
            )
        if not all(map(math.isfinite, chunk.logprobs)):
            raise WireError(f"request {self.request.id!r}: a log-probability is not finite")
        self.hear_counts(chunk)
        if chunk.tokens and not self.outcome.done():
            self._tokens += chunk.tokens
            self._logprobs += chunk.logprobs
            if self._listener is not None:
                self._listener(chunk.tokens, chunk.logprobs)

    def hear_counts(self, chunk: Chunk) -> None:
        """Keep what was cached as the server said it first: one that puts a request back may count anew."""
        self._cached = chunk.cached_tokens if self._cached is None else self._cached

    def land(self, finish: Finish, now: float, runs: Runs | None = None, vocabulary: int | None = None) -> bool:
        """Complete it with what was heard; return whether it still waited.

        An abort without runs keeps only the tokens whose version is sure: those heard before the first change of the
        weights. `runs`: as the server tells them; None: as observed. `WireError`: bad runs, tokens at or above
        `vocabulary`, or no tokens without an abort.
        """
        if self.outcome.done():
            return False
        if runs is None and finish == "abort" and self._proved is not None:
            del self._tokens[self._proved :], self._logprobs[self._proved :]
        count = self.heard
        known = self._observed() if runs is None else runs
        if runs is not None and not _are_runs(runs, count):
            raise WireError(f"request {self.request.id!r}: {runs} are not the runs of {count} tokens")
        if not count and finish != "abort":
            raise WireError(f"request {self.request.id!r} ended ({finish}) without a token")
        tokens = np.asarray(self._tokens, dtype=np.int64)
        if count and (tokens.min() < 0 or tokens.max() >= (vocabulary or 1 << 31)):
            raise WireError(f"request {self.request.id!r}: sampled a token outside the vocabulary of {vocabulary}")
        self.outcome.set_result(
            Completion(
                tokens=tokens.astype(np.int32),
                logprobs=np.asarray(self._logprobs, dtype=np.float32),
                runs=known,
                finish=finish,
                prompt_tokens=len(self.request.tokens),
                seconds=now - self._began,
                cached_tokens=min(self._cached or 0, len(self.request.tokens)),
            )
        )
        return True

    def hang_up(self) -> None:
        """Close the connection; most servers take that as an abort too."""
        if self.conversation is not None:
            self.conversation.cancel()

    def fail(self, error: Exception) -> None:
        if not self.outcome.done():
            self.outcome.set_exception(error)

    def died(self, cause: Unreachable) -> ServerDied:
        return ServerDied(cause.message, cause.hint, self._tokens, self._logprobs, self._observed(), self._proved)

    def _observed(self) -> Runs:
        return [run for run in self._runs if run[0] < self.heard]


def _are_runs(runs: Runs, count: int) -> bool:
    if not count:
        return not runs
    starts, versions = [first for first, _ in runs], [version for _, version in runs]
    grow = all(a < b for a, b in itertools.pairwise(starts)) and versions == sorted(versions)
    return bool(runs) and starts[0] == 0 and starts[-1] < count and grow
