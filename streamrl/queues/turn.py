"""Whose turn it is on devices that the learner shares with engines (`rollout.placement: colocated`).

A lock with leases in Redis: engines share it, the learner has it alone, and a learner that asks goes before engines
that ask. Who dies loses it when its lease ends; by then its process has given back its memory, because a supervisor
kills what is silent for longer. The order is the same for both sides: ask, wait until it is granted, then load; give
memory back, then leave.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import Final, Protocol

from streamrl.errors import DeadlineExceeded, Unreachable
from streamrl.queues.connection import Connection
from streamrl.queues.keys import Keys

logger = logging.getLogger(__name__)
_ASK_SECONDS: Final = 0.05
_RENEWALS: Final = 3
"""A lease is renewed so often in its time."""


class Turn(Protocol):
    """What `EngineSwitch` asks of a turn; the lock is one."""

    seconds: float

    @property
    def settled(self) -> bool:
        """See `DeviceTurn.settled`."""
        ...

    async def use(self, engine: str, *, on_devices: bool) -> bool:
        """See `DeviceTurn.use`."""
        ...

    async def leave(self, engine: str) -> None:
        """See `DeviceTurn.leave`."""


class DeviceTurn:
    """The lock; see the module.

    Args:
        connection: to Redis.
        keys: of the run.
        seconds: length of a lease.
    """

    def __init__(self, connection: Connection, keys: Keys, seconds: float) -> None:
        self._connection = connection
        self._keys = keys
        self.seconds = seconds

    async def use(self, engine: str, *, on_devices: bool) -> bool:
        """Whether an engine may use the devices; renews when it is on them. False: it has to get off and `leave`."""
        keys = [self._keys.turn, self._keys.turn_engines]
        milliseconds = int(self.seconds * 1000)
        return bool(await self._connection.call("turn_use", keys, [engine, milliseconds, int(on_devices)]))

    async def leave(self, engine: str) -> None:
        """Say that an engine has given the devices back. A repeat does nothing."""
        await self._connection.call("turn_leave", [self._keys.turn_engines], [engine])

    async def take(self, learner: str) -> int:
        """Ask for the devices, or renew; returns how many engines still use them, -1 when another learner has them."""
        keys = [self._keys.turn, self._keys.turn_engines]
        return int(await self._connection.call("turn_take", keys, [learner, int(self.seconds * 1000)]))

    @property
    def settled(self) -> bool:
        """False for one lease after a connection error.

        A Redis that was away may have forgotten who is on the devices, who had no chance yet to renew: nobody comes
        onto them in that time.
        """
        return self._connection.since_error() >= self.seconds

    async def give(self, learner: str) -> None:
        """Give the devices back to the engines. A repeat does nothing, and neither does one who does not hold them."""
        await self._connection.call("turn_give", [self._keys.turn], [learner])


async def _nothing() -> None:
    """What there is to move before there is a model."""


class LearnerSwitch:
    """The learner's side: brings the learner onto the devices and off them again.

    `take` and `give` may be called in any order and again; whatever is interrupted (an error, a cancellation, a kill)
    leaves either the learner on the devices with the turn, or off them without it, or a dead process whose lease ends.
    A load that is cancelled counts as being on the devices, until `give`.

    Args:
        turn: the lock.
        nonce: of this learner; no other process has it.
        deadline: longest wait in seconds for engines to leave.
    """

    def __init__(self, turn: DeviceTurn, nonce: str, *, deadline: float) -> None:
        self._turn, self._nonce, self._deadline = turn, nonce, deadline
        self._load: Callable[[], Awaitable[None]] = _nothing
        self._unload: Callable[[], Awaitable[None]] = _nothing
        self._asking = False
        self._held = False

    def attach(self, *, load: Callable[[], Awaitable[None]], unload: Callable[[], Awaitable[None]]) -> None:
        """Say how the learner comes onto the devices and how it leaves them, each whole or not at all."""
        self._load, self._unload = load, unload

    async def take(self) -> None:
        """Return when the engines have left and the learner is on the devices. A repeat does nothing.

        Raises:
            DeadlineExceeded: an engine did not leave in time; the learner is off the devices and asks no more.
            Unreachable: another learner has the devices.
        """
        if self._held:
            return
        self._asking = True
        try:
            async with asyncio.timeout(self._deadline):
                while await self._ask() or not self._turn.settled:  # noqa: ASYNC110 (the lock is in Redis)
                    await asyncio.sleep(_ASK_SECONDS)
        except BaseException as error:
            self._asking = False
            await self._turn.give(self._nonce)
            if isinstance(error, TimeoutError):
                raise DeadlineExceeded(
                    f"engines did not give the devices back within {self._deadline:g} s",
                    "the logs of replicas and reward models say why; it waits for weights.deadline and the longest"
                    " start_deadline of a server on its devices",
                ) from error
            raise
        self._held = True  # also when the load is cancelled: what was begun in a thread goes on there
        try:
            await self._load()
        except Exception:
            self._held = self._asking = False
            await self._turn.give(self._nonce)
            raise

    async def give(self) -> None:
        """Take the learner off the devices, then let the engines on. A repeat does nothing."""
        if self._held:
            await self._unload()
            self._held = False
        if self._asking:
            self._asking = False
            await self._turn.give(self._nonce)

    async def run(self) -> None:
        """Renew until cancelled; owned by the caller's task group.

        Raises:
            Unreachable: the turn was lost while the learner was on the devices: this process must end to leave them.
        """
        while True:
            await asyncio.sleep(self._turn.seconds / _RENEWALS)
            if self._asking and await self._ask() and self._held:
                raise Unreachable("engines came onto the devices while the learner was on them", "it starts again")

    async def _ask(self) -> int:
        left = await self._turn.take(self._nonce)
        if left < 0:
            raise Unreachable("another learner has the devices", "it is the newer one; an older one ends by itself")
        return left


class EngineSwitch:
    """An engine's side: takes it off the devices when the learner asks, and brings it back afterwards.

    Args:
        turn: the lock, or what else says when the engine may be on the devices.
        name: of the replica.
        wake: brings the engine onto the devices; a repeat does nothing.
        sleep: takes it off them; a repeat does nothing.
    """

    def __init__(
        self,
        turn: Turn,
        name: str,
        *,
        wake: Callable[[], Awaitable[None]],
        sleep: Callable[[], Awaitable[None]],
    ) -> None:
        self._turn, self._name = turn, name
        self._wake, self._sleep = wake, sleep

    async def start(self, work: Callable[[], Awaitable[None]]) -> None:
        """Wait for the devices and start the engine on them."""
        while not await self._may_come():  # noqa: ASYNC110 (the lock is in Redis)
            await asyncio.sleep(_ASK_SECONDS)
        await self._renewing(work)

    async def run(self) -> None:
        """Follow the turn until cancelled; the engine is on the devices when it begins.

        An error of `wake` or `sleep` ends it: the engine is not where it should be, so its process has to go. Whoever
        ends the engine calls `DeviceTurn.leave` afterwards.
        """
        awake = True
        while True:
            if awake:
                if not await self._turn.use(self._name, on_devices=True):
                    await self._renewing(self._sleep)
                    awake = False
                    await self._turn.leave(self._name)
            elif await self._may_come():
                await self._renewing(self._wake)
                awake = True
            await asyncio.sleep(_ASK_SECONDS)

    async def _may_come(self) -> bool:
        return self._turn.settled and await self._turn.use(self._name, on_devices=False)

    async def _renewing(self, work: Callable[[], Awaitable[None]]) -> None:
        """Do work that may take longer than a lease; the engine counts as using the devices meanwhile."""

        async def renew() -> None:
            while True:
                await asyncio.sleep(self._turn.seconds / _RENEWALS)
                await self._turn.use(self._name, on_devices=True)

        async with asyncio.TaskGroup() as tasks:
            renewing = tasks.create_task(renew())
            await work()
            renewing.cancel()
