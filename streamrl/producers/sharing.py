"""A rollout replica on devices that it shares with the learner (`rollout.placement: colocated`)."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from streamrl.config import RunConfig
from streamrl.engine import Engine
from streamrl.producers.colocated import ColocatedEngine
from streamrl.producers.group.fleet import stop_tokens_of
from streamrl.queues import Role
from streamrl.queues.device_lock import EngineDevices


@asynccontextmanager
async def taking_turns(role: Role, engine: Engine) -> AsyncIterator[Engine]:
    """Start an engine when it is its turn, and for the length of the block let it leave and come back.

    Raises:
        ExceptionGroup: also when the engine could not leave or come back; the block is cancelled then, and the process
            has to end.
    """
    config = role.config
    stops = await asyncio.to_thread(stop_tokens_of, config.model.path)
    shared = ColocatedEngine(engine, stops=stops, context=config.model.context, level=1 if _has_devices(config) else 0)
    switch = EngineDevices(role.ledgers.device_lock, role.name, wake=shared.come_back, sleep=shared.leave)
    try:
        await switch.start(shared.start)
        async with asyncio.TaskGroup() as tasks:
            switching = tasks.create_task(switch.run(), name="turn on the devices")
            yield shared
            switching.cancel()
    finally:
        await shared.close()
        await role.ledgers.device_lock.leave(role.name)


def _has_devices(config: RunConfig) -> bool:
    """Whether there is memory of a device to be given back; on a CPU the two share only its cores."""
    import torch

    return config.engine.device != "cpu" and torch.cuda.is_available()
