"""The learner on devices that it shares with engines (`rollout.placement: colocated`)."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from streamrl.queues.device_lock import LearnerDevices
from streamrl.queues.role import Role


@asynccontextmanager
async def on_devices(role: Role, rank: int) -> AsyncIterator[LearnerDevices | None]:
    """Have the devices when the block begins; None when they are the learner's own, or another rank takes care of it.

    Raises:
        DeadlineExceeded: engines did not leave.
        ExceptionGroup: also when the turn was lost; the block is cancelled then, and the process has to end.
    """
    if role.config.rollout.placement != "colocated" or rank:
        yield None
        return
    switch = LearnerDevices(role.ledgers.device_lock, uuid.uuid4().hex, deadline=role.config.turn_deadline)
    async with asyncio.TaskGroup() as tasks:
        renewing = tasks.create_task(switch.run(), name="turn on the devices")
        await switch.take()
        yield switch
        renewing.cancel()
