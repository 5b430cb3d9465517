"""How long a real server stands still for a version of the weights, while it decodes."""

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

from streamrl.producers.servers.controls import Controls
from streamrl.producers.servers.dialects import make_dialect
from streamrl.producers.servers.server import ServerEngine

WIDTH = 8


async def measure(kind: str, folder: Path, size: int, rounds: int) -> dict[str, Any]:
    """Versions over shared memory into a server under load: the pause, and the update in it."""
    weights = write_model(folder / "model", size // 2, torch.bfloat16)
    config = run_config(kind, folder / "model", WIDTH, 480, 512)
    pauses: list[float] = []
    async with server(config, folder) as url:
        external = run_config(kind, folder / "model", WIDTH, 480, 512, url)
        engine = ServerEngine(make_dialect(external), external, url=url)
        await engine.start()
        road = Road(folder, weights, engine, external)
        try:
            async with road.running():
                await road.send()
                with updates() as updated:
                    async with busy(engine, WIDTH, 480):
                        for _ in range(rounds):
                            await road.send()
                            pauses.append(engine.pause_seconds)
        finally:
            await engine.close()
    return {
        "bytes": sum(tensor.nbytes for tensor in weights.values()),
        "pause_milliseconds": spread([1000 * one for one in pauses]),
        "update_milliseconds": spread([1000 * one for one in updated]),
        "ratio_pause_to_update": ratios(pauses, updated),
    }


@contextlib.contextmanager
def updates() -> Iterator[list[float]]:
    """Times of the calls that change the weights, from the first request to the last answer."""
    found: list[float] = []
    update = Controls._update

    async def timed(self: Controls, *arguments: Any) -> None:
        with timing(found):
            await update(self, *arguments)

    Controls._update = timed  # type: ignore[method-assign]
    try:
        yield found
    finally:
        Controls._update = update  # type: ignore[method-assign]
