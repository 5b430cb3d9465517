"""Tiny real models, a gate that lets a decode loop pass one forward at a time, and the oracles."""

from __future__ import annotations

import asyncio
import copy
import functools
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers

from streamrl.config import RunConfig
from streamrl.engine import Completion, Request
from streamrl.producers.engines.hf import HfEngine
from streamrl.weight_sync.tensors import Version

KINDS = pytest.mark.parametrize("kind", ["qwen2", "llama", "gpt2", "mistral", "gemma3"])
LONG = 150
EOS = 2
VOCABULARY = 24
COMMON = {"vocab_size": VOCABULARY, "eos_token_id": EOS, "bos_token_id": 1, "pad_token_id": 0}
CONFIGS = {
    "qwen2": lambda: transformers.Qwen2Config(
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        intermediate_size=48,
        max_position_embeddings=256,
        initializer_range=0.2,
        tie_word_embeddings=True,
        **COMMON,
    ),
    "llama": lambda: transformers.LlamaConfig(
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=4,
        intermediate_size=48,
        max_position_embeddings=256,
        initializer_range=0.2,
        tie_word_embeddings=False,
        **COMMON,
    ),
    # learned positions, fused projections, biases everywhere
    "gpt2": lambda: transformers.GPT2Config(
        n_embd=32, n_layer=2, n_head=4, n_positions=256, initializer_range=0.2, **COMMON
    ),
    # a sliding window in every layer
    "mistral": lambda: transformers.MistralConfig(
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        intermediate_size=48,
        max_position_embeddings=256,
        initializer_range=0.2,
        sliding_window=8,
        **COMMON,
    ),
    # a sliding window in every other layer
    "gemma3": lambda: transformers.Gemma3TextConfig(
        hidden_size=32,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        intermediate_size=48,
        max_position_embeddings=256,
        initializer_range=0.2,
        sliding_window=6,
        layer_types=["sliding_attention", "full_attention"] * 2,
        **COMMON,
    ),
}


def random_model(kind: str, seed: int, attention: str = "sdpa") -> Any:
    """The same weights for the same arguments, whatever was drawn from torch's global generator before."""
    return copy.deepcopy(_made(kind, seed, attention))


@functools.cache
def _made(kind: str, seed: int, attention: str) -> Any:
    torch.manual_seed(seed)
    return transformers.AutoModelForCausalLM.from_config(CONFIGS[kind](), attn_implementation=attention).eval()


def engine_config(path: Path, **engine: Any) -> RunConfig:
    context, deadline, max_hold = (
        engine.pop(name, default) for name, default in (("context", 200), ("deadline", 20), ("max_hold", 900))
    )
    return RunConfig.model_validate(
        {
            "model": {"path": str(path), "context": context},
            "sampling": {"max_new_tokens": 8},
            "engine": {"slots": 8, "device": "cpu", "threads": 1, "kv_cache": "64MiB", **engine},
            "weights": {"deadline": deadline},
            "lease": {"max_hold": max_hold},
        }
    )


class Gate:
    """Blocks the decode thread before every forward pass until the test lets it through; never two passes ahead."""

    def __init__(self, engine: HfEngine) -> None:
        self._engine = engine
        self._permits = threading.Semaphore(0)
        self._released = 0
        self.entered = 0
        self._hook = engine._decoder._batch.model.register_forward_pre_hook(self._wait)

    def _wait(self, *_args: Any) -> None:
        self.entered += 1
        assert self._permits.acquire(timeout=60)

    def _release(self) -> None:
        """Let the thread through when it stands at the gate."""
        if self.entered > self._released:
            self._released += 1
            self._permits.release()

    def _hold_wanted(self) -> bool:
        decoder: Any = self._engine._decoder
        return decoder._holds > 0

    async def passed(self, forwards: int) -> None:
        """Let exactly this many forwards through; return when the thread stands before the next one."""
        for _ in range(forwards):
            await until(lambda: self.entered > self._released)
            self._release()
        await until(lambda: self.entered > self._released)

    async def during(self, control: Awaitable[Any]) -> Any:
        """Await a call that needs the loop to stand still: the step at the gate may end once it has asked for that."""
        return await self._await(control, self._hold_wanted)

    async def running(self, result: Awaitable[Any]) -> Any:
        """Await something that needs steps."""
        return await self._await(result, lambda: True)

    async def _await(self, what: Awaitable[Any], is_transient: Callable[[], bool]) -> Any:
        task = asyncio.ensure_future(what)
        while not task.done():
            if is_transient():
                self._release()
            await asyncio.wait([task], timeout=0.001)
        return await task

    def open(self) -> None:
        """Let everything through from now on."""
        self._hook.remove()
        self._permits.release(1 << 20)


class Hang:
    """Lets no forward pass of a model end; the test ends by itself when it forgets to let go."""

    def __init__(self, model: Any) -> None:
        self.entered = threading.Event()
        self._free = threading.Event()
        self._hook = model.register_forward_pre_hook(self._wait)

    def _wait(self, *_args: Any) -> None:
        self.entered.set()
        self._free.wait(60)

    def let_go(self) -> None:
        self._hook.remove()
        self._free.set()


@contextmanager
def hanging(model: Any) -> Iterator[Hang]:
    hang = Hang(model)
    try:
        yield hang
    finally:
        hang.let_go()


async def until(condition: Callable[[], bool], seconds: float = 30.0) -> None:
    async with asyncio.timeout(seconds):
        while not condition():  # noqa: ASYNC110 - the decode thread sets no event
            await asyncio.sleep(0.001)


@asynccontextmanager
async def gated(engine: HfEngine) -> AsyncIterator[Gate]:
    gate = Gate(engine)
    try:
        yield gate
    finally:
        gate.open()


def prompt(length: int, seed: int = 0) -> list[int]:
    return np.random.default_rng(seed).integers(3, VOCABULARY, length).tolist()


def request(name: str, prompt: Sequence[int], limit: int = 12, temperature: float = 1.0) -> Request:
    return Request(name, np.asarray(prompt, dtype=np.int32), limit, temperature)


def versions(completion: Completion) -> list[int]:
    starts = [first for first, _ in completion.runs] + [len(completion.tokens)]
    return [v for (first, v), end in zip(completion.runs, starts[1:], strict=True) for _ in range(first, end)]


@torch.no_grad()
def replay(models: dict[int, Any], prompt: Sequence[int], done: Completion, temperature: float = 1.0) -> np.ndarray:
    """Log-probabilities by transformers alone: each token by the model of its version, keys and values as they grew."""
    cache = transformers.DynamicCache()
    inputs, found = list(prompt), []
    for token, version in zip(done.tokens.tolist(), versions(done), strict=True):
        logits = models[version](input_ids=torch.tensor([inputs]), past_key_values=cache, use_cache=True).logits[0, -1]
        found.append(torch.log_softmax(logits.float() / temperature, -1)[token].item())
        inputs = [token]
    return np.asarray(found, dtype=np.float64)


@torch.no_grad()
def plain(model: Any, prompt: Sequence[int], done: Completion, temperature: float = 1.0) -> np.ndarray:
    """Log-probabilities of one forward pass over prompt and response, without any cache."""
    logits = model(input_ids=torch.tensor([[*prompt, *done.tokens.tolist()]])).logits[0, len(prompt) - 1 : -1]
    logprobs = torch.log_softmax(logits.float() / temperature, -1)
    return logprobs.gather(1, torch.from_numpy(done.tokens.astype(np.int64))[:, None])[:, 0].double().numpy()


def named(model: Any) -> dict[str, torch.Tensor]:
    return {name: parameter.detach().clone() for name, parameter in model.named_parameters()}


def held(pair: tuple[int, int], tensors: Mapping[str, torch.Tensor]) -> Version:
    """A version made in memory."""
    return Version(pair, step=pair[1], tensors=tensors)
