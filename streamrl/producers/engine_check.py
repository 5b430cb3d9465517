"""Whether an engine works on this machine: `streamrl engines check`.

The engine is the one that runs use, on a tiny model with random weights; what it samples is compared with transformers.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Awaitable, Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final, Literal, TypeAlias

import numpy as np
import torch
from safetensors.torch import save_file
from transformers.utils.logging import disable_progress_bar

from streamrl.config import RunConfig
from streamrl.config.base import ServerKind
from streamrl.demo.prepare import make_model, make_tokenizer
from streamrl.demo.task import FIRST_CHARACTER, VOCABULARY
from streamrl.engine import Request
from streamrl.errors import StreamrlError
from streamrl.producers.engines.hf import HfEngine
from streamrl.servers.server import Server
from streamrl.weight_sync.tensors import Version

Kind: TypeAlias = Literal[ServerKind, "hf"]
TOLERANCE: Final = 0.02  # largest difference of a log-probability in bfloat16
_STEP_DEADLINE: Final = 120.0
_TOKENS: Final = 64


@dataclass(frozen=True, slots=True)
class Finding:
    name: str
    verdict: Literal["yes", "failed"]
    detail: str


async def check_engine(kind: Kind, folder: Path, environment: Path | None) -> AsyncGenerator[Finding]:
    settings: dict[str, Any] = {"kind": kind, "dtype": "bfloat16", "kv_cache": "256MiB", "environment": environment}
    model, sampling = {"path": str(folder / "model"), "context": 128}, {"max_new_tokens": _TOKENS}
    config = RunConfig.model_validate({"name": "check", "model": model, "sampling": sampling, "engine": settings})
    models = [_random_model(seed) for seed in (0, 1)]
    disable_progress_bar()
    models[0].save_pretrained(folder / "model")
    make_tokenizer().save_pretrained(folder / "model")
    engine = HfEngine(config, seed=0) if kind == "hf" else Server(config, folder, "check", seed=0)
    steps: list[tuple[str, Callable[[], Awaitable[str | None]], float]] = [
        ("start", engine.start, config.engine.start_deadline + 60),
        ("log-probabilities", partial(_sample, engine, models[0], 0), _STEP_DEADLINE),
        ("new weights", partial(engine.apply, _version(folder, models[1])), _STEP_DEADLINE),
        ("their log-probabilities", partial(_sample, engine, models[1], 1), _STEP_DEADLINE),
    ]
    try:
        for name, step, deadline in steps:
            finding = await _finding(name, step(), deadline)
            yield finding
            if finding.verdict == "failed":
                break
    finally:
        await engine.close()


async def _finding(name: str, step: Awaitable[str | None], deadline: float) -> Finding:
    began = time.monotonic()
    try:
        async with asyncio.timeout(deadline):
            return Finding(name, "yes", await step or f"after {time.monotonic() - began:.2f} s")
    except TimeoutError:
        return Finding(name, "failed", f"took over {deadline:.0f} s")
    except StreamrlError as error:
        return Finding(name, "failed", str(error))


async def _sample(engine: HfEngine | Server, model: Any, version: int) -> str:
    """Sample some responses at the same time; hold every token against a plain forward pass of the version's model."""
    prompts = np.random.default_rng(version).integers(FIRST_CHARACTER, VOCABULARY, (8, 24), dtype=np.int32)
    asked = [Request(f"{version}.{number}", prompt, _TOKENS) for number, prompt in enumerate(prompts)]
    worst, count = 0.0, 0
    for prompt, done in zip(prompts, await asyncio.gather(*map(engine.generate, asked)), strict=True):
        if done.runs != [(0, version)]:
            raise StreamrlError(f"the versions of the tokens are {done.runs} instead of {[(0, version)]}")
        with torch.no_grad():
            logits = model(input_ids=torch.tensor([[*prompt, *done.tokens]])).logits[0, len(prompt) - 1 : -1]
        sampled = torch.from_numpy(done.tokens.astype(np.int64))[:, None]
        found = torch.log_softmax(logits, -1).gather(1, sampled)[:, 0]
        worst = max(worst, float((found - torch.from_numpy(done.logprobs.copy())).abs().max()))
        count += len(done.tokens)
    if not worst <= TOLERANCE:
        raise StreamrlError(f"log-probabilities are off by {worst:.3f}, {TOLERANCE} is allowed")
    return f"off by at most {worst:.4f} over {count} tokens"


def _random_model(seed: int) -> Any:
    """The demo's model with random weights whose logits are small: rounded to bfloat16 they are off by 0.01."""
    torch.manual_seed(seed)
    model = make_model().eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim == 2:
                parameter.normal_(std=0.03 if "embed" in name else 0.05)
            parameter.copy_(parameter.bfloat16())
    return model


def _version(folder: Path, model: Any) -> Version:
    tensors = {name: parameter.detach().bfloat16() for name, parameter in model.named_parameters()}
    file = "model.safetensors"
    (folder / "version").mkdir()
    save_file(tensors, folder / "version" / file)
    return Version((1, 1), 1, tensors, folder / "version", (file,))
