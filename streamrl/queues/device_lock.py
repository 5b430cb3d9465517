"""The lock on devices that the learner shares with engines (`rollout.placement: colocated`).

Engines share it, the learner has it alone, and a learner that asks goes before engines that ask. It consists of leases
in Redis: a dead process loses it when its lease ends, and by then its memory is free, because a supervisor kills a
process that is silent for longer. Both sides ask, wait until it is granted, load; later they free the memory, then give
the lock back.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Final

from streamrl.errors import DeadlineExceeded, Unreachable
from streamrl.queues.connection import Connection
from streamrl.queues.keys import Keys

_ASK_SECONDS: Final = 0.05
_RENEWALS: Final = 3
"""Renewals in the time of one lease."""


class DeviceLock:
    """`seconds` is the length of a lease."""

    def __init__(self, connection: Connection, keys: Keys, seconds: float) -> None:
        self._connection = connection
        self._keys = [keys.device_lock, keys.device_engines]
        self.seconds = seconds

    @property
    def settled(self) -> bool:
        """False for one lease after a connection error.

        A Redis that was away may have forgotten which side is on the devices, and the holder could not renew yet:
        neither side may load in that time.
        """
        return self._connection.since_error() >= self.seconds

    async def use(self, engine: str, *, on_devices: bool) -> bool:
        """Whether an engine may use the devices; renews if it is on them. False: it has to get off and `leave`."""
        milliseconds = int(self.seconds * 1000)
        return bool(await self._connection.call("device_use", self._keys, [engine, milliseconds, int(on_devices)]))

    async def leave(self, engine: str) -> None:
        """Record that an engine has left the devices. A repeat does nothing."""
        await self._connection.call("device_leave", self._keys[1:], [engine])

    async def take(self, learner: str) -> int:
        """Ask for the devices, or renew; returns how many engines still use them, -1 if another learner has them."""
        return int(await self._connection.call("device_take", self._keys, [learner, int(self.seconds * 1000)]))

    async def give(self, learner: str) -> None:
        await self._connection.call("device_give", self._keys[:1], [learner])


async def _nothing() -> None:
    """What there is to move before there is a model."""


class LearnerDevices:
    """The learner's side: moves the learner onto the devices and off them again.

    `take` and `give` may be called in any order and repeated. An interruption (error, cancellation, kill) leaves the
    learner on the devices with the lock, or off them without it, or a dead process whose lease ends. A cancelled load
    counts as being on the devices until `give`. `nonce` identifies this process; engines may take `deadline` seconds to
    leave.
    """

    def __init__(self, lock: DeviceLock, nonce: str, *, deadline: float) -> None:
        self._lock, self._nonce, self._deadline = lock, nonce, deadline
        self._load: Callable[[], Awaitable[None]] = _nothing
        self._unload: Callable[[], Awaitable[None]] = _nothing
        self._asking = False
        self._on_devices = False

    def attach(self, *, load: Callable[[], Awaitable[None]], unload: Callable[[], Awaitable[None]]) -> None:
        """Set how the learner moves onto the devices and off them, each whole or not at all."""
        self._load, self._unload = load, unload

    async def take(self) -> None:
        """Return when the engines have left and the learner is on the devices. A repeat does nothing.

        DeadlineExceeded: an engine did not leave in time; the learner is off the devices and asks no more. Unreachable:
        another learner has the devices.
        """
        if self._on_devices:
            return
        self._asking = True
        try:
            async with asyncio.timeout(self._deadline):
                while await self._ask() or not self._lock.settled:  # noqa: ASYNC110 (the lock is in Redis)
                    await asyncio.sleep(_ASK_SECONDS)
        except BaseException as error:
            self._asking = False
            await self._lock.give(self._nonce)
            if isinstance(error, TimeoutError):
                raise DeadlineExceeded(
                    f"engines did not give the devices back within {self._deadline:g} s",
                    "the logs of replicas and reward models say why; it waits for weights.deadline and the longest"
                    " start_deadline of a server on its devices",
                ) from error
            raise
        self._on_devices = True  # also when the load is cancelled: its thread goes on
        try:
            await self._load()
        except Exception:
            self._on_devices = self._asking = False
            await self._lock.give(self._nonce)
            raise

    async def give(self) -> None:
        """Take the learner off the devices, then let the engines on. A repeat does nothing."""
        if self._on_devices:
            await self._unload()
            self._on_devices = False
        if self._asking:
            self._asking = False
            await self._lock.give(self._nonce)

    async def run(self) -> None:
        """Renew until cancelled; Unreachable: the lock was lost, so this process must end to leave the devices."""
        while True:
            await asyncio.sleep(self._lock.seconds / _RENEWALS)
            if self._asking and await self._ask() and self._on_devices:
                raise Unreachable("engines came onto the devices while the learner was on them", "it starts again")

    async def _ask(self) -> int:
        left = await self._lock.take(self._nonce)
        if left < 0:
            raise Unreachable("another learner has the devices", "it is the newer one; an older one ends by itself")
        return left


class EngineDevices:
    """An engine's side: moves it off the devices when the learner asks, and back afterwards.

    Repeats of `wake` and `sleep` do nothing. `lock` is None where the learner does not share the devices.
    """

    def __init__(
        self,
        lock: DeviceLock | None,
        name: str,
        *,
        wake: Callable[[], Awaitable[None]],
        sleep: Callable[[], Awaitable[None]],
    ) -> None:
        self._lock, self._name = lock, name
        self._wake, self._sleep = wake, sleep

    @asynccontextmanager
    async def engine(
        self, start: Callable[[], Awaitable[object]], close: Callable[[], Awaitable[None]]
    ) -> AsyncIterator[None]:
        """Start an engine when the lock admits it, follow the lock within the block, and close it before it leaves.

        An `ExceptionGroup` says that it could not move: the block is cancelled then, and the process has to end.
        """
        try:
            await self.start(start)
            async with asyncio.TaskGroup() as tasks:
                switching = tasks.create_task(self.run(), name="device lock")
                yield
                switching.cancel()
        finally:
            await close()
            await self._leave()

    async def start(self, work: Callable[[], Awaitable[object]]) -> None:
        while not await self._may_come():  # noqa: ASYNC110 (the lock is in Redis)
            await asyncio.sleep(_ASK_SECONDS)
        await self._renewing(work)

    async def run(self) -> None:
        """Follow the lock until cancelled; the engine is on the devices when it begins.

        An error of `wake` or `sleep` ends it, and the process has to end, because the engine is on the wrong side. The
        caller ends the engine and then calls `DeviceLock.leave`.
        """
        awake = True
        while self._lock is not None:
            if awake:
                if not await self._lock.use(self._name, on_devices=True):
                    await self._renewing(self._sleep)
                    awake = False
                    await self._leave()
            elif await self._may_come():
                await self._renewing(self._wake)
                awake = True
            await asyncio.sleep(_ASK_SECONDS)

    async def _may_come(self) -> bool:
        lock = self._lock
        return lock is None or (lock.settled and await lock.use(self._name, on_devices=False))

    async def _leave(self) -> None:
        if self._lock is not None:
            await self._lock.leave(self._name)

    async def _renewing(self, work: Callable[[], Awaitable[object]]) -> None:
        """Work that may outlast a lease: the engine counts as using the devices meanwhile."""

        async def renew() -> None:
            while (lock := self._lock) is not None:
                await asyncio.sleep(lock.seconds / _RENEWALS)
                await lock.use(self._name, on_devices=True)

        async with asyncio.TaskGroup() as tasks:
            renewing = tasks.create_task(renew())
            await work()
            renewing.cancel()
