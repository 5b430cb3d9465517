"""The role of one server of a reward model: keeps it running, publishes its URL, lets it sleep without work.

```
start -> heartbeat with the URL -> its death: this role ends, and the supervisor starts both anew
samples without a score -> Demand -> EngineDevices -> sleep | wake     (`reward_models.NAME.sleep`)
```
Where the learner shares the devices (`rollout.placement: colocated`), a server that sleeps also leaves them when the
learner asks for its turn.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Sequence
from contextlib import suppress
from typing import Final

from streamrl.config import RewardModelConfig
from streamrl.config.rewards import REWARD_MODEL_ROLE
from streamrl.consumers.models.servers import ASLEEP, READY, RewardServers
from streamrl.errors import ConfigError, DataError, StreamrlError, Unreachable, WireError, unwrapped
from streamrl.http import BadAnswer, Call, HttpClient
from streamrl.queues.device_lock import DeviceLock, EngineDevices
from streamrl.queues.role import Role
from streamrl.servers.process import ManagedServer, ServerSettings
from streamrl.servers.reward_models import model_server
from streamrl.waits import first_of

logger = logging.getLogger(__name__)
_LINGER: Final = 1.0
_LOOK_SECONDS: Final = 0.25
_CHECK_SECONDS: Final = 5.0
_CHECK_DEADLINE: Final = 10.0
_PATIENCE: Final = 60.0
"""Seconds without an answer to a health check after which a server counts as dead."""
_MOVE_SECONDS: Final = 300.0
"""Longest time to sleep or to wake: weights go between device and host."""


class Demand:
    """Whether a server that sleeps without work should be awake; pure, with the clock as an argument. It begins awake.

    ```
    awake  --nothing waits, for as long as `linger`-------------------> asleep
    asleep --`wake_at` samples wait, or fewer for `wake_after`--------> awake
    ```
    Fewer than `wake_at` samples wake it too, after a while: the rest of the run may wait for exactly these. `linger`
    avoids sleeping and waking for a short pause.
    """

    def __init__(self, wake_at: int, wake_after: float, linger: float) -> None:
        self.awake = True
        self._wake_at, self._wake_after, self._linger = wake_at, wake_after, linger
        self._since: float | None = None

    def see(self, waiting: int, now: float) -> bool:
        """Whether the server should be awake while `waiting` samples wait; a clock that goes back restarts the time."""
        wanted = waiting > 0
        if wanted == self.awake:
            self._since = None
            return self.awake
        if self._since is None or now < self._since:
            self._since = now
        patience = self._wake_after if wanted else self._linger
        if waiting >= self._wake_at or now - self._since >= patience:
            self.awake, self._since = wanted, None
        return self.awake


async def run_reward_model(role: Role) -> None:
    """Run one server of a reward model until `role.stop` is set.

    Unreachable: the server ended, hangs or does not wake; the supervisor starts the role again.
    """
    name, _, number = role.name.removeprefix(f"{REWARD_MODEL_ROLE}.").rpartition(".")
    config = role.config.reward_models.get(name)
    if config is None or config.url:
        known = ", ".join(role.config.reward_servers) or "none"
        raise ConfigError(f"there is no reward model {name} whose servers streamrl starts", f"known: {known}")
    with unwrapped():
        await ServedModel(role, name, int(number), config).run()


class ServedModel:
    def __init__(self, role: Role, name: str, number: int, config: RewardModelConfig) -> None:
        section = f"reward_models.{name}"
        self._role = role
        self._config = config
        self._kind = model_server(name, config)
        settings = ServerSettings(
            section, config.model, config.start_deadline, role.config.supervisor, dict(config.variables)
        )
        devices = config.devices[number % len(config.devices)] if config.devices else ""
        server_name = f"{role.name}.server0"
        self._server = ManagedServer(self._kind, settings, role.run_dir, server_name, devices, seed=number)
        self._demand = Demand(config.wake_at, config.wake_after, _LINGER)
        shared = config.sleep and role.config.rollout.placement == "colocated"
        self._turn = WorkTurn(self._demand, role.ledgers.device_lock if shared else None)
        self._switch = EngineDevices(self._turn, role.name, wake=self._wake, sleep=self._sleep)
        self._client: HttpClient | None = None
        self._asleep = False
        self._can_sleep = config.sleep

    async def run(self) -> None:
        """Start, serve, stop. However it ends, the server is gone afterwards, and no worker asks it any more."""
        await first_of(self._live(), self._role.stop.wait())

    async def _live(self) -> None:
        try:
            await self._switch.start(self._start)
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(self._watch_death())
                tasks.create_task(self._check())
                if self._config.sleep:
                    tasks.create_task(self._count())
                    tasks.create_task(self._take_turns())
        finally:
            await self._end()

    async def _start(self) -> None:
        url = await self._server.start()
        self._client = HttpClient(url, hint=f"its log: {self._server.log}")
        self._role.status.update({"url": url, "wakes": 0} if self._config.sleep else {"url": url})
        await self._tell(READY)
        self._role.ready()

    async def _end(self) -> None:
        self._role.status.pop("url", None)
        try:
            with suppress(StreamrlError):  # Redis may be away; the entry then ends with the heartbeat
                await self._role.beat()
            if self._client is not None:
                await self._client.close()
        finally:
            await self._server.stop()
        with suppress(StreamrlError):
            await self._turn.leave(self._role.name)

    async def _watch_death(self) -> None:
        cause = await self._server.wait_death()
        raise Unreachable(f"{self._server.name}: {cause}", f"its log: {self._server.log}")

    async def _check(self) -> None:
        """Treat a server that hangs as dead. A sleeping server need not answer."""
        answered = time.monotonic()
        while True:
            await asyncio.sleep(_CHECK_SECONDS)
            try:
                if not self._asleep:
                    await self._call(self._kind.ready(), _CHECK_DEADLINE)
            except (Unreachable, DataError, WireError) as error:
                silent = time.monotonic() - answered
                if silent > _PATIENCE:
                    raise Unreachable(f"{self._server.name} has not answered for {silent:.0f} s: {error}") from error
            else:
                answered = time.monotonic()

    # --- sleep -------------------------------------------------------------------------------------------------------

    async def _count(self) -> None:
        loop = asyncio.get_running_loop()
        config, servers = self._role.config, RewardServers(self._role.ledgers)
        sizes = config.sampling.responses, config.evaluation.samples
        while True:
            self._demand.see(await servers.waiting(*sizes), loop.time())
            await asyncio.sleep(_LOOK_SECONDS)

    async def _take_turns(self) -> None:
        """Sleep and wake by demand; at the end a server that is awake is put to sleep."""
        try:
            await self._switch.run()
        finally:
            if self._server.alive:
                with suppress(StreamrlError, TimeoutError):
                    async with asyncio.timeout(self._role.config.supervisor.term_grace):
                        await self._sleep()

    async def _sleep(self) -> None:
        """Free the memory. No effect on a repeat, or after the server has refused."""
        if self._asleep or not self._can_sleep:
            return
        self._asleep = True
        await self._tell(ASLEEP)  # before it sleeps, so that no worker asks it then
        began = time.monotonic()
        try:
            await self._send(self._kind.profile.sleep)
        except (BadAnswer, DataError) as error:
            if self._turn.shared:
                raise Unreachable(f"{self._server.name} does not leave its devices: {error.message}") from error
            self._asleep = self._can_sleep = False
            logger.warning(
                "a server cannot sleep and stays awake",
                extra={"server": self._server.name, "why": error.message, "hint": "see its log, or leave out sleep"},
            )
            await self._tell(READY)
            return
        self._note("asleep", began)

    async def _wake(self) -> None:
        if not self._asleep:
            return
        began = time.monotonic()
        try:
            await self._send(self._kind.profile.wake)
        except (BadAnswer, DataError) as error:
            raise Unreachable(f"{self._server.name} does not wake: {error.message}", "it starts again") from error
        self._asleep = False
        self._role.status["wakes"] = int(self._role.status["wakes"]) + 1
        await self._tell(READY)
        self._note("awake", began)

    def _note(self, what: str, began: float) -> None:
        seconds = round(time.monotonic() - began, 3)
        logger.info(what, extra={"server": self._server.name, "seconds": seconds})
        self._role.record({"server": what, "seconds": seconds})

    async def _tell(self, state: str) -> None:
        self._role.status["server"] = state
        await self._role.beat()

    async def _send(self, calls: Sequence[Call]) -> None:
        for call in calls:
            await self._call(call, _MOVE_SECONDS)

    async def _call(self, call: Call, seconds: float) -> None:
        assert self._client is not None, "it is made at the start"
        await self._client.call(call, seconds)


class WorkTurn:
    """A turn that also ends when there is no work, and does not begin without.

    `shared` is the device lock if the learner shares its devices, else None.
    """

    def __init__(self, demand: Demand, shared: DeviceLock | None) -> None:
        self._demand = demand
        self.shared = shared
        self.seconds = shared.seconds if shared is not None else _MOVE_SECONDS

    @property
    def settled(self) -> bool:
        return self.shared is None or self.shared.settled

    async def use(self, engine: str, *, on_devices: bool) -> bool:
        """Who is on the devices is counted in the lock until it has left, also without work."""
        if not on_devices and not self._demand.awake:
            return False
        granted = self.shared is None or await self.shared.use(engine, on_devices=on_devices)
        return granted and self._demand.awake

    async def leave(self, engine: str) -> None:
        if self.shared is not None:
            await self.shared.leave(engine)
