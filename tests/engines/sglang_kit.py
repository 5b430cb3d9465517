"""A real SGLang server on a tiny random model, spoken to through the dialect alone, and the oracle for what it says."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np
import orjson
import torch
import transformers
from safetensors.torch import save_file
from tokenizers import Tokenizer as Backend
from tokenizers import models, pre_tokenizers

from streamrl.config import RunConfig
from streamrl.engine import Completion, Request
from streamrl.http import Call
from streamrl.servers.sglang import SglangDialect
from streamrl.weight_sync.tensors import Version

VOCABULARY = 128
EOS = 1
CONTEXT = 512
START = 300.0


def tiny(seed: int) -> Any:
    torch.manual_seed(seed)
    return transformers.Qwen2ForCausalLM(
        transformers.Qwen2Config(
            vocab_size=VOCABULARY,
            hidden_size=64,
            intermediate_size=96,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=CONTEXT,
            initializer_range=0.05,
            tie_word_embeddings=True,
            eos_token_id=None,  # a response of the tests ends when they say so
            bos_token_id=None,
            pad_token_id=0,
        )
    ).to(torch.bfloat16)


def save_model(model: Any, folder: Path) -> None:
    words = {"<pad>": 0, "</s>": EOS, "<unk>": 2, **{f"w{index}": index for index in range(3, VOCABULARY)}}
    backend = Backend(models.WordLevel(words, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    transformers.PreTrainedTokenizerFast(
        tokenizer_object=backend, pad_token="<pad>", eos_token="</s>", unk_token="<unk>"
    ).save_pretrained(folder)
    model.save_pretrained(folder)


def weights(model: Any) -> dict[str, torch.Tensor]:
    return {name: parameter.detach().clone() for name, parameter in model.named_parameters()}


def version(number: int, tensors: dict[str, torch.Tensor], folder: Path) -> Version:
    """The tensors in two files: every matrix is cut in two along its rows."""
    folder.mkdir()
    cut = {name: max(1, len(tensor) // 2) for name, tensor in tensors.items()}
    save_file({name: tensor[: cut[name]].contiguous() for name, tensor in tensors.items()}, folder / "a.safetensors")
    rest = {name: tensor[cut[name] :].contiguous() for name, tensor in tensors.items() if tensor.ndim > 1}
    whole = {name: tensor.contiguous() for name, tensor in tensors.items() if tensor.ndim == 1}
    save_file(rest, folder / "b.safetensors")
    save_file(whole, folder / "c.safetensors")
    parts = {name: ("c.safetensors",) if name in whole else ("a.safetensors", "b.safetensors") for name in tensors}
    files = ("a.safetensors", "b.safetensors", "c.safetensors")
    return Version((1, number), number, tensors, folder, files, parts)


@torch.no_grad()
def plain(model: Any, prompt: Sequence[int], tokens: Sequence[int]) -> np.ndarray:
    """Log-probabilities of one forward pass over prompt and response, without any cache, in the model's type."""
    logits = model(input_ids=torch.tensor([[*prompt, *tokens]])).logits[0, len(prompt) - 1 : -1]
    logprobs = torch.log_softmax(logits.float(), -1)
    return logprobs.gather(1, torch.tensor(tokens)[:, None])[:, 0].double().numpy()


def config(folder: Path, **engine: Any) -> RunConfig:
    return RunConfig.model_validate(
        {
            "model": {"path": str(folder), "context": CONTEXT},
            "sampling": {"max_new_tokens": 8},
            "data": {"max_prompt_tokens": 64},
            "engine": {
                "kind": "sglang",
                "device": "cpu",
                "dtype": "bfloat16",
                "slots": 16,
                "kv_cache": "64MiB",
                "stream_interval": 4,
                **engine,
            },
        }
    )


class Answer(Exception):
    """The server says no."""

    def __init__(self, status: int, text: str) -> None:
        super().__init__(f"{status}: {text}")
        self.status = status


class Live:
    """One running server and what its dialect sends to it."""

    def __init__(self, dialect: SglangDialect, url: str, process: subprocess.Popen[bytes], log: Path) -> None:
        self.dialect, self.url, self.process, self.log = dialect, url, process, log

    async def call(self, *calls: Call) -> list[Any]:
        """Send each call after the success of the one before."""
        answers = []
        async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(60)) as session:
            for call in calls:
                async with self._send(session, call) as answer:
                    text = await answer.text()
                    if answer.status >= 400 and call.optional:
                        answers.append(None)
                        continue
                    if answer.status >= 400:
                        raise Answer(answer.status, text)
                    answers.append(orjson.loads(text) if text[:1] in "{[" and text else text)
        return answers

    def _send(self, session: aiohttp.ClientSession, call: Call) -> Any:
        return session.request(call.method, self.url + call.path, json=call.body, params=dict(call.query))

    async def apply(self, new: Version) -> float:
        """Pause, update, resume; returns the seconds of the pause."""
        await self.call(*self.dialect.pause("keep"))
        began = time.monotonic()
        try:
            await self.call(*self.dialect.update(new))
        finally:
            await self.call(*self.dialect.resume())
        return time.monotonic() - began

    async def generate(self, request: Request, number: int = 0, heard: list[int] | None = None) -> Completion:
        """Sample one response; `heard` grows with the tokens as they come."""
        tokens: list[int] = [] if heard is None else heard
        logprobs: list[float] = []
        chunk = None
        session = aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(120))
        async with session, self._send(session, self.dialect.generation(request, version=number)) as answer:
            assert answer.status == 200, await answer.text()
            async for line in answer.content:
                if not line.startswith(b"data:") or line.strip() == b"data: [DONE]":
                    continue
                chunk = self.dialect.chunk(orjson.loads(line[5:]), received=len(tokens))
                tokens.extend(chunk.tokens)
                logprobs.extend(chunk.logprobs)
        assert chunk is not None
        assert chunk.finish is not None
        return Completion(
            np.asarray(tokens, np.int32),
            np.asarray(logprobs, np.float32),
            chunk.runs or [],
            chunk.finish,
            chunk.prompt_tokens or 0,
            0.0,
        )


def request(name: str, prompt: Sequence[int], limit: int = 40, adapter: str | None = None) -> Request:
    """No name may come twice: SGLang aborts by name two seconds after a response has ended."""
    return Request(name, np.asarray(prompt, np.int32), limit, adapter=adapter)


async def heard_at_least(heard: list[int], count: int) -> None:
    async with asyncio.timeout(60):
        while len(heard) < count:  # noqa: ASYNC110 - the stream sets no event
            await asyncio.sleep(0.005)


@contextmanager
def serve(settings: RunConfig, folder: Path, log: Path) -> Iterator[Live]:
    """A server that lives as long as the block; all it started ends with it."""
    dialect = SglangDialect(settings)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    launch = dialect.launch(model=str(folder), port=port, seed=7)
    with log.open("wb") as output:
        process = subprocess.Popen(
            launch.argv, env={**os.environ, **launch.environ}, stdout=output, stderr=output, start_new_session=True
        )
    live = Live(dialect, f"http://127.0.0.1:{port}", process, log)
    try:
        asyncio.run(_ready(live))
        yield live
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait(30)


async def _ready(live: Live) -> None:
    async with asyncio.timeout(START):
        while True:
            assert live.process.poll() is None, live.log.read_text()[-4000:]
            with suppress(aiohttp.ClientError, Answer):
                await live.call(live.dialect.ready())
                return
            await asyncio.sleep(0.5)
