"""What the roles of servers have in common: `engine.N` in `engine.py`, `reward_model.NAME.N` in `reward_models.py`.

```
serving  start or attach -> work of the role -> no url in the heartbeat -> end of the server
         EngineDevices -> wake | sleep     (`rollout.placement: colocated`)
watch    sign of life -> Liveness          its death, or a hang: the role ends, and the supervisor starts both anew
```
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from typing import Final

from streamrl.errors import StreamrlError, Unreachable
from streamrl.queues.device_lock import EngineDevices
from streamrl.queues.role import Role
from streamrl.servers.dialect import ServerMetrics
from streamrl.servers.process import ANSWER_SECONDS, ManagedServer

POLL_SECONDS: Final = 0.5
# Upper bound of the time counted between two looks: a process that was stopped (SIGSTOP) did not really wait.
_LONGEST_GAP: Final = 2 * (ANSWER_SECONDS + POLL_SECONDS)


class Liveness:
    """Judges whether a server lives: no sign of it, or no token for its requests, for `patience` seconds is death."""

    def __init__(self, patience: float, now: float) -> None:
        self._patience = patience
        self._looked_at = now
        self._figures = ServerMetrics()
        self._still = self._silent = 0.0

    def look(self, now: float, figures: ServerMetrics | None, *, held: bool) -> str:
        """Return why it counts as dead now, or an empty string; `figures` is None when it did not answer."""
        passed, self._looked_at = min(now - self._looked_at, _LONGEST_GAP, self._patience / 3), now
        self._silent = 0.0 if held or figures is not None else self._silent + passed
        moves = held or figures is None or figures != self._figures or not figures.running + figures.waiting
        self._still = 0.0 if moves else self._still + passed
        self._figures = figures or self._figures
        if self._still >= self._patience:
            return f"no token and no other sign of progress for {self._still:.0f} s"
        return f"no answer to anything for {self._silent:.0f} s" if self._silent >= self._patience else ""


@asynccontextmanager
async def serving(
    role: Role, devices: EngineDevices, start: Callable[[], Awaitable[object]], close: Callable[[], Awaitable[None]]
) -> AsyncIterator[None]:
    """A started server for this block. However it ends, workers call the server no more, before it is closed."""
    async with devices.engine(start, close):
        try:
            yield
        finally:
            role.status.pop("url", None)
            with suppress(StreamrlError):  # Redis may be away; the entry then ends with the heartbeat
                await role.beat()


async def watch(
    process: ManagedServer | None,
    look: Callable[[], Awaitable[ServerMetrics | None]],
    patience: float,
    held: Callable[[], bool],
) -> None:
    """Raise `Unreachable` when a server dies, or hangs although not `held`; `process` is None for one at a URL."""
    loop = asyncio.get_running_loop()
    liveness = Liveness(patience, loop.time())
    while True:
        await asyncio.sleep(POLL_SECONDS)
        if process is not None and not process.alive:
            raise Unreachable(f"{process.name} ended: {await process.wait_death()}", f"its log: {process.log}")
        figures = await look()
        if why := liveness.look(loop.time(), figures, held=held()):
            raise Unreachable(f"the server hangs: {why}", "see its log")
