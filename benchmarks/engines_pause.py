"""How long a real server stands still for a version of the weights, while it decodes.

The server decodes until it has answered the call that pauses it: that one waits for the step that runs. It stands still
from then on until it has answered the call that resumes it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from engines_rollout import run_config, server
from random_model import write_model
from spread import ratios, spread
from weights_apply import Road, busy, timing

from streamrl.producers.group.controls import Controls
from streamrl.producers.group.server import ServerEngine
from streamrl.servers.kinds import make_dialect

WIDTH = 8


async def measure(kind: str, folder: Path, size: int, rounds: int) -> dict[str, Any]:
    """Versions over shared memory into a server under load: the pause, and the update in it."""
    weights = write_model(folder / "model", size // 2, torch.bfloat16)
    config = run_config(kind, folder / "model", WIDTH, 480, 512)
    async with server(config, folder) as started:
        url = started.url
        external = run_config(kind, folder / "model", WIDTH, 480, 512, url)
        engine = ServerEngine(make_dialect(external), external, url=url)
        await engine.start()
        road = Road(folder, weights, engine, external)
        try:
            async with road.running():
                await road.send()
                with watched() as (asked, updated, resumed):
                    async with busy(engine, WIDTH, 480):
                        for _ in range(rounds):
                            await road.send()
        finally:
            await engine.close()
    still = [update + resume for update, resume in zip(updated, resumed, strict=True)]
    return {
        "bytes": sum(tensor.nbytes for tensor in weights.values()),
        "pause_call_milliseconds": spread([1000 * one for one in asked]),
        "update_milliseconds": spread([1000 * one for one in updated]),
        "resume_call_milliseconds": spread([1000 * one for one in resumed]),
        "still_milliseconds": spread([1000 * one for one in still]),
        "ratio_still_to_update": ratios(still, updated),
    }


@contextlib.contextmanager
def watched() -> Iterator[tuple[list[float], list[float], list[float]]]:
    """Times of the calls around and in each update: pause, the update itself, resume."""
    asked: list[float] = []
    updated: list[float] = []
    resumed: list[float] = []
    must, update = Controls._must, Controls._update

    async def timed_must(self: Controls, calls: Any) -> None:
        with timing(resumed if calls == self._dialect.resume() else asked):
            await must(self, calls)

    async def timed_update(self: Controls, *arguments: Any) -> None:
        with timing(updated):
            await update(self, *arguments)

    Controls._must, Controls._update = timed_must, timed_update  # type: ignore[method-assign]
    try:
        yield asked, updated, resumed
    finally:
        Controls._must, Controls._update = must, update  # type: ignore[method-assign]
