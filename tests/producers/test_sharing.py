"""A replica that shares its devices with a learner, over a real Redis."""

import pytest
import torch
from producer_kit import until
from replica_kit import Learner, admit, emitted, samples_of

from streamrl.producers.worker import run_rollout
from streamrl.queues.device_lock import LearnerDevices
from streamrl.wire import Sample, decode


@pytest.fixture
def shared(run):
    torch.set_num_threads(1)
    return (
        run.set("engine", slots=4, threads=1)
        .set("model", context=1024)
        .set("sampling", group_size=4, max_new_tokens=900)
        .set("lease", seconds=0.6)
        .set("rollout", placement="colocated")
    )


async def test_learner_and_replica_take_turns_and_no_response_is_lost(shared):
    async with shared.open() as ledgers:
        learner = await Learner.of(shared, ledgers)
        await admit(shared, ledgers.train, 1, samples=4)
        switch = LearnerDevices(ledgers.device_lock, "learner", deadline=30)  # on a CPU it moves nothing
        async with shared.running(run_rollout, "rollout.0", ledgers) as (role, _):
            for version in (2, 3):
                before = role.status.get("tokens", 0)
                # a fast machine may be done before the second turn
                await until(lambda before=before: role.status.get("tokens", 0) > before or emitted(ledgers.train, 4))
                await switch.take()
                await learner.publish(version)
                assert await ledgers.connection.read("ZCARD", ledgers.train.keys.device_engines) == 0
                await switch.give()
            await until(lambda: emitted(ledgers.train, 4))
        found = [decode(data, Sample) for data in (await samples_of(ledgers.train, 0)).values()]
        for sample in found:
            numbers = [number for _, number in sample.runs]
            assert len(sample.token_ids) == 900
            assert numbers == sorted(set(numbers))
        assert await ledgers.connection.read("ZCARD", ledgers.train.keys.device_engines) == 0
