"""A rollout replica on devices that it shares with the learner (`rollout.placement: colocated`).

It leaves the devices when it is asked to, and nothing that was sampled is lost.

```
leave:  abort (what was sampled stays) -> sleep
return: wake the weights -> apply the version that came meanwhile -> wake keys and values -> go on with every response
```
`queues.device_lock.EngineDevices` says when.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import replace
from typing import Final, Literal

import numpy as np
import torch
from typing_extensions import override

from streamrl.config import RunConfig
from streamrl.engine import Completion, EngineLoad, Finish, ReplicaEngine, Request, Runs, first_tokens, join_runs
from streamrl.errors import Refused, Unreachable
from streamrl.producers.engines.hf import HfEngine
from streamrl.producers.engines.model import stop_tokens_of
from streamrl.queues import Role
from streamrl.queues.device_lock import EngineDevices
from streamrl.weight_sync.tensors import Version

_ABORTS: Final = 20
_ABORT_PAUSE: Final = 0.05


@asynccontextmanager
async def under_device_lock(role: Role, engine: HfEngine) -> AsyncIterator[ReplicaEngine]:
    """Start an engine when the device lock admits it, and let it leave and come back within the block."""
    config = role.config
    stops = await asyncio.to_thread(stop_tokens_of, config.model.path)
    shared = ColocatedEngine(engine, stops=stops, context=config.model.context, level=1 if _has_devices(config) else 0)
    switch = EngineDevices(role.ledgers.device_lock, role.name, wake=shared.come_back, sleep=shared.leave)
    async with switch.engine(shared.start, shared.close):
        yield shared


def _has_devices(config: RunConfig) -> bool:
    """Whether the run uses device memory that can be freed; on a CPU the two share only its cores."""
    return config.engine.device != "cpu" and torch.cuda.is_available()


class PartialResponse:
    """What was sampled so far for one request, in pieces; `stops` end it, and so does a full `context`."""

    def __init__(self, request: Request, stops: frozenset[int], context: int) -> None:
        self._request = request
        self._stops = stops
        self._limit = min(request.max_new_tokens, context - len(request.tokens))
        self._tokens = np.zeros(0, dtype=np.int32)
        self._logprobs = np.zeros(0, dtype=np.float32)
        self._runs: Runs = []
        self._cached: int | None = None  # of the first piece: later ones begin with what was sampled here

    def __len__(self) -> int:
        return len(self._tokens)

    async def complete(self, ask: Callable[[Request], Awaitable[Completion | None]]) -> Completion:
        """Ask for the rest after every abort until the response has ended; `ask` returns None to end it as it is."""
        loop = asyncio.get_running_loop()
        start = loop.time()
        while (piece := await ask(self.rest())) is not None:
            if piece.finish != "abort":
                return self.joined(piece, loop.time() - start)
            self.add(piece)
            if self.finish is not None:
                return self.ended(self.finish, loop.time() - start)
        return self.ended("abort", loop.time() - start)

    @property
    def finish(self) -> Finish | None:
        """Why the response is complete; None when tokens are left to sample."""
        if len(self) and int(self._tokens[-1]) in self._stops:
            return "stop"
        return "length" if len(self) and len(self) >= self._limit else None

    def add(self, piece: Completion) -> None:
        tokens = piece.tokens[: max(0, self._limit - len(self))].tolist()
        count = next((at + 1 for at, token in enumerate(tokens) if token in self._stops), len(tokens))
        whole = self.joined(first_tokens(piece, count), 0.0)
        self._tokens, self._logprobs, self._runs = whole.tokens, whole.logprobs, whole.runs
        self._cached = whole.cached_tokens

    def rest(self) -> Request:
        prompt = np.concatenate([self._request.tokens, self._tokens])
        return replace(self._request, tokens=prompt, max_new_tokens=self._request.max_new_tokens - len(self))

    def joined(self, last: Completion, seconds: float) -> Completion:
        return replace(
            last,
            tokens=np.concatenate([self._tokens, last.tokens]),
            logprobs=np.concatenate([self._logprobs, last.logprobs]),
            runs=join_runs(self._runs, len(self), last.runs),
            seconds=seconds,
            cached_tokens=last.cached_tokens if self._cached is None else self._cached,
        )

    def ended(self, finish: Finish, seconds: float) -> Completion:
        return Completion(
            tokens=self._tokens,
            logprobs=self._logprobs,
            runs=list(self._runs),
            finish=finish,
            seconds=seconds,
            cached_tokens=self._cached or 0,
        )


class ColocatedEngine(ReplicaEngine):
    """An engine that can be taken off its devices and put back, with requests in flight.

    Requests in flight or arriving meanwhile wait and continue afterwards with the tokens they have; later tokens carry
    the version then in force. `level` is that of `HfEngine.sleep` off the devices: 1; 0 where only a CPU is shared.
    """

    def __init__(self, engine: HfEngine, *, stops: frozenset[int], context: int, level: Literal[0, 1]) -> None:
        self._engine = engine
        self._stops, self._context = stops, context
        self._level = level
        self._serving = asyncio.Event()
        self._weights = asyncio.Event()
        self._applied = asyncio.Event()
        self._applying = 0
        self._leaves = 0
        self._closed = False
        self._serving.set()
        self._weights.set()
        self._applied.set()

    async def leave(self) -> None:
        """Leave the devices; `Refused` when requests are still decoded although they were aborted. Repeatable."""
        self._leaves += 1
        self._serving.clear()
        await self._applied.wait()
        self._weights.clear()
        for _ in range(_ABORTS):
            await self._engine.abort()
            with suppress(Refused):
                await self._engine.sleep(self._level)
                return
            await asyncio.sleep(_ABORT_PAUSE)
        await self._engine.sleep(self._level)

    async def come_back(self) -> None:
        """Take the devices again, with the newest version that waits to be applied. A repeat does nothing."""
        if self._serving.is_set():
            return
        if self._applying:
            await self._engine.wake(("weights",))
            self._weights.set()
            await self._applied.wait()
        await self._engine.wake()
        self._weights.set()
        self._serving.set()

    # --- ReplicaEngine -----------------------------------------------------------------------------------------------

    @override
    async def start(self) -> None:
        await self._engine.start()

    @override
    async def close(self) -> None:
        self._closed = True
        self._serving.set()  # what waits ends with what it has
        await self._engine.close()
        self._weights.set()  # an update that waits now fails because the engine is closed

    @override
    async def generate(self, request: Request) -> Completion:
        if self._closed:
            raise Unreachable("the engine is closed")
        left = -1

        async def ask(rest: Request) -> Completion | None:
            nonlocal left
            if left == self._leaves:  # nobody has left since the last piece: the engine itself has ended it
                return None
            while not self._serving.is_set():  # it may leave again before this task has its turn
                await self._serving.wait()
            left = self._leaves
            return None if self._closed else await self._engine.generate(rest)

        return await PartialResponse(request, self._stops, self._context).complete(ask)

    @override
    async def apply(self, version: Version) -> None:
        # Off the devices it waits until `come_back` has woken the weights; `come_back` then waits for it.
        self._applying += 1
        self._applied.clear()
        try:
            await self._weights.wait()
            await self._engine.apply(version)
        finally:
            self._applying -= 1
            if not self._applying:
                self._applied.set()

    @override
    def load(self) -> EngineLoad:
        return self._engine.load()

    @override
    async def health(self) -> None:
        await self._engine.health()
