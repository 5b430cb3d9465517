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
    """The server died while it answered a request; what had been heard until then is not lost.

    The boundaries in `runs` are those observed when the server was told to resume after an update: a server that
    collects tokens before it sends them (`engine.stream_interval`) may have sampled the first few of a run before.

    Attributes:
        tokens: sampled and heard before the death, one log-probability each; empty when it had not begun.
        logprobs: as sampled.
        runs: `[(first token, version), ...]`, empty when no token.
        proved: leading tokens whose version is sure: all that were heard before the first change of the weights.
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
    """One request from `generate` to its completion.

    Attributes:
        request: as the caller gave it.
        wire_id: its name at the server: unique for ever and of one length, since SGLang aborts by prefix.
        outcome: the completion, or what ended it.
        sent: it is at the server.
        aborting: its end was asked for.
        adapter: the version that it was sent with, when that is an adapter: it samples all of its tokens.
        conversation: the task that speaks with the server about it.
    """

    def __init__(self, request: Request, wire_id: str, listener: Listener | None, now: float) -> None:
        self.request = request
        self.wire_id = wire_id
        self.outcome: asyncio.Future[Completion] = asyncio.get_running_loop().create_future()
        self.sent = False
        self.aborting = False
        self.adapter: str | None = None
        self.conversation: asyncio.Task[None] | None = None
        self._listener = listener
        self._began = now
        self._tokens: list[int] = []
        self._logprobs: list[float] = []
        self._runs: Runs = []
        self._proved: int | None = None

    @property
    def heard(self) -> int:
        """Tokens so far."""
        return len(self._tokens)

    def send(self, version: int, adapter: str | None = None) -> None:
        """Note that it goes to the server, which is at this version; `adapter` is its name when it is one."""
        self.sent, self.adapter = True, adapter
        self._runs = [(0, version)]

    def turn(self, version: int) -> None:
        """Note that what is heard from now on comes from another version."""
        if not self.sent:
            return
        # What the server has sampled and not sent yet is still of the version before.
        self._proved = self.heard if self._proved is None else self._proved
        if self._runs[-1][0] == self.heard:
            self._runs.pop()
        self._runs.append((self.heard, version))

    def hear(self, chunk: Chunk) -> None:
        """Take what a message brought, and tell the listener.

        Raises:
            WireError: tokens and log-probabilities that do not fit each other or are not finite.
        """
        if len(chunk.tokens) != len(chunk.logprobs):
            raise WireError(
                f"request {self.request.id!r}: {len(chunk.tokens)} tokens with {len(chunk.logprobs)} log-probabilities"
            )
        if not all(map(math.isfinite, chunk.logprobs)):
            raise WireError(f"request {self.request.id!r}: a log-probability is not finite")
        if chunk.tokens and not self.outcome.done():
            self._tokens += chunk.tokens
            self._logprobs += chunk.logprobs
            if self._listener is not None:
                self._listener(chunk.tokens, chunk.logprobs)

    def land(self, finish: Finish, now: float, runs: Runs | None = None, vocabulary: int | None = None) -> bool:
        """Complete it with what was heard; return whether it still waited.

        An abort that comes without runs keeps the tokens whose version is sure: those heard before the first change of
        the weights. What came after it may have been sampled before.

        Args:
            finish: why it ends.
            now: of the event loop.
            runs: as the server tells them; None: as observed.
            vocabulary: tokens must be below it.

        Raises:
            WireError: runs that are none, tokens outside the vocabulary, or none at all without an abort.
        """
        if self.outcome.done():
            return False
        if runs is None and finish == "abort" and self._proved is not None:
            del self._tokens[self._proved :], self._logprobs[self._proved :]
        count = self.heard
        known = self._observed() if runs is None else runs
        if runs is not None and not _are_runs(runs, count):
            raise WireError(f"request {self.request.id!r}: {runs} are no runs of {count} tokens")
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
            )
        )
        return True

    def hang_up(self) -> None:
        """End the conversation; most servers take that as an abort too."""
        if self.conversation is not None:
            self.conversation.cancel()

    def fail(self, error: Exception) -> None:
        """End it with an error; a repeat does nothing."""
        if not self.outcome.done():
            self.outcome.set_exception(error)

    def died(self, cause: Unreachable) -> ServerDied:
        """What its `generate` raises when the server dies."""
        return ServerDied(cause.message, cause.hint, self._tokens, self._logprobs, self._observed(), self._proved)

    def _observed(self) -> Runs:
        return [run for run in self._runs if run[0] < self.heard]


def _are_runs(runs: Runs, count: int) -> bool:
    if not count:
        return not runs
    starts, versions = [first for first, _ in runs], [version for _, version in runs]
    grow = all(a < b for a, b in itertools.pairwise(starts)) and versions == sorted(versions)
    return bool(runs) and starts[0] == 0 and starts[-1] < count and grow
