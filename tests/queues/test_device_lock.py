"""The lock of shared devices: one side at a time, whatever dies or forgets."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator

import pytest

from streamrl.config import LeaseConfig, RunConfig
from streamrl.errors import DeadlineExceeded, Unreachable
from streamrl.queues import Ledgers, open_ledgers
from streamrl.queues.device_lock import EngineDevices, LearnerDevices
from tests.redis_kit import RedisRun


class Devices:
    """Shared memory: notes who is on it and refuses both sides at once."""

    def __init__(self) -> None:
        self.engines: set[str] = set()
        self.learner = False
        self.turns = 0

    async def wake(self, name: str) -> None:
        await asyncio.sleep(random.random() * 0.01)
        assert not self.learner, "an engine came while the learner was there"
        self.engines.add(name)

    async def sleep(self, name: str) -> None:
        await asyncio.sleep(random.random() * 0.01)
        self.engines.discard(name)

    async def load(self) -> None:
        assert not self.engines, "the learner came while engines were there"
        self.learner = True
        self.turns += 1

    async def unload(self) -> None:
        self.learner = False


@pytest.fixture
async def quick(run: RedisRun) -> AsyncIterator[Ledgers]:
    """Ledgers with leases of 0.3 s."""
    async with open_ledgers(
        RunConfig(name="turn", redis=run.config, lease=LeaseConfig(seconds=0.3)), run.run_dir
    ) as opened:
        yield opened


def engine(ledgers: Ledgers, devices: Devices, name: str) -> EngineDevices:
    return EngineDevices(ledgers.device_lock, name, wake=lambda: devices.wake(name), sleep=lambda: devices.sleep(name))


def learner(ledgers: Ledgers, devices: Devices, nonce: str = "L", deadline: float = 20.0) -> LearnerDevices:
    switch = LearnerDevices(ledgers.device_lock, nonce, deadline=deadline)
    switch.attach(load=devices.load, unload=devices.unload)
    return switch


async def run_engine(ledgers: Ledgers, devices: Devices, name: str) -> None:
    switch = engine(ledgers, devices, name)
    await switch.start(lambda: devices.wake(name))
    await switch.run()


async def run_until_awake(ledgers: Ledgers) -> None:
    devices = Devices()
    await engine(ledgers, devices, "rollout.0").start(lambda: devices.wake("rollout.0"))
    assert devices.engines


async def test_both_sides_take_turns_and_never_meet(quick: Ledgers):
    devices = Devices()
    side = learner(quick, devices)
    async with asyncio.TaskGroup() as tasks:
        running = [tasks.create_task(run_engine(quick, devices, f"rollout.{at}")) for at in range(3)]
        running.append(tasks.create_task(side.run()))
        for _ in range(5):
            async with asyncio.timeout(20):
                while len(devices.engines) < 3:  # noqa: ASYNC110
                    await asyncio.sleep(0.005)
            await side.take()
            assert devices.learner
            assert not devices.engines
            await side.take()  # a repeat changes nothing
            await side.give()
            await side.give()
        for task in running:
            task.cancel()
    assert devices.turns == 5


async def test_an_engine_that_died_is_waited_for_until_its_lease_ends(quick: Ledgers):
    assert await quick.device_lock.use("rollout.0", on_devices=False)  # and is never heard of again
    assert await quick.device_lock.take("L") == 1
    assert not await quick.device_lock.use("rollout.1", on_devices=False)
    await learner(quick, Devices()).take()


async def test_a_learner_that_died_gives_the_devices_back_when_its_lease_ends(quick: Ledgers):
    assert await quick.device_lock.take("L") == 0
    assert not await quick.device_lock.use("rollout.0", on_devices=False)
    async with asyncio.timeout(20):
        await run_until_awake(quick)


async def test_two_learners_never_have_the_devices_at_the_same_time(quick: Ledgers):
    first, second = learner(quick, Devices(), "A"), learner(quick, Devices(), "B")
    await first.take()
    with pytest.raises(Unreachable, match="another learner"):
        await second.take()
    await quick.device_lock.give("B")  # one who does not hold them frees nothing
    assert await quick.device_lock.take("B") == -1
    await first.give()
    assert await quick.device_lock.take("B") == 0


@pytest.mark.parametrize("where", ["asking", "loading"])
@pytest.mark.parametrize("how", ["cancelled", "error"])
async def test_an_interrupted_take_leaves_the_devices_to_the_engines(quick: Ledgers, where: str, how: str):
    devices = Devices()
    inside = asyncio.Event()

    async def load() -> None:
        inside.set()
        if how == "error":
            raise MemoryError("no room")
        await asyncio.sleep(60)

    unloaded = asyncio.Event()

    async def unload() -> None:
        unloaded.set()

    side = LearnerDevices(quick.device_lock, "L", deadline=0.2)
    side.attach(load=load, unload=unload)
    if where == "asking":
        assert await quick.device_lock.use("rollout.0", on_devices=True)
    task = asyncio.create_task(side.take())
    if how == "cancelled":
        if where == "loading":
            await inside.wait()
        else:
            async with asyncio.timeout(10):
                while await quick.device_lock.use("rollout.1", on_devices=False):  # noqa: ASYNC110
                    await asyncio.sleep(0.005)
        task.cancel()
    with pytest.raises((MemoryError, DeadlineExceeded, asyncio.CancelledError)):
        await task
    assert not devices.learner
    if (where, how) == ("loading", "cancelled"):  # what the load began may go on in a thread
        assert not await quick.device_lock.use("rollout.2", on_devices=False)
        await side.give()
        assert unloaded.is_set()
    assert await quick.device_lock.use("rollout.2", on_devices=False)


async def test_an_engine_that_cannot_leave_ends_its_replica(quick: Ledgers):
    async def stuck() -> None:
        raise Unreachable("the engine died")

    switch = EngineDevices(quick.device_lock, "rollout.0", wake=stuck, sleep=stuck)
    assert await quick.device_lock.use("rollout.0", on_devices=False)
    async with asyncio.timeout(10):
        running = asyncio.create_task(switch.run())
        assert await quick.device_lock.take("L") == 1
        with pytest.raises(BaseExceptionGroup) as caught:
            await running
    assert caught.group_contains(Unreachable)


async def test_a_learner_whose_turn_was_lost_ends(quick: Ledgers):
    devices = Devices()
    side = learner(quick, devices)
    await side.take()
    await quick.connection.read("DEL", "{sr:turn}:turn")  # its lease ended while it stood still
    assert await quick.device_lock.use("rollout.0", on_devices=False)
    async with asyncio.timeout(20):
        with pytest.raises(Unreachable, match="engines came"):
            await side.run()


async def test_a_redis_that_forgot_who_is_on_the_devices_hears_of_them_first(run: RedisRun):
    config = RunConfig(name="turn", redis=run.config, lease=LeaseConfig(seconds=1.0))
    async with open_ledgers(config, run.run_dir) as opened:
        devices = Devices()
        async with asyncio.TaskGroup() as tasks:
            running = tasks.create_task(run_engine(opened, devices, "rollout.0"))
            async with asyncio.timeout(20):
                while not devices.engines:  # noqa: ASYNC110
                    await asyncio.sleep(0.005)
            run.kill()
            run.restart()
            await opened.connection.read("DEL", "{sr:turn}:turn:engines")
            await learner(opened, devices).take()  # `load` asserts that the engine has left
            running.cancel()
        assert devices.learner
