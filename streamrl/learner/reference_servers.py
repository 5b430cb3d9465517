"""Log-probabilities of a frozen model, the reference policy or a teacher, from vLLM or SGLang servers.

Each response, or branch of an episode, is scored by one server, by another when that one fails. Both kinds score a
prompt: the sampled tokens go in as a part of it, and one more token, which is discarded, is sampled. Neither applies a
temperature to the log-probabilities of a prompt, so temperature 1 is the only one that fits.
"""

from __future__ import annotations

import asyncio
import logging
import math
import random
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, TypeAlias

import numpy as np

from streamrl.config import RunConfig
from streamrl.config.base import SERVER_KINDS, ServerKind
from streamrl.errors import ConfigError, DataError, StreamrlError, Unreachable, WireError, unwrap
from streamrl.http import BadRequest, Call, HttpClient, read_key
from streamrl.learner.batch import TrainSample
from streamrl.learner.ranks import Ranks
from streamrl.learner.tree import Span, spans
from streamrl.wire import Float32Array

MODELS: Final = Call("GET", "/v1/models", repeatable=True)
_LOWEST: Final = -9000.0
"""vLLM writes -9999 for a log-probability of minus infinity."""
_HIGHEST: Final = 1e-3
"""Greatest log-probability accepted: rounding stays below it, a server that answers with logits goes far beyond."""
_SPARE: Final[Mapping[str, int]] = {"vllm": 1, "sglang": 7}
"""Places of a server's context that no prompt may take: the token that it samples, and what SGLang keeps free."""
_SGLANG_LAST: Final = 0
"""Id that SGLang returns for the last token of its vocabulary; the value belongs to the right token."""


@dataclass(frozen=True, slots=True)
class About:
    kind: ServerKind
    model: str  # name under which it serves its model
    context: int | None  # most tokens of a request; None when it does not say

    @property
    def longest(self) -> int | None:
        return None if self.context is None else self.context - _SPARE[self.kind]


def read_about(answer: Any, url: str) -> About:
    """Parse the answer to `MODELS`; ConfigError when it is neither vLLM nor SGLang."""
    try:
        entry = next(entry for entry in answer["data"] if not entry.get("parent"))
        kind, model, context = entry["owned_by"], str(entry["id"]), entry.get("max_model_len")
    except (KeyError, TypeError, AttributeError, StopIteration) as error:
        raise ConfigError(
            f"learner.reference.url {url} lists no models as vLLM and SGLang do", "name servers of one of them"
        ) from error
    if kind not in SERVER_KINDS:
        raise ConfigError(f"learner.reference.url {url} is a server of {kind!r}", "name servers of vLLM or SGLang")
    return About(kind, model, context if isinstance(context, int) else None)


def scoring(about: About, span: Span) -> Call:
    ids = span.ids.tolist()
    if about.kind == "vllm":
        body: dict[str, Any] = {
            "model": about.model,
            "prompt": ids,
            "max_tokens": 1,
            "temperature": 0,
            "prompt_logprobs": 0,
        }
        return Call("POST", "/v1/completions", body, repeatable=True)
    body = {
        "input_ids": ids,
        "sampling_params": {"max_new_tokens": 1, "temperature": 0},
        "return_logprob": True,
        "logprob_start_len": int(span.at[0]) - 1,
    }
    return Call("POST", "/generate", body, repeatable=True)


def read_scores(about: About, answer: Any, span: Span) -> Float32Array:
    """Parse the answer to `scoring`: float32, shape (trained tokens of the span,)."""
    sent = span.ids[span.at[0] :].tolist()
    try:
        pairs = _vllm_pairs(answer, sent) if about.kind == "vllm" else _sglang_pairs(answer, len(sent))
        tokens, values = zip(*pairs, strict=True)
    except (LookupError, TypeError, ValueError, AttributeError) as error:
        raise WireError(f"no log-probabilities of a prompt in the answer of {about.kind}: {error!r}") from error
    unnamed = {_SGLANG_LAST} if about.kind == "sglang" else set()
    if any(said != token and said not in unnamed for said, token in zip(tokens, sent, strict=True)):
        raise WireError(f"{about.kind} answered with the log-probabilities of other tokens")
    # Observed tokens between actions may be impossible under the model; nobody reads their values.
    values = tuple(values[place] for place in (span.at - span.at[0]).tolist())
    if not all(math.isfinite(value) and _LOWEST < value < _HIGHEST for value in values):
        raise WireError(
            f"{about.kind} answered with a value that is no log-probability: {min(values)} to {max(values)}",
            "a token may be impossible under the reference, or the server returns logits",
        )
    return np.minimum(np.asarray(values, dtype=np.float32), 0)


def _vllm_pairs(answer: Any, tokens: Sequence[int]) -> list[tuple[int, float]]:
    entries: Sequence[Mapping[str, Any]] = answer["choices"][0]["prompt_logprobs"][-len(tokens) :]
    return [(token, float(entry[str(token)]["logprob"])) for token, entry in zip(tokens, entries, strict=True)]


def _sglang_pairs(answer: Any, count: int) -> list[tuple[int, float]]:
    entries = answer["meta_info"]["input_token_logprobs"][-count:]
    return [(int(entry[1]), float(entry[0])) for entry in entries]


logger = logging.getLogger(__name__)
Clients: TypeAlias = Mapping[str, HttpClient]
_IN_FLIGHT: Final = 32
"""Requests that one rank has at one server at the same time, on average."""
_FIRST_PAUSE: Final = 0.1
_LONGEST_PAUSE: Final = 2.0
_REST_SECONDS: Final = 10.0
"""Time for which a server that failed is asked last."""


class NoReference(Unreachable):
    """No server gave log-probabilities in time; on all ranks, and nothing was computed."""


@dataclass(slots=True)
class _Server:
    url: str
    about: About | None = None  # None before it was reached
    load: int = 0  # requests of this rank that wait for its answer
    failed_at: float = float("-inf")  # monotonic time of the last failure; minus infinity after a success
    failure: str = ""  # reason of that failure

    @property
    def rank(self) -> tuple[bool, int]:
        return time.monotonic() < self.failed_at + _REST_SECONDS, self.load


class Remote:
    """Log-probabilities under the model that servers hold (`learner.reference.kind: remote`).

    Each rank sends its own samples, over HTTP. When a server fails or is silent, the response goes to another one; what
    has no answer within `learner.reference.deadline` fails, on all ranks (NoReference).
    """

    def __init__(self, config: RunConfig, ranks: Ranks) -> None:
        reference = config.learner.reference
        self._ranks, self._deadline, self._context = ranks, reference.deadline, config.model.context
        self._key_file = reference.api_key_file
        self._servers = [_Server(url) for url in reference.url]
        self._together(self._look)

    def compute_ref_log_prob(self, batch: Sequence[TrainSample]) -> list[Float32Array]:
        """As `Reference` says; also DataError when servers refuse a response, WireError for unusable answers."""
        found = [np.zeros(0, dtype=np.float32) for _ in batch]
        self._together(lambda clients: self._score(clients, batch, found))
        return found

    def to_host(self) -> None:
        """It uses no device."""

    def to_device(self) -> None:
        """It uses no device."""

    def _together(self, work: Callable[[Clients], Awaitable[None]]) -> None:
        """Run `work` with connections to all servers; a failure on one rank is raised on all."""
        failure: StreamrlError | None = None
        try:
            asyncio.run(self._within(work))
        except StreamrlError as error:
            failure = error
        # 2: done; 1: may be tried again; 0: must not be tried again.
        outcome = 2 if failure is None else int(isinstance(failure, NoReference))
        (worst,) = self._ranks.all_min(outcome)
        if failure is not None and outcome == worst:
            raise failure
        if worst < 2:
            kind = NoReference if worst else StreamrlError
            raise kind("another rank got no reference log-probabilities", "its log says why")

    async def _within(self, work: Callable[[Clients], Awaitable[None]]) -> None:
        key = await asyncio.to_thread(read_key, "learner.reference.api_key_file", self._key_file)
        hint, option = "start the server, or name another at learner.reference.url", "learner.reference.api_key_file"
        clients = {server.url: HttpClient(server.url, key, hint, key_option=option) for server in self._servers}
        try:
            async with asyncio.timeout(self._deadline):
                await work(clients)
        except TimeoutError as error:
            said = "; ".join(server.failure or f"{server.url}: too slow" for server in self._servers)
            raise NoReference(
                f"no reference log-probabilities within {self._deadline:g} s: {said}",
                "start the servers at learner.reference.url, or raise learner.reference.deadline",
            ) from error
        except BaseExceptionGroup as group:
            raise unwrap(group) from group
        finally:
            for client in clients.values():
                await client.close()

    async def _look(self, clients: Clients) -> None:
        """Wait until one server has reported its model; all are asked in each round."""
        while True:
            reached = await asyncio.gather(*(self._reach(server, clients) for server in self._servers))
            if any(reached):
                return
            await asyncio.sleep(random.uniform(0, _LONGEST_PAUSE))  # noqa: S311

    async def _reach(self, server: _Server, clients: Clients) -> bool:
        try:
            about = await self._know(server, clients)
        except (Unreachable, WireError) as error:
            self._failed(server, error)
            return False
        logger.info("reference server", extra={"url": server.url, "kind": about.kind, "model": about.model})
        return True

    async def _know(self, server: _Server, clients: Clients) -> About:
        if server.about is None:
            answer = await clients[server.url].call(MODELS, self._patience, retry=False)
            about = read_about(answer, server.url)
            if about.longest is not None and about.longest < self._context:
                assert about.context is not None
                raise ConfigError(
                    f"the reference server {server.url} scores {about.longest} tokens at most: too few for"
                    f" model.context {self._context}",
                    f"start it with a context of {self._context + about.context - about.longest} or more",
                )
            server.about = about
        return server.about

    async def _score(self, clients: Clients, batch: Sequence[TrainSample], found: list[Float32Array]) -> None:
        gate = asyncio.Semaphore(_IN_FLIGHT * len(self._servers))

        async def one(index: int, span: Span) -> None:
            async with gate:
                found[index][span.targets] = await self._anyone(clients, span, batch[index].group_id)

        async with asyncio.TaskGroup() as tasks:
            for index, sample in enumerate(batch):
                found[index] = np.zeros(len(sample.tokens), dtype=np.float32)
                for span in spans(sample.tree, sample.prompt, sample.tokens):
                    tasks.create_task(one(index, span))

    async def _anyone(self, clients: Clients, span: Span, group_id: int) -> Float32Array:
        """Ask one server after the other until one answers, the deadline passes, or all gave invalid answers."""
        senseless: set[str] = set()
        pause = _FIRST_PAUSE
        while True:
            for server in sorted(self._servers, key=lambda server: server.rank):
                try:
                    return await self._ask(server, clients, span, group_id)
                except Unreachable as error:
                    self._failed(server, error)
                except WireError as error:
                    self._failed(server, error)
                    senseless.add(server.url)
                    if len(senseless) == len(self._servers):
                        raise
            await asyncio.sleep(random.uniform(pause / 2, pause))  # noqa: S311
            pause = min(2 * pause, _LONGEST_PAUSE)

    async def _ask(self, server: _Server, clients: Clients, span: Span, group_id: int) -> Float32Array:
        server.load += 1
        try:
            about = await self._know(server, clients)
            answer = await clients[server.url].call(scoring(about, span), self._patience, retry=False)
            scores = read_scores(about, answer, span)
        except BadRequest as error:
            raise DataError(
                f"group {group_id}: the reference server refuses a response: {error.message}",
                "does it hold a model with the vocabulary of model.path?",
            ) from error
        finally:
            server.load -= 1
        server.failed_at = float("-inf")
        return scores

    @property
    def _patience(self) -> float:
        """Longest wait for one answer: short enough that every server is asked before the deadline."""
        return self._deadline / (len(self._servers) + 1)

    def _failed(self, server: _Server, error: StreamrlError) -> None:
        if not server.rank[0]:
            logger.warning("reference server failed", extra={"url": server.url, "error": error.message})
        server.failed_at, server.failure = time.monotonic(), error.message
