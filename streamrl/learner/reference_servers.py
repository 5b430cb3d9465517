"""Log-probabilities of a frozen model, the reference policy or a teacher, from vLLM or SGLang servers.

Each response, or branch of an episode, is scored by the least busy server, by another when that one fails or is silent.
No server applies a temperature to the log-probabilities of a prompt, so temperature 1 is the only one that fits.
"""

from __future__ import annotations

import asyncio
import logging
import math
import random
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, TypeAlias, TypeVar

import numpy as np

from streamrl.config import RunConfig
from streamrl.config.base import SERVER_KINDS
from streamrl.errors import ConfigError, DataError, StreamrlError, Unreachable, WireError, unwrapped
from streamrl.http import BadRequest, Call, HttpClient, read_key
from streamrl.learner.batch import TrainSample
from streamrl.learner.ranks import Ranks
from streamrl.learner.sharding import probe_of
from streamrl.learner.tree import Span, spans
from streamrl.servers.dialect import Dialect, read_probe
from streamrl.servers.kinds import DIALECTS
from streamrl.wire import Float32Array

logger = logging.getLogger(__name__)
_MODELS: Final = Call("GET", "/v1/models", repeatable=True)
_LOWEST: Final = -9000.0  # vLLM writes -9999 for a log-probability of minus infinity
_HIGHEST: Final = 1e-3
"""Greatest log-probability accepted: rounding stays below it, a server that answers with logits goes far beyond."""
_IN_FLIGHT: Final = 32  # requests that one rank has at one server at the same time, on average
_PAUSE: Final = 1.0  # longest pause before all servers are asked again
_REST_SECONDS: Final = 10.0  # time for which a server that failed is asked last


class NoReference(Unreachable):
    """No server gave log-probabilities in time; on all ranks, and nothing was computed."""


@dataclass(slots=True)
class _Server:
    url: str
    speaks: tuple[Dialect, str] | None = None  # with the name of its model; None before it was reached
    load: int = 0  # requests of this rank that wait for its answer
    rests_until: float = 0.0  # monotonic time
    failure: str = ""

    def failed(self, error: StreamrlError) -> None:
        if time.monotonic() > self.rests_until:
            logger.warning("reference server failed", extra={"url": self.url, "error": error.message})
        self.rests_until, self.failure = time.monotonic() + _REST_SECONDS, error.message


_T = TypeVar("_T")
Clients: TypeAlias = Mapping[str, HttpClient]


class ServerReference:
    """Each rank sends its own samples; what has no answer within the deadline fails, on all ranks (NoReference)."""

    def __init__(self, config: RunConfig, ranks: Ranks, vocabulary: int) -> None:
        self._config, self._ranks, self._vocabulary = config, ranks, vocabulary
        self._probe = probe_of(config.model)
        self._deadline = config.learner.reference.deadline
        self._servers = [_Server(url) for url in config.learner.reference.url]
        # Short enough that every server is asked before the deadline.
        self._patience = self._deadline / (len(self._servers) + 1)
        self._together(self._look)

    def compute_ref_log_prob(self, batch: Sequence[TrainSample]) -> list[Float32Array]:
        """DataError: servers refuse a response; WireError: unusable answers."""
        found = [np.zeros(len(sample.tokens), dtype=np.float32) for sample in batch]

        async def score(clients: Clients) -> None:
            gate = asyncio.Semaphore(_IN_FLIGHT * len(self._servers))

            async def one(index: int, span: Span) -> None:
                async with gate:
                    scores = await self._any_of(lambda server: self._ask(server, clients, span, batch[index].group_id))
                    found[index][span.targets] = scores

            async with asyncio.TaskGroup() as tasks:
                for index, sample in enumerate(batch):
                    for span in spans(sample.tree, sample.prompt, sample.tokens):
                        tasks.create_task(one(index, span))

        self._together(score)
        return found

    def to_host(self) -> None:
        """It uses no device."""

    def to_device(self) -> None:
        """It uses no device."""

    def _together(self, work: Callable[[Clients], Awaitable[object]]) -> None:
        """Run `work` with clients of all servers; a failure on one rank is raised on all."""
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

    async def _within(self, work: Callable[[Clients], Awaitable[object]]) -> None:
        option, hint = "learner.reference.api_key_file", "start the server, or name another at learner.reference.url"
        key = await asyncio.to_thread(read_key, option, self._config.learner.reference.api_key_file)
        clients = {server.url: HttpClient(server.url, key, hint, key_option=option) for server in self._servers}
        try:
            with unwrapped():
                async with asyncio.timeout(self._deadline):
                    await work(clients)
        except TimeoutError as error:
            said = "; ".join(server.failure or f"{server.url}: too slow" for server in self._servers)
            raise NoReference(
                f"no reference log-probabilities within {self._deadline:g} s: {said}",
                "start the servers at learner.reference.url, or raise learner.reference.deadline",
            ) from error
        finally:
            for client in clients.values():
                await client.close()

    async def _any_of(self, ask: Callable[[_Server], Awaitable[_T]]) -> _T:
        """Ask one server after the other until one answers; WireError when all answers make no sense."""
        while True:
            errors: list[StreamrlError] = []
            for server in sorted(self._servers, key=lambda each: (time.monotonic() < each.rests_until, each.load)):
                server.load += 1
                try:
                    answer = await ask(server)
                except (Unreachable, WireError) as error:
                    server.failed(error)
                    errors.append(error)
                else:
                    server.rests_until = 0.0
                    return answer
                finally:
                    server.load -= 1
            if all(isinstance(error, WireError) for error in errors):
                raise errors[-1]
            await asyncio.sleep(random.uniform(0, _PAUSE))  # noqa: S311

    async def _look(self, clients: Clients) -> None:
        """Return when one server is known; each that answers by then must fit."""
        found = await asyncio.gather(*(self._know(server, clients) for server in self._servers), return_exceptions=True)
        for error in found:
            if isinstance(error, ConfigError):
                raise error
        await self._any_of(lambda server: self._know(server, clients))

    async def _know(self, server: _Server, clients: Clients) -> tuple[Dialect, str]:
        """`ConfigError`: the server cannot score what the run samples."""
        if server.speaks is not None:
            return server.speaks
        answer = await clients[server.url].call(_MODELS, self._patience, retry=False)
        try:
            entry = next(entry for entry in answer["data"] if not entry.get("parent"))
            kind, model, context = entry["owned_by"], str(entry["id"]), entry.get("max_model_len")
        except (KeyError, TypeError, AttributeError, StopIteration):
            kind, model, context = "another kind", "", None
        if kind not in SERVER_KINDS:
            raise ConfigError(
                f"learner.reference.url {server.url} is a server of {kind!r}", "name servers of vLLM or SGLang"
            )
        dialect, needed = DIALECTS[kind](self._config), self._config.model.context
        if isinstance(context, int) and context - dialect.spare < needed:
            raise ConfigError(
                f"the reference server {server.url} scores {context - dialect.spare} tokens at most: too few for"
                f" model.context {needed}",
                f"start it with a context of {needed + dialect.spare} or more",
            )
        await self._check_tokens(clients[server.url], dialect, model)
        server.speaks = dialect, model
        logger.info("reference server", extra={"url": server.url, "kind": kind, "model": model})
        return server.speaks

    async def _check_tokens(self, client: HttpClient, dialect: Dialect, model: str) -> None:
        """Refuse a server to which the ids of the policy are other words, or none."""
        text, ours = self._probe or ("", [])
        body = {"model": model, "prompt": text, "add_special_tokens": False}
        call = Call("POST", "/tokenize", body, repeatable=True, optional=True)
        theirs = read_probe(await client.call(call, self._patience, retry=False)) if text else None
        if theirs is None:
            logger.info("tokenizers not compared", extra={"url": client.url, "reason": "one of the two has none"})
        elif list(theirs) != ours:
            raise ConfigError(
                f"the reference server {client.url} has another tokenizer than the policy: {text!r} is {theirs[:8]}..."
                f" there and {ours[:8]}... here",
                "start it with a model that has the tokenizer of model.path",
            )
        if dialect.kind != "vllm":
            return  # SGLang 0.5.23 dies of ids beyond its vocabulary
        try:
            await client.call(dialect.score(model, [0, self._vocabulary - 1], 1), self._patience, retry=False)
        except BadRequest as error:
            raise ConfigError(
                f"the reference server {client.url} knows fewer tokens than the policy, {self._vocabulary}:"
                f" {error.message}",
                "start it with a model that has the vocabulary of model.path",
            ) from error

    async def _ask(self, server: _Server, clients: Clients, span: Span, group_id: int) -> Float32Array:
        dialect, model = await self._know(server, clients)
        start, ids = int(span.at[0]), span.ids.tolist()
        try:
            answer = await clients[server.url].call(dialect.score(model, ids, start), self._patience, retry=False)
        except BadRequest as error:
            raise DataError(
                f"group {group_id}: the reference server refuses a response: {error.message}",
                "does it hold a model with the vocabulary of model.path?",
            ) from error
        # Observed tokens between actions may be impossible under the model; nobody reads their values.
        values = np.asarray(dialect.read_scores(answer, ids[start:]), dtype=np.float64)[span.at - start]
        if not all(math.isfinite(value) and _LOWEST < value < _HIGHEST for value in values):
            raise WireError(
                f"{server.url} answered with a value that is no log-probability: {values.min()} to {values.max()}",
                "a token may be impossible under the reference, or the server returns logits",
            )
        return np.minimum(values, 0).astype(np.float32)
