"""A server that reads a version slowly: it reads that version to the end, and nobody waits for it."""

import asyncio

import pytest
from fetch_kit import following, http_config, open_learner
from sync_kit import same, tensors

from streamrl.config import DeltaConfig


@pytest.mark.parametrize("delta", [False, True])
async def test_versions_go_on_while_one_server_still_reads(tmp_path, delta):
    config = http_config(dtype="float32", delta=DeltaConfig(enabled=delta, every=50, max_density=0.9))
    began, free, read = asyncio.Event(), asyncio.Event(), []

    async def slow(version):
        began.set()
        await free.wait()
        read.append((version.pair, {name: tensor.clone() for name, tensor in version.tensors.items()}))

    def weights(number):
        made = {name: tensor.clone() for name, tensor in tensors(1).items()}
        made["embed.weight"][number % 64, :3] = float(number)
        return made

    async with open_learner(config, tmp_path) as learner, following(learner) as replica:
        await learner.publish(1, tensors=weights(1))
        await replica.until(1)
        taking = asyncio.create_task(replica.follower.again(slow))
        await asyncio.wait_for(began.wait(), 20)
        for number in (2, 3, 4):
            await learner.publish(number, tensors=weights(number))
            await replica.until(number)
        assert not taking.done()
        free.set()
        assert await asyncio.wait_for(taking, 20)
        await replica.follower.again(slow)
    assert [pair for pair, _ in read] == [(1, 1), (1, 4)]
    assert same(read[0][1], weights(1))
    assert same(read[1][1], weights(4))
    assert [pair[1] for pair, _ in replica.applied] == [1, 2, 3, 4]
    assert all(same(found, weights(pair[1])) for pair, found in replica.applied)
