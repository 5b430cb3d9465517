"""How long a real server stands still for a version of the weights, while it decodes.

The server decodes until it has answered the call that pauses it: that one waits for the step that runs. It stands still
from then on until it has answered the call that resumes it.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections.abc import AsyncIterator, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from engines_rollout import run_config, server
from random_model import write_model
from spread import ratios, spread
from weights_apply import Road, timing

from streamrl.engine import Request
from streamrl.http import Call
from streamrl.servers.control import ServerControl
from streamrl.servers.server import Server

WIDTH = 8
LENGTH = 480


async def measure(kind: str, folder: Path, size: int, rounds: int) -> dict[str, Any]:
    """Versions over shared memory into a server under load: the pause, and the update in it."""
    weights = write_model(folder / "model", size // 2, torch.bfloat16)
    config = run_config(kind, folder / "model", WIDTH, LENGTH, 512)
    async with server(config, folder) as started:
        external = run_config(kind, folder / "model", WIDTH, LENGTH, 512, started.url)
        async with Server(external, folder, "engine.0", seed=0) as attached:
            road = Road(folder, weights, attached.apply, external)
            async with road.running():
                await road.send()
                with watched() as (asked, updated, resumed):
                    async with busy(attached):
                        for _ in range(rounds):
                            await road.send()
    still = [update + resume for update, resume in zip(updated, resumed, strict=True)]
    return {
        "bytes": sum(tensor.nbytes for tensor in weights.values()),
        "pause_call_milliseconds": spread([1000 * one for one in asked]),
        "update_milliseconds": spread([1000 * one for one in updated]),
        "resume_call_milliseconds": spread([1000 * one for one in resumed]),
        "still_milliseconds": spread([1000 * one for one in still]),
        "ratio_still_to_update": ratios(still, updated),
    }


@contextlib.asynccontextmanager
async def busy(attached: Server) -> AsyncIterator[None]:
    """Requests are always in flight within the block, which begins when all of them are decoded."""
    numbers = itertools.count()

    async def keep() -> None:
        while True:
            await attached.generate(Request(f"r{next(numbers)}", np.arange(16, 32, dtype=np.int32), LENGTH))

    tasks = [asyncio.create_task(keep()) for _ in range(WIDTH)]
    try:
        while (await attached.metrics()).running < WIDTH:  # noqa: ASYNC110  (it is another process)
            await asyncio.sleep(0.05)
        yield
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


@contextlib.contextmanager
def watched() -> Iterator[tuple[list[float], list[float], list[float]]]:
    """Times of the calls around and in each update: pause, the update itself, resume."""
    asked: list[float] = []
    updated: list[float] = []
    resumed: list[float] = []
    send = ServerControl._send

    async def timed(self: ServerControl, calls: Sequence[Call], seconds: float) -> list[Any]:
        took: list[float] = []
        with timing(took):
            answers = await send(self, calls, seconds)
        if list(calls) == list(self._dialect.pause):
            asked.append(took[0])
            updated.append(0.0)
        elif list(calls) == list(self._dialect.resume):
            resumed.append(took[0])
        elif self._stands_still:
            updated[-1] += took[0]
        return answers

    ServerControl._send = timed  # type: ignore[method-assign]
    try:
        yield asked, updated, resumed
    finally:
        ServerControl._send = send  # type: ignore[method-assign]
