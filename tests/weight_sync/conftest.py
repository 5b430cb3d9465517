"""A publisher, a stream and a follower, over both transports."""

import asyncio
import sys
from pathlib import Path

import pytest

# tests are imported by path (importlib mode); what they share lies next to them
sys.path.insert(0, str(Path(__file__).parent))

from sync_kit import Replica, Stream

from streamrl.config import WeightsConfig
from streamrl.weight_sync.publisher import Publisher


@pytest.fixture(params=["shm", "directory"])
def config(request, tmp_path):
    return WeightsConfig(transport=request.param, shard_bytes=4096)


@pytest.fixture
def publisher(config, tmp_path):
    publisher = Publisher(config, "r", tmp_path)
    yield publisher
    publisher.close(unlink=True)


@pytest.fixture
async def stream():
    return Stream()


@pytest.fixture
async def replica(stream, config, tmp_path):
    replica = Replica(stream, config, tmp_path)
    stop = asyncio.Event()
    task = asyncio.create_task(replica.follower.run(stop))
    yield replica
    stop.set()
    await asyncio.wait_for(task, 10)
