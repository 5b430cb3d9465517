"""A response that is written on several servers: what there is of it, what is still to be asked for, and the whole."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from streamrl.engine import Completion, Finish, Request, Runs


def join_runs(before: Runs, count: int, after: Runs) -> Runs:
    """Runs of `count` tokens followed by those of another piece; the same version on both sides is one run."""
    joined = [*before, *((first + count, version) for first, version in after)]
    return [run for at, run in enumerate(joined) if at == 0 or run[1] != joined[at - 1][1]]


class Prefix:
    """What was sampled so far for one request, on servers that it has left.

    Args:
        request: as the caller gave it.
        stops: tokens that end a response.
        context: longest prompt plus response in tokens.
    """

    def __init__(self, request: Request, stops: frozenset[int], context: int) -> None:
        self._request = request
        self._stops = stops
        self._room = min(request.max_new_tokens, context - len(request.tokens))
        self._tokens: list[int] = []
        self._logprobs: list[float] = []
        self._runs: Runs = []

    def __len__(self) -> int:
        return len(self._tokens)

    @property
    def version(self) -> int:
        """Version of the last token; -1 without one. Versions never go back, so older servers may not go on with it."""
        return self._runs[-1][1] if self._runs else -1

    def add(self, tokens: Sequence[int], logprobs: Sequence[float], runs: Runs, proved: int) -> int:
        """Add a piece that a server left behind, up to the token whose version is sure; return how many were added.

        A piece goes no further than the first token that ends the response.

        Args:
            tokens: sampled for what `rest` asked.
            logprobs: one for each.
            runs: of this piece.
            proved: leading tokens whose version is sure.
        """
        count = min(len(tokens), len(logprobs), proved, max(0, self._room - len(self._tokens)))
        count = next((at + 1 for at, token in enumerate(tokens[:count]) if token in self._stops), count)
        self._runs = join_runs(self._runs, len(self._tokens), [run for run in runs if run[0] < count])
        self._tokens += map(int, tokens[:count])
        self._logprobs += map(float, logprobs[:count])
        return count

    @property
    def finish(self) -> Finish | None:
        """Why nothing is left to be sampled; None when something is."""
        if self._tokens and self._tokens[-1] in self._stops:
            return "stop"
        return "length" if self._tokens and len(self._tokens) >= self._room else None

    def rest(self) -> Request:
        """What the next server is asked for: prompt and prefix as its prompt, and the tokens that are left."""
        if not self._tokens:
            return self._request
        prompt = np.concatenate([self._request.tokens, np.asarray(self._tokens, dtype=np.int32)])
        return replace(self._request, tokens=prompt, max_new_tokens=self._request.max_new_tokens - len(self._tokens))

    def ended(self, finish: Finish, seconds: float) -> Completion:
        """The prefix alone as the completion."""
        return Completion(
            tokens=np.asarray(self._tokens, dtype=np.int32),
            logprobs=np.asarray(self._logprobs, dtype=np.float32),
            runs=list(self._runs),
            finish=finish,
            prompt_tokens=len(self._request.tokens),
            seconds=seconds,
        )

    def completed(self, last: Completion, seconds: float) -> Completion:
        """The prefix with the completion of `rest` behind it."""
        if not self._tokens:
            return replace(last, seconds=seconds)
        return Completion(
            tokens=np.concatenate([np.asarray(self._tokens, dtype=np.int32), last.tokens]),
            logprobs=np.concatenate([np.asarray(self._logprobs, dtype=np.float32), last.logprobs]),
            runs=join_runs(self._runs, len(self._tokens), last.runs),
            finish=last.finish,
            prompt_tokens=len(self._request.tokens),
            seconds=seconds,
        )
