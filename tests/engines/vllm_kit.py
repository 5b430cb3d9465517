"""A real vLLM server on a tiny model, spoken to with the dialect alone, and a plain forward pass to compare with."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import subprocess
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np
import orjson
import torch
import transformers
from safetensors.torch import save_file
from tokenizers import Tokenizer, models, pre_tokenizers

from streamrl.config import RunConfig
from streamrl.engine import Completion, Request
from streamrl.http import Call
from streamrl.servers.vllm import VllmDialect
from streamrl.weight_sync.tensors import Version

VOCABULARY = 400
CONTEXT = 4096


def random_model(seed: int, *, tied: bool) -> Any:
    """A Qwen2 in bfloat16; vLLM on a CPU wants heads of 32 values at least."""
    torch.manual_seed(seed)
    config = transformers.Qwen2Config(
        hidden_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        intermediate_size=192,
        max_position_embeddings=CONTEXT,
        initializer_range=0.05,
        tie_word_embeddings=tied,
        vocab_size=VOCABULARY,
        eos_token_id=None,  # a request ends at its limit, and not by chance
        bos_token_id=None,
        pad_token_id=0,
    )
    model = transformers.AutoModelForCausalLM.from_config(config).to(torch.bfloat16).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("bias"):  # zeros otherwise, and a lost bias would not be seen
                parameter.normal_(0, 0.05)
    return model


def save_model(model: Any, folder: Path) -> Path:
    """The model with a tokenizer that knows `<0>` to `<399>`."""
    model.save_pretrained(folder)
    words = {f"<{index}>": index for index in range(VOCABULARY)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<0>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<0>", unk_token="<0>").save_pretrained(
        folder
    )
    return folder


def write_version(tensors: dict[str, torch.Tensor], folder: Path, number: int) -> Version:
    """Two files as two ranks of a learner write them: what can be cut along the rows is."""
    folder.mkdir(parents=True)
    halves: tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]] = ({}, {})
    parts: dict[str, tuple[str, ...]] = {}
    for index, (name, tensor) in enumerate(tensors.items()):
        if tensor.ndim and len(tensor) > 2:
            cut = (len(tensor) + 1) // 2
            halves[0][name], halves[1][name] = tensor[:cut].contiguous(), tensor[cut:].contiguous()
            parts[name] = ("rank0.safetensors", "rank1.safetensors")
        else:
            halves[index % 2][name] = tensor.contiguous()
            parts[name] = (f"rank{index % 2}.safetensors",)
    for rank, held in enumerate(halves):
        save_file(held, folder / f"rank{rank}.safetensors")
    return Version((1, number), number, tensors, folder, ("rank0.safetensors", "rank1.safetensors"), parts)


def named(model: Any) -> dict[str, torch.Tensor]:
    """What a learner publishes: every parameter once."""
    return {name: parameter.detach().clone() for name, parameter in model.named_parameters()}


@torch.no_grad()
def forward(model: Any, prompt: Sequence[int], tokens: Sequence[int], temperature: float = 1.0) -> np.ndarray:
    """Log-probabilities of `tokens` by one plain pass of transformers."""
    logits = model(input_ids=torch.tensor([[*prompt, *tokens]])).logits[0, len(prompt) - 1 : -1]
    chosen = torch.log_softmax(logits.float() / temperature, -1).gather(1, torch.tensor(tokens)[:, None])
    return chosen[:, 0].double().numpy()


@torch.no_grad()
def replay(models: dict[int, Any], prompt: Sequence[int], done: Completion) -> np.ndarray:
    """Each token by the model of its version, keys and values as they grew."""
    ends = [start for start, _ in done.runs[1:]] + [len(done.tokens)]
    cache, inputs, found, run = transformers.DynamicCache(), list(prompt), [], 0
    for index, token in enumerate(done.tokens.tolist()):
        run += index >= ends[run]
        model = models[done.runs[run][1]]
        logits = model(input_ids=torch.tensor([inputs]), past_key_values=cache, use_cache=True).logits[0, -1]
        found.append(torch.log_softmax(logits.float(), -1)[token].item())
        inputs = [token]
    return np.asarray(found)


class Failed(Exception):
    """The server answered with an error."""


@dataclass
class Live:
    """One server."""

    dialect: VllmDialect
    url: str
    http: aiohttp.ClientSession
    process: subprocess.Popen[bytes]
    log: Path
    texts: list[str] = field(default_factory=list)

    async def call(self, call: Call) -> Any:
        async with self.http.request(call.method, self.url + call.path, json=call.body, params=call.query) as answer:
            text = await answer.text()
            if answer.status == 404 and call.missing_ok:
                return None
            if answer.status != 200:
                raise Failed(f"{call.path}: {answer.status} {text[:2000]}")
            return orjson.loads(text) if answer.content_type == "application/json" else text

    async def calls(self, calls: Sequence[Call]) -> list[Any]:
        return [await self.call(call) for call in calls]

    async def generate(
        self, request: Request, version: int, heard: Callable[[int], None] = lambda _: None
    ) -> Completion:
        call = self.dialect.generation(request, version=version)
        tokens: list[int] = []
        logprobs: list[float] = []
        finish, runs, prompt_tokens = None, None, 0
        async with self.http.post(self.url + call.path, json=call.body) as answer:
            if answer.status != 200:
                raise Failed(f"{answer.status} {await answer.text()}")
            async for line in answer.content:
                data = line.strip().removeprefix(b"data:").strip()
                if not data or data == b"[DONE]":
                    continue
                chunk = self.dialect.chunk(orjson.loads(data), received=len(tokens))
                tokens += chunk.tokens
                logprobs += chunk.logprobs
                finish, runs = chunk.finish or finish, runs if chunk.runs is None else chunk.runs
                prompt_tokens = chunk.prompt_tokens or prompt_tokens
                heard(len(tokens))
        assert finish is not None
        assert runs is not None
        ids, values = np.asarray(tokens, np.int32), np.asarray(logprobs, np.float32)
        return Completion(ids, values, runs, finish, prompt_tokens, 0.0)

    async def update(self, version: Version, mode: Any = "keep") -> None:
        """As an engine would: look first, and stand still only for the replacement."""
        await self.calls(self.dialect.prefetch(version))
        await self.calls(self.dialect.pause(mode))
        await self.calls(self.dialect.update(version))
        await self.calls(self.dialect.resume())

    async def alive(self) -> bool:
        """A fresh request is answered."""
        done = await self.generate(request(f"alive-{os.urandom(4).hex()}", [5, 6, 7], 3), 0)
        return len(done.tokens) > 0


def request(name: str, prompt: Sequence[int], limit: int, **more: Any) -> Request:
    return Request(name, np.asarray(prompt, np.int32), limit, **more)


def free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])


def _spawn(argv: Sequence[str], environ: dict[str, str], log: Path) -> subprocess.Popen[bytes]:
    with log.open("wb") as out:
        return subprocess.Popen(["nice", "-n", "5", *argv], env=environ, stdout=out, stderr=out, start_new_session=True)


@contextlib.asynccontextmanager
async def served(folder: Path, log: Path, **engine: Any) -> AsyncIterator[Live]:
    """Start a server through `VllmDialect.launch` and end all of it afterwards."""
    defaults = {"kind": "vllm", "dtype": "bfloat16", "device": "cpu", "threads": 1, "slots": 64, "stream_interval": 4}
    config = RunConfig.model_validate(
        {
            "model": {"path": str(folder), "context": CONTEXT},
            "sampling": {"max_new_tokens": 512},
            "data": {"max_prompt_tokens": 512},
            "engine": {**defaults, "kv_cache": "256MiB", **engine},
        }
    )
    dialect, port = VllmDialect(config), free_port()
    launch = dialect.launch(model=str(folder), port=port, seed=7)
    environ = {**os.environ, **launch.environ, "HF_HUB_OFFLINE": "1", **config.engine.variables}
    process = _spawn(launch.argv, environ, log)
    try:
        async with aiohttp.ClientSession(
            timeout=aiohttp.ClientTimeout(total=120), connector=aiohttp.TCPConnector(force_close=True)
        ) as http:
            live = Live(dialect, f"http://127.0.0.1:{port}", http, process, log)
            async with asyncio.timeout(300):
                while True:
                    assert process.poll() is None, log.read_text(errors="replace")[-3000:]
                    try:
                        await live.call(dialect.ready())
                        break
                    except (aiohttp.ClientError, Failed):
                        await asyncio.sleep(0.5)
            yield live
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait(30)
