"""A rollout worker whose engine falls behind the weights."""

import asyncio

import pytest
from producer_kit import until
from replica_kit import Faulty, Learner, admit, emitted, replica_on, samples_of

from streamrl.producers import worker
from streamrl.queues import leases
from streamrl.queues.keys import GROUP
from streamrl.wire import Sample, decode


class Behind(Faulty):
    """Takes no version while the gate is closed."""

    def __init__(self, engine):
        super().__init__(engine, [])
        self.open = asyncio.Event()
        self.open.set()
        self.requests = []

    async def apply(self, version):
        await self.open.wait()
        await self._engine.apply(version)

    async def generate(self, request):
        self.requests.append(request)
        return await super().generate(request)


@pytest.fixture
def parts(monkeypatch):
    """What a worker makes for itself, by the name of its class."""
    made = {}

    def keep(name):
        kind = getattr(worker, name)
        monkeypatch.setattr(worker, name, lambda *given, **named: made.setdefault(name, kind(*given, **named)))

    keep("Follower")
    keep("RolloutWorker")
    return made


async def test_weights_that_are_too_old_stop_the_prompts_until_newer_ones_are_there(small):
    async with small.open() as ledgers:
        learner = await Learner.of(small, ledgers)
        async with replica_on(small, ledgers, Behind) as (behind, role, _):
            await until(lambda: role.is_ready)
            behind.open.clear()
            await learner.publish(2)  # one step behind: max_staleness is 1
            await admit(small, ledgers.train, 1, samples=4)
            await until(lambda: emitted(ledgers.train, 4))
            await learner.publish(3)
            await until(lambda: role.status.get("stale") == 1)
            await admit(small, ledgers.train, 1, samples=4)
            before = len(behind.requests)
            assert await ledgers.connection.read("XLEN", ledgers.train.keys.prompts) == 1
            behind.open.set()
            await until(lambda: emitted(ledgers.train, 8))
            assert role.status["stale"] == 0
            found = [decode(data, Sample) for data in (await samples_of(ledgers.train, 1)).values()]
            assert {number for sample in found for _, number in sample.runs} == {3}
            assert len(behind.requests) == before + 4
            assert [request.affinity for request in behind.requests] == ["g0"] * 4 + ["g1"] * 4


async def test_a_prompt_that_was_asked_for_with_old_weights_waits_for_the_new_ones(small, monkeypatch, parts):
    """The replica asks for prompts, then a version comes out, then its prompts: the read that waits gets them."""
    monkeypatch.setattr(leases, "_BLOCK_MS", 20_000)
    small = small.set(None, max_staleness=0)
    async with small.open() as ledgers:
        learner = await Learner.of(small, ledgers)
        prompts = ledgers.train.keys.prompts

        async def asking():
            clients = (await ledgers.connection.read("CLIENT", "LIST")).splitlines()
            return any(b" cmd=xreadgroup " in client and b" flags=b" in client for client in clients)

        async with replica_on(small, ledgers, Behind) as (behind, _, task):
            await until(asking)
            behind.open.clear()
            await learner.publish(2)
            await until(lambda: parts["Follower"].newest_step == 2)
            await admit(small, ledgers.train, 1, samples=4)
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(0.5):
                    await until(lambda: behind.requests)
            assert (await ledgers.connection.read("XPENDING", prompts, GROUP))[0] == 1
            behind.open.set()
            await until(lambda: emitted(ledgers.train, 4))
            found = [decode(data, Sample) for data in (await samples_of(ledgers.train, 0)).values()]
            assert {number for sample in found for _, number in sample.runs} == {2}
            task.cancel()  # it waits for prompts


async def test_a_stop_hands_prompts_back_at_once_that_wait_for_newer_weights(small, parts):
    small.set(None, max_staleness=0).set("supervisor", drain_deadline=4000)
    async with small.open() as ledgers:
        learner = await Learner.of(small, ledgers)
        async with replica_on(small, ledgers, Behind) as (behind, role, task):
            await until(lambda: role.is_ready)
            behind.open.clear()
            await learner.publish(2)
            await until(lambda: parts["Follower"].newest_step == 2)
            parts["RolloutWorker"]._leases._width = lambda: 1  # as for a read that began before the version came out
            await admit(small, ledgers.train, 1, samples=4)
            await until(lambda: parts["RolloutWorker"]._leases.leased)
            role.stop.set()
            await asyncio.wait_for(task, 15)
            [[_, owner, _, deaths]] = await ledgers.connection.read(
                "XPENDING", ledgers.train.keys.prompts, GROUP, "-", "+", 10
            )
            assert (owner.decode(), deaths) == (leases.UNOWNED, 0)
            assert not behind.requests
