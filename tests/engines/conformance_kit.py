"""One engine of any kind on the tiny model, versions for it, and the judge of what it samples."""

from __future__ import annotations

import asyncio
import itertools
import shutil
from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import torch
from safetensors.torch import load_file, save_file

from streamrl.config import RunConfig
from streamrl.engine import Completion, Request
from streamrl.http import Lost
from streamrl.producers.engines.hf import HfEngine
from streamrl.servers.dialect import Chunk
from streamrl.servers.request import Response, read_response
from streamrl.servers.server import Server
from streamrl.weight_sync.tensors import Version
from tests.engines import tiny

Listener: TypeAlias = Callable[[Sequence[int], Sequence[float]], None]
"""Called with the tokens sampled since the last call and their log-probabilities."""
BF16 = 0.02
"""What a log-probability in bfloat16 may be off by."""
INTERVAL = 4
"""Tokens between two messages of a server."""
LONG = 16000
"""Tokens of a response that does not end before a test has done what it wants, however busy the machine is."""
SOON = 20.0
"""Deadline of what should take milliseconds, on two busy cores."""
LORA = {"rank": 4, "alpha": 8.0, "publish": "adapter"}
"""With it a server is started for adapters; it takes whole weights all the same."""

KEY = "of-all-tests"
"""That a server asks for, in words that no log of it has."""

_names = itertools.count()  # of all benches: two may ask the same server


def run_config(kind: str, folder: Path, *, lora: Mapping[str, Any] | None = None, **engine: Any) -> RunConfig:
    """A run on the tiny model in `folder`, which is made when it is not there."""
    if not (folder / "model").exists():
        tiny.make_model(folder / "model")
    return RunConfig.model_validate(
        {
            "name": "conformance",
            "model": {"path": str(folder / "model"), "context": tiny.CONTEXT},
            "sampling": {"max_new_tokens": LONG},
            "evaluation": {"stop": ["the end"]},  # so servers know texts
            "data": {"max_prompt_tokens": 256},
            "engine": {
                "kind": kind,
                "device": "cpu",
                "threads": 1,
                "dtype": "bfloat16",
                "slots": 64,
                "kv_cache": "512MiB",
                "stream_interval": INTERVAL,
                "start_deadline": 900,
                **engine,
            },
            "learner": {"lora": lora or {}},
            "weights": {"deadline": 20.0, "dtype": "bfloat16"},
            "supervisor": {"term_grace": 5, "backoff": 0.01, "max_backoff": 0.1},
        }
    )


def prompt(seed: int, length: int = 24) -> list[int]:
    """Tokens that mean nothing in particular."""
    source = np.random.default_rng(seed)
    return [int(token) for token in source.integers(tiny.FIRST_PLAIN, tiny.VOCABULARY, length)]


def write_version(folder: Path, number: int, tensors: dict[str, torch.Tensor], epoch: int = 1) -> Version:
    """Two files, as of a model that is larger than one."""
    place = folder / f"v-{epoch}-{number}"
    place.mkdir(parents=True)
    files = ("00000.safetensors", "00001.safetensors")
    names = list(tensors)
    for place_of, file in enumerate(files):
        save_file({name: tensors[name].contiguous() for name in names[place_of::2]}, place / file)
    whole = {name: tensor for file in files for name, tensor in load_file(place / file).items()}
    return Version((epoch, number), number, whole, place, files)


def spans(completion: Completion) -> list[tuple[int, int, int]]:
    """(first token, end, version), after a look that they are in order and make up the whole."""
    starts = [first for first, _ in completion.runs]
    numbers = [number for _, number in completion.runs]
    assert starts[0] == 0
    assert starts == sorted(set(starts))
    assert numbers == sorted(set(numbers))
    assert starts[-1] < len(completion.tokens) == len(completion.logprobs)
    return [
        (*span, number)
        for span, number in zip(itertools.pairwise([*starts, len(completion.tokens)]), numbers, strict=True)
    ]


class Heard:
    """A listener that knows how many tokens came, and lets a test wait for them."""

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self._news = asyncio.Event()

    def __call__(self, tokens: Sequence[int], logprobs: Sequence[float]) -> None:
        assert len(tokens) == len(logprobs)
        self.tokens.extend(tokens)
        self._news.set()

    async def at_least(self, count: int) -> int:
        """Return how many there are once there are so many."""
        async with asyncio.timeout(60):
            while len(self.tokens) < count:
                self._news.clear()
                await self._news.wait()
        return len(self.tokens)


class HeardResponse(Response):
    """A response that tells a listener what comes of it, and keeps its last message."""

    listener: Listener
    last: Chunk

    def add(self, chunk: Chunk) -> None:
        super().add(chunk)
        self.last = chunk
        self.listener(chunk.tokens, chunk.logprobs)


class HeardEngine(HfEngine):
    """An engine in this process of which a test hears what it samples."""

    async def generate(self, request: Request, listener: Listener | None = None) -> Completion:
        sampling = asyncio.create_task(super().generate(request))
        told, tokens = 0, tuple(request.tokens.tolist())
        try:
            while listener is not None and not sampling.done():
                await asyncio.wait([sampling], timeout=0.002)
                assert self._decoder is not None
                for row in tuple(self._decoder._batch._rows):
                    if row is not None and row.prompt == tokens and (count := len(row.logprobs)) > told:
                        listener(row.tokens[told:count], row.logprobs[told:count])
                        told = count
            return await sampling
        finally:
            sampling.cancel()

    async def abort(self) -> None:
        """End all requests with what they have."""
        self._flush()
        self._resolve(await self._run(self._patience, self._serving().close))


class HeardServer(Server):
    """A server of which a test hears what it samples, and whose responses it ends early.

    Attributes:
        kept: it is not closed by the role that runs it, and started once.
        sampled: tokens that were heard.
    """

    kept = False
    sampled = 0

    def __init__(self, *arguments: Any, key: str | None = KEY, **keywords: Any) -> None:
        super().__init__(*arguments, **keywords, key=key, announce=self._tell)
        self.told: Callable[[], Awaitable[None]] | None = None
        self._started = False
        self._wire_ids: set[str] = set()

    async def _tell(self) -> None:
        if self.told is not None:
            await self.told()

    async def start(self) -> None:
        if not self._started:
            await super().start()
        self._started = True

    async def close(self) -> None:
        if not self.kept:
            await super().close()

    async def generate(self, request: Request, listener: Listener | None = None) -> Completion:
        if listener is None:
            return await super().generate(request)
        control = self.control
        response = HeardResponse(request, self.limits, control.pair[1], self.salt, control.adapter)
        response.listener = self._counted(listener)
        self._wire_ids.add(response.wire_id)
        try:
            return await read_response(self.client, self.dialect, response, seconds=SOON)
        except Lost:  # it was given up, as a test wanted
            if response.last.finish != "abort":
                raise
            return response.completion("abort", response.last.runs, 0.0)
        finally:
            self._wire_ids.remove(response.wire_id)

    def _counted(self, listener: Listener) -> Listener:
        def hear(tokens: Sequence[int], logprobs: Sequence[float]) -> None:
            self.sampled += len(tokens)
            listener(tokens, logprobs)

        return hear

    async def abort(self) -> None:
        """Have the server give up all responses that are heard."""
        for name in tuple(self._wire_ids):
            for call in self.dialect.abort(name):
                await self.client.call(call, SOON)

    async def idle(self) -> None:
        """Return when nothing is at the server."""
        async with asyncio.timeout(60):
            while (figures := await self.metrics()).running + figures.waiting:  # noqa: ASYNC110 - it is another process
                await asyncio.sleep(0.05)


class Bench:
    """An engine under test.

    Attributes:
        kind: `hf`, `vllm` or `sglang`.
        engine: started.
        number: of the version in force.
        newest: of the version that is being applied, or was last.
        weights, models: of each version; what the judge has.
    """

    def __init__(self, kind: str, config: RunConfig, folder: Path, engine: HeardEngine | HeardServer) -> None:
        self.kind, self.config, self.folder, self.engine = kind, config, folder, engine
        self.number = self.newest = 0
        self._prepared: dict[int, Version] = {}
        self.weights = {0: tiny.random_weights(0)}
        self.models = {0: tiny.build(self.weights[0])}

    @property
    def server(self) -> HeardServer:
        """The engine, which is no `hf`."""
        assert isinstance(self.engine, HeardServer)
        return self.engine

    def known(self, number: int) -> None:
        """Say that the engine's server has this version of ours already, from another engine."""
        self.weights[number] = tiny.random_weights(number)
        self.models[number] = tiny.build(self.weights[number])
        self.number = self.newest = number

    async def prepare(self, count: int) -> None:
        """Make the versions of the next calls of `apply`, so that those take no time for it."""
        for number in range(max(self.models) + 1, max(self.models) + 1 + count):
            self._prepared[number] = await asyncio.to_thread(self._write, number)

    async def apply(self) -> int:
        """Apply new weights under the next number and return that."""
        if not self._prepared:
            await self.prepare(1)
        number = self.newest = min(self._prepared)
        version = self._prepared.pop(number)
        await self.engine.apply(version)
        shutil.rmtree(version.folder)  # nobody may need it after the return
        self.number = number
        return number

    def _write(self, number: int) -> Version:
        if number not in self.weights:
            self.weights[number] = tiny.random_weights(number)
            self.models[number] = tiny.build(self.weights[number])
        return write_version(self.folder / f"handed {next(_names)}", number, self.weights[number])

    def request(self, tokens: Sequence[int], limit: int, **more: Any) -> Request:
        return Request(f"request {next(_names)}", np.asarray(tokens, np.int32), limit, **more)

    async def generate(self, tokens: Sequence[int], limit: int, **more: Any) -> Completion:
        async with asyncio.timeout(120):
            return await self.engine.generate(self.request(tokens, limit, **more))

    def begin(self, tokens: Sequence[int], limit: int = LONG) -> tuple[asyncio.Task[Completion], Heard]:
        """Begin a request; returns its task and what is heard of it."""
        heard = Heard()
        return asyncio.create_task(self.engine.generate(self.request(tokens, limit), heard)), heard

    async def end(self, begun: tuple[asyncio.Task[Completion], Heard], more: int = 0) -> Completion:
        """End all requests after so many more tokens have come; the one that was begun has not ended by itself."""
        await self.more(more)
        async with asyncio.timeout(SOON):
            await self.engine.abort()
            done = await begun[0]
        assert done.finish == "abort"
        return done

    @property
    def url(self) -> str:
        """Of the server."""
        return self.server.client.url

    @property
    def sampled(self) -> int:
        """Tokens that came from the engine since its start; from a server those that were heard."""
        return self.engine.sampled if isinstance(self.engine, HeardServer) else self.engine.load().tokens_sampled

    async def more(self, count: int) -> None:
        """Return when so many more tokens have come from the engine."""
        wanted = self.sampled + count
        async with asyncio.timeout(60):
            while self.sampled < wanted:  # noqa: ASYNC110 - an engine's load sets no event
                await asyncio.sleep(0.002)

    def judge(self, tokens: Sequence[int], done: Completion, allowed: float = BF16) -> list[tuple[int, int, int]]:
        """Hold every token against the model of its version; returns the spans."""
        found = spans(done)
        assert tiny.worst_error(self.models, tokens, done) < allowed
        return found

    def judge_apart(self, tokens: Sequence[int], done: Completion) -> list[tuple[int, int, int]]:
        """Hold each span against a plain forward pass of its version: all keys and values were computed anew by it."""
        found = spans(done)
        ids = torch.tensor([[*tokens, *done.tokens.tolist()]])
        for first, end, number in found:
            with torch.no_grad():
                logits = self.models[number](input_ids=ids).logits[0, len(tokens) - 1 : -1].float()
            wanted = torch.log_softmax(logits, -1).gather(1, ids[0, len(tokens) :, None])[first:end, 0]
            assert float((wanted - torch.from_numpy(done.logprobs[first:end].copy())).abs().max()) < BF16
        return found
