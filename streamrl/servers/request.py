"""One response of a server: its call, and its stream, read into a `Completion`."""

from __future__ import annotations

import asyncio
import uuid
from contextlib import aclosing, suppress
from dataclasses import dataclass, field, replace

import numpy as np

from streamrl.engine import Completion, Finish, Request, RequestLimits, Runs
from streamrl.errors import DataError, StreamrlError, WireError
from streamrl.http import Call, HttpClient, Lost
from streamrl.servers.dialect import Chunk, Dialect

UNKNOWN_VOCABULARY = 1 << 31  # token ids are 32 bits
_TAIL_SECONDS = 0.5  # for what a server says after the last token; the response is whole without it


@dataclass(slots=True)
class Response:
    """What has come of one response. `DataError`: the request can never be served.

    `version` is that of the server when it was asked; with an `adapter` it is that of all tokens, because a server
    samples them with the one that the request names, and names no version for it. `salt`: of this life of the server.
    """

    request: Request
    limits: RequestLimits
    version: int
    salt: str = ""
    adapter: str = ""
    wire_id: str = field(default_factory=lambda: uuid.uuid4().hex)  # of one length because SGLang aborts by prefix
    longest: int = field(init=False)
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    cached: int | None = None

    def __post_init__(self) -> None:
        self.longest = self.limits.check(self.request)

    def call(self, dialect: Dialect) -> Call:
        wanted = replace(self.request, id=self.wire_id, max_new_tokens=self.longest)
        return dialect.generation(wanted, version=self.version, salt=self.salt, adapter=self.adapter or None)

    def add(self, chunk: Chunk) -> None:
        ours = len(self.request.tokens)
        if self.request.images and chunk.prompt_tokens not in (None, ours):
            what = f"the server counts {chunk.prompt_tokens} tokens in a prompt with images, streamrl {ours}"
            hint = "its image processor has other settings: give it the same model and model.image_processor"
            raise DataError(what, hint)
        self.tokens += chunk.tokens
        self.logprobs += chunk.logprobs
        if self.cached is None:  # a server that puts a request back may count anew
            self.cached = chunk.cached_tokens

    def completion(self, finish: Finish, runs: Runs | None, seconds: float) -> Completion:
        name = f"request {self.request.id!r}"
        tokens = np.asarray(self.tokens, dtype=np.int64)
        if not len(tokens):
            raise WireError(f"{name} ended ({finish}) without a token")
        if tokens.min() < 0 or tokens.max() >= self.limits.vocabulary:
            raise WireError(f"{name}: sampled a token outside the vocabulary of {self.limits.vocabulary}")
        return Completion(
            tokens=tokens.astype(np.int32),
            logprobs=np.asarray(self.logprobs, dtype=np.float32),
            runs=[(0, self.version)] if runs is None or self.adapter else runs,
            finish=finish,
            seconds=seconds,
            cached_tokens=min(self.cached or 0, len(self.request.tokens)),
        )


async def read_response(client: HttpClient, dialect: Dialect, response: Response, *, seconds: float) -> Completion:
    """Ask for a response and read its stream, without a deadline; `seconds` limit how long the server may refuse it."""
    loop = asyncio.get_running_loop()
    began = loop.time()
    async with aclosing(client.stream(response.call(dialect), seconds)) as messages:
        async for message in messages:
            chunk = dialect.chunk(message, received=len(response.tokens))
            response.add(chunk)
            if chunk.finish is None:
                continue
            if chunk.finish == "abort":
                break
            took = loop.time() - began
            with suppress(TimeoutError, StreamrlError):
                async with asyncio.timeout(_TAIL_SECONDS):
                    async for tail in messages:  # to the end, so that the connection can be used again
                        counts = dialect.chunk(tail, received=len(response.tokens))  # vLLM tells them last
                        response.add(Chunk(cached_tokens=counts.cached_tokens))
            return response.completion(chunk.finish, chunk.runs, took)
    raise Lost(f"{client.url} gave up a response")
