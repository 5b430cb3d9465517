"""A publisher, a stream and a follower; over shared memory, unless a test asks for both folders."""

import asyncio
import shutil
import sys
from pathlib import Path

import pytest

# tests are imported by path (importlib mode); what they share lies next to them
sys.path.insert(0, str(Path(__file__).parent))

from sync_kit import Replica, Stream

from streamrl.config import WeightsConfig
from streamrl.weight_sync.publisher import Publisher


@pytest.fixture(autouse=True)
def looks_often(monkeypatch):
    """A follower that is told to stop notices it at its next look."""
    monkeypatch.setattr("streamrl.weight_sync.follower._LOOK_SECONDS", 0.02)


@pytest.fixture
def config(request):
    return WeightsConfig(transport=getattr(request, "param", "shm"), shard_bytes=4096)


@pytest.fixture
def publisher(config, tmp_path):
    publisher = Publisher(config, "r", tmp_path)
    yield publisher
    shutil.rmtree(publisher.root, ignore_errors=True)


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
