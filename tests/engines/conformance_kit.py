"""One engine of any kind on the tiny model, versions for it, and the judge of what it samples."""

from __future__ import annotations

import asyncio
import itertools
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file

from streamrl.config import RunConfig
from streamrl.producers.engines.contract import Completion, Engine, Request
from streamrl.producers.servers import tiny
from streamrl.weight_sync.version import Version

BF16 = 0.02
"""What a log-probability in bfloat16 may be off by."""
INTERVAL = 4
"""Tokens between two messages of a server."""
SOON = 20.0
"""Deadline of what should take milliseconds, on two busy cores."""
LORA_FLAGS: dict[str, dict[str, Any]] = {
    "vllm": {"enable-lora": True, "max-lora-rank": 8, "max-loras": 2},
    "sglang": {
        "enable-lora": True,
        "max-lora-rank": 8,
        "lora-target-modules": "all",
        "max-loras-per-batch": 4,
        "lora-backend": "torch_native",
    },
}


def run_config(kind: str, folder: Path, *, deadline: float = 60.0, **engine: Any) -> RunConfig:
    """A run on the tiny model in `folder`, which is made when it is not there."""
    if not (folder / "model").exists():
        tiny.make_model(folder / "model")
    return RunConfig.model_validate(
        {
            "name": "conformance",
            "model": {"path": str(folder / "model"), "context": tiny.CONTEXT},
            "sampling": {"max_new_tokens": 400},
            "data": {"max_prompt_tokens": 256},
            "engine": {
                "kind": kind,
                "device": "cpu",
                "threads": 1,
                "dtype": "bfloat16",
                "slots": 64,
                "kv_cache": "256MiB",
                "stream_interval": INTERVAL,
                "start_deadline": 300,
                "flags": LORA_FLAGS.get(kind, {}),
                **engine,
            },
            "weights": {"deadline": deadline, "dtype": "bfloat16"},
            "supervisor": {"term_grace": 5},
        }
    )


def prompt(seed: int, length: int = 24) -> list[int]:
    """Tokens that mean nothing in particular."""
    source = np.random.default_rng(seed)
    return [int(token) for token in source.integers(tiny.FIRST_PLAIN, tiny.VOCABULARY, length)]


def write_version(folder: Path, number: int, tensors: dict[str, torch.Tensor], epoch: int = 1) -> Version:
    """Files as two ranks of a learner write them: what has rows is cut in two."""
    place = folder / f"v-{epoch}-{number}"
    place.mkdir(parents=True)
    files = ("rank0.safetensors", "rank1.safetensors")
    held: tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]] = ({}, {})
    parts = {}
    for name, tensor in tensors.items():
        cut = (len(tensor) + 1) // 2
        pieces = [tensor[:cut], tensor[cut:]] if tensor.ndim > 1 and len(tensor) > 1 else [tensor]
        for half, piece in zip(held, pieces, strict=False):
            half[name] = piece.contiguous()
        parts[name] = files[: len(pieces)]
    for file, half in zip(files, held, strict=True):
        save_file(half, place / file)
    whole = {name: torch.cat([load_file(place / file)[name] for file in parts[name]]) for name in tensors}
    return Version((epoch, number), number, whole, place, files, parts)


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


class Bench:
    """An engine under test.

    Attributes:
        kind: `hf`, `served`, `vllm` or `sglang`.
        engine: started.
        number: of the version in force.
        models: the judge's models by the number of the version.
    """

    def __init__(self, kind: str, engine: Engine, config: RunConfig, folder: Path) -> None:
        self.kind, self.engine, self.config, self.folder = kind, engine, config, folder
        self.number = 0
        self.weights = {0: tiny.random_weights(0)}
        self.models = {0: tiny.build(self.weights[0])}
        self._names = itertools.count()

    def known(self, number: int, weights: dict[str, torch.Tensor] | None = None) -> dict[str, torch.Tensor]:
        """Weights of a version; the judge knows them from now on."""
        self.weights[number] = tiny.random_weights(number) if weights is None else weights
        self.models[number] = tiny.build(self.weights[number])
        return self.weights[number]

    async def apply(self, weights: dict[str, torch.Tensor] | None = None) -> int:
        """Apply new weights under the next number and return that."""
        number = max(self.models) + 1
        version = write_version(self.folder, number, self.known(number, weights))
        await self.engine.apply(version)
        shutil.rmtree(self.folder / f"v-1-{number}")  # nobody may need it after the return
        self.number = number
        return number

    def request(self, tokens: Sequence[int], limit: int, **more: Any) -> Request:
        return Request(f"request {next(self._names)}", np.asarray(tokens, np.int32), limit, **more)

    async def generate(self, tokens: Sequence[int], limit: int, **more: Any) -> Completion:
        async with asyncio.timeout(120):
            return await self.engine.generate(self.request(tokens, limit, **more))

    def begin(self, tokens: Sequence[int], limit: int = 400) -> tuple[asyncio.Task[Completion], Heard, str]:
        """Begin a request; returns its task, what is heard of it and its id."""
        heard, request = Heard(), self.request(tokens, limit)
        return asyncio.create_task(self.engine.generate(request, heard)), heard, request.id

    def judge(self, tokens: Sequence[int], done: Completion, allowed: float = BF16) -> list[tuple[int, int, int]]:
        """Hold every token against the model of its version; returns the spans."""
        found = spans(done)
        assert done.prompt_tokens == len(tokens)
        assert tiny.worst_error(self.models, tokens, done) < allowed
        return found
