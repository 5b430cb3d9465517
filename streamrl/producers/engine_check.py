"""Tests what an engine can do on this machine: `streamrl engines check`.

The engine is the one that runs use, on a tiny model with random weights; every number is compared with transformers.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from textwrap import shorten
from typing import Any, Final, Literal, TypeAlias

import numpy as np
import torch

from streamrl.config import ModelConfig, RunConfig
from streamrl.config.base import ServerKind
from streamrl.engine import Completion, Request, StreamingEngine
from streamrl.errors import Refused, StreamrlError, WeightsError
from streamrl.http import HttpClient
from streamrl.producers import tiny
from streamrl.producers.engines.hf import HfEngine
from streamrl.producers.episodes.known_models import examine_chat
from streamrl.producers.group.server import ServerEngine
from streamrl.producers.tokenizer import Tokenizer
from streamrl.servers.kinds import make_dialect
from streamrl.servers.process import ManagedServer, ServerSettings

Kind: TypeAlias = Literal[ServerKind, "hf"]

TOLERANCE: Final = 0.02
"""Largest difference of a log-probability in bfloat16."""
_STEP_DEADLINE: Final = 120.0
_LONG: Final = 300
_ADAPTER_FLAGS: Final[dict[str, dict[str, Any]]] = {
    "vllm": {"enable-lora": True, "max-lora-rank": 8, "max-loras": 2},
    "sglang": {
        "enable-lora": True,
        "max-lora-rank": 8,
        "lora-target-modules": "all",
        "max-loras-per-batch": 4,
    },
    "hf": {},
}


@dataclass(frozen=True, slots=True)
class Finding:
    """One line of the table: `no` is what this engine cannot do here, `failed` what it should do and does not."""

    name: str
    verdict: Literal["yes", "no", "failed"]
    detail: str


class Unexpected(StreamrlError):
    """The engine broke its contract."""


class Examination:
    """Examines one engine.

    `folder` is empty, for the model, the versions and the server's log. `heard` is called with every finding as it is
    made. `chat` is the model whose chat template is examined, the tiny one when None. `engine` are further keys of the
    `engine` section.
    """

    def __init__(
        self, kind: Kind, folder: Path, heard: Callable[[Finding], None], chat: str | None = None, **engine: Any
    ) -> None:
        self._chat_model = chat or str(folder / "model")
        self._kind = kind
        self._folder = folder
        self._heard = heard
        self.config = RunConfig.model_validate(
            {
                "name": "check",
                "model": {"path": str(folder / "model"), "context": tiny.CONTEXT},
                "sampling": {"max_new_tokens": _LONG},
                "engine": {
                    "kind": kind,
                    "dtype": "bfloat16",
                    "slots": 16,
                    "kv_cache": "256MiB",
                    "stream_interval": 4,
                    "flags": _ADAPTER_FLAGS[kind],
                    **engine,
                },
            }
        )
        self._weights = {number: tiny.random_weights(number) for number in range(4)}
        self._models = {number: tiny.build(weights) for number, weights in self._weights.items()}
        self._findings: list[Finding] = []
        self._engine: StreamingEngine | None = None

    async def run(self) -> list[Finding]:
        """Make all checks, one after the other; the engine is stopped at the end, whatever happens."""
        tiny.make_model(self._folder / "model")
        steps: dict[str, Callable[[], Awaitable[str]]] = {
            "log-probabilities": self._log_probabilities,
            "weights": self._update,
            "prefix cache after an update": self._prefix_cache,
            "weights in mid-request": self._spans,
            "refused weights": self._refusal,
            "abort": self._abort,
            "pause and resume": self._pause,
            "LoRA adapters": self._adapters,
            "metrics": self._metrics,
            "sleep and wake": self._sleep,
            "chat": self._chat,
        }
        try:
            if await self._look("start", self._start, self.config.engine.start_deadline + 60):
                for name, step in steps.items():
                    await self._look(name, step, _STEP_DEADLINE)
        finally:
            if self._engine is not None:
                await self._engine.close()
        return self._findings

    async def _look(self, name: str, step: Callable[[], Awaitable[str]], deadline: float) -> bool:
        try:
            async with asyncio.timeout(deadline):
                finding = Finding(name, "yes", await step())
        except Refused as error:
            finding = Finding(name, "no", error.message)
        except TimeoutError:
            finding = Finding(name, "failed", f"took over {deadline:.0f} s")
        except StreamrlError as error:
            finding = Finding(name, "failed", str(error))
        self._findings.append(finding)
        self._heard(finding)
        return finding.verdict == "yes"

    async def _start(self) -> str:
        began = time.monotonic()
        if self._kind == "hf":
            self._engine = HfEngine(self.config, seed=0)
            await self._engine.start()
            import transformers

            return f"transformers {transformers.__version__}, ready after {time.monotonic() - began:.0f} s"
        dialect = make_dialect(self.config)
        server = ManagedServer(dialect, ServerSettings.of_engine(self.config), self._folder, "check.server0", seed=0)
        self._engine = ServerEngine(dialect, self.config, server=server)
        await self._engine.start()
        took = time.monotonic() - began
        client = HttpClient(server.url)
        try:
            about = dialect.read_about([await client.call(call, 30.0) for call in dialect.about()])
        finally:
            await client.close()
        return f"{self._kind} {about.version}, ready after {took:.0f} s"

    @property
    def _running(self) -> StreamingEngine:
        if self._engine is None:
            raise Unexpected("the engine has not been started")
        return self._engine

    async def _generate(self, name: str, prompt: list[int], limit: int, **more: Any) -> Completion:
        return await self._running.generate(Request(name, np.asarray(prompt, np.int32), limit), **more)

    def _judge(self, completion: Completion, prompt: list[int], *versions: int) -> str:
        """Check counts, versions and error (`Unexpected`), and return the error in words."""
        found = tuple(version for _, version in completion.runs)
        if found != versions:
            raise Unexpected(f"tokens carry the versions {found} instead of {versions}")
        error = tiny.worst_error(self._models, prompt, completion)
        if not error <= TOLERANCE:
            raise Unexpected(f"log-probabilities are off by {error:.3f}, {TOLERANCE} is allowed")
        return f"off by at most {error:.4f} over {len(completion.tokens)} tokens"

    async def _log_probabilities(self) -> str:
        prompt = _prompt(1)
        done = await self._generate("log-probabilities", prompt, 64)
        ended = await self._generate("ends", [*prompt, tiny.STOP], 64)
        if ended.finish != "stop" or ended.tokens.tolist() != [tiny.EOS]:
            raise Unexpected(f"the end of a response is {ended.finish} with {len(ended.tokens)} tokens")
        return self._judge(done, prompt, 0)

    async def _update(self) -> str:
        began = time.monotonic()
        await self._apply(1)
        took = time.monotonic() - began
        prompt = _prompt(2)
        done = await self._generate("updated", prompt, 64)
        pause = getattr(self._engine, "pause_seconds", None)
        stood = "" if pause is None else f", decoding stood still for {1000 * pause:.0f} ms"
        return f"{self._judge(done, prompt, 1)}; applied in {1000 * took:.0f} ms{stood}"

    async def _prefix_cache(self) -> str:
        prompt = _prompt(3, 200)
        await self._generate("before", prompt, 4)
        await self._apply(2)
        done = await self._generate("after", prompt, 16)
        return self._judge(done, prompt, 2)

    async def _spans(self) -> str:
        prompt = _prompt(4)
        version = await asyncio.to_thread(tiny.make_version, self._folder, 3, self._weights[3])
        async with asyncio.TaskGroup() as group:
            task, heard = self._long(group, prompt, tiny.CONTEXT)  # it outlasts the update on a busy machine too
            await heard.wait()
            await self._running.apply(version)
            for _ in range(16):  # the first tokens may have been sampled before
                heard.clear()
                await heard.wait()
            await self._running.abort("long")
        done = task.result()
        error = self._judge(done, prompt, 2, 3)
        return f"{error}; the new weights sampled from token {done.runs[1][0]} on"

    async def _refusal(self) -> str:
        wrong = {**self._weights[0], "model.nobody.weight": torch.zeros(4, 4, dtype=torch.bfloat16)}
        try:
            await self._running.apply(tiny.make_version(self._folder / "wrong", 9, wrong))
        except WeightsError as error:
            prompt = _prompt(5)
            done = await self._generate("refused", prompt, 16)
            return f"{self._judge(done, prompt, 3)}; {shorten(error.message, 80)}"
        raise Unexpected("weights with an unknown tensor were taken")

    async def _abort(self) -> str:
        prompt = _prompt(6)
        async with asyncio.TaskGroup() as group:
            task, heard = self._long(group, prompt)
            await heard.wait()
            began = time.monotonic()
            count = await self._running.abort("long")
            done = await task
            took = time.monotonic() - began
        if (count, done.finish) != (1, "abort") or not 0 < len(done.tokens) < _LONG:
            raise Unexpected(f"{count} ended, finish {done.finish}, {len(done.tokens)} tokens")
        return f"{self._judge(done, prompt, 3)}, returned after {1000 * took:.0f} ms"

    async def _pause(self) -> str:
        prompt = _prompt(7)
        async with asyncio.TaskGroup() as group:
            task, heard = self._long(group, prompt)
            await heard.wait()
            await self._running.pause("keep")
            try:
                before = self._running.load().tokens_sampled
                await asyncio.sleep(0.5)
                went_on = self._running.load().tokens_sampled - before
            finally:
                await self._running.resume()
            done = await task
        # Tokens in flight when the pause began may still arrive.
        if went_on > 2 * self.config.engine.stream_interval or len(done.tokens) != _LONG:
            raise Unexpected(f"{went_on} tokens came while it was paused, {len(done.tokens)} of {_LONG} in all")
        return self._judge(done, prompt, 3)

    async def _adapters(self) -> str:
        tiny.make_adapter(self._folder / "adapter", 1)
        await self._running.load_adapter("tiny@1", self._folder / "adapter")
        try:
            prompt = _prompt(8)
            request = Request("adapter", np.asarray(prompt, np.int32), 32, adapter="tiny@1")
            done = await self._running.generate(request)
        finally:
            await self._running.unload_adapter("tiny@1")
        merged = tiny.build(tiny.with_adapter(self._weights[3], self._folder / "adapter"))
        error = tiny.worst_error({version: merged for _, version in done.runs}, prompt, done)
        if not error <= 2 * TOLERANCE:
            raise Unexpected(f"log-probabilities with the adapter are off by {error:.3f}")
        return f"off by at most {error:.4f}"

    async def _metrics(self) -> str:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(self._generate(f"many {i}", _prompt(20 + i), 128)) for i in range(16)]
            began = time.monotonic()
            most = 0
            while not all(task.done() for task in tasks):
                most = max(most, self._running.load().running)
                await asyncio.sleep(0.05)
        seconds = time.monotonic() - began
        load = self._running.load()
        if most < 2 or load.tokens_sampled <= 0 or load.version != 3:
            raise Unexpected(
                f"{most} requests ran at the same time, {load.tokens_sampled} tokens, version {load.version}"
            )
        return f"{most} requests at the same time, {16 * 128 / seconds:,.0f} tokens/s"

    async def _sleep(self) -> str:
        await self._running.sleep(1)
        await self._running.wake()
        prompt = _prompt(9)
        return self._judge(await self._generate("woken", prompt, 16), prompt, 3)

    async def _chat(self) -> str:
        return await asyncio.to_thread(check_chat, self._chat_model)

    async def _apply(self, number: int) -> None:
        version = await asyncio.to_thread(tiny.make_version, self._folder, number, self._weights[number])
        await self._running.apply(version)

    def _long(
        self, group: asyncio.TaskGroup, prompt: list[int], limit: int = _LONG
    ) -> tuple[asyncio.Task[Completion], asyncio.Event]:
        """Begin a long request; the event is set when its first tokens are heard."""
        heard = asyncio.Event()
        task = group.create_task(self._generate("long", prompt, limit, listener=lambda *_: heard.set()))
        return task, heard


def check_chat(model: str) -> str:
    """Say how episodes extend the chats of a model, in words; `Refused` when some turns cannot be extended. Slow."""
    tokenizer = Tokenizer.load(ModelConfig(path=model))
    if not tokenizer.template:
        return "no chat template"
    findings = examine_chat(tokenizer)
    if findings.stable:
        return findings.why
    raise Refused(findings.why)


def _prompt(seed: int, length: int = 24) -> list[int]:
    source = np.random.default_rng(seed)
    return [int(token) for token in source.integers(tiny.FIRST_PLAIN, tiny.VOCABULARY, length)]
