"""The weights stream in memory, a replica that records what it applies, and small tensors."""

import asyncio

import orjson
import pytest
import torch

from streamrl.config import WeightsConfig
from streamrl.weight_sync.chain import Staging
from streamrl.weight_sync.files import StagingFolder
from streamrl.weight_sync.follower import Follower
from streamrl.weight_sync.manifest import folder_name, read_manifest
from streamrl.weight_sync.source import FolderSource

both_folders = pytest.mark.parametrize("config", ["shm", "directory"], indirect=True)


class Stream:
    """The weights stream in memory: the newest (number, manifest) and a doorbell."""

    def __init__(self):
        self.entry = None
        self.bell = asyncio.Condition()

    async def put(self, data, number=None):
        async with self.bell:
            self.entry = (orjson.loads(data)["version"] if number is None else number, data)
            self.bell.notify_all()

    async def newest(self):
        return self.entry

    async def after(self, version, seconds):
        async with self.bell:
            try:
                async with asyncio.timeout(min(seconds, 0.02)):  # a follower sees between two looks that it is to stop
                    await self.bell.wait_for(lambda: self.entry is not None and self.entry[0] > version)
            except TimeoutError:
                return None
            return self.entry


class Replica:
    """Records what a follower applied, as copies."""

    def __init__(self, stream, config, run_dir, run="r", **options):
        self.applied = []
        self.fail = None
        self.follower = Follower(stream, config, self.apply, run=run, run_dir=run_dir, **options)
        self.changed = asyncio.Condition()

    async def apply(self, version):
        if self.fail is not None:
            raise self.fail
        async with self.changed:
            self.applied.append((version.pair, {name: tensor.clone() for name, tensor in version.tensors.items()}))
            self.changed.notify_all()

    async def until(self, count):
        async with asyncio.timeout(30), self.changed:
            await self.changed.wait_for(lambda: len(self.applied) >= count)


def tensors(seed=0, dtype=torch.float32):
    generator = torch.Generator().manual_seed(seed)
    shapes = {"embed.weight": (64, 16), "odd": (3, 5, 7), "scalar": (), "empty": (0, 4), "norm": (17,)}
    return {name: torch.randn(shape, generator=generator).to(dtype) for name, shape in shapes.items()}


def publish(publisher, version, given=None, epoch=1, **options):
    """Publish tensors, those of the number of the version unless others are given; the encoded manifest."""
    given = tensors(version) if given is None else given
    return publisher.publish(epoch=epoch, version=version, step=version, tensors=given.items(), **options)


def folders(publisher):
    return sorted(entry.name for entry in publisher.root.iterdir())


def same(left, right):
    return left.keys() == right.keys() and all(
        torch.equal(left[name], right[name]) and left[name].dtype == right[name].dtype for name in left
    )


async def until(check):
    async with asyncio.timeout(30):
        while not check():  # noqa: ASYNC110  (polls what a follower in another task counts)
            await asyncio.sleep(0.005)


async def rebuilt(root, run_dir, pair):
    """The tensors of a version that is on a transport, as a replica that joins gets them."""
    folder = StagingFolder(run_dir, "rebuilt")
    folder.open()
    try:
        staging = Staging(WeightsConfig(), FolderSource(root), folder)
        return (await staging.bring(read_manifest(root / folder_name(*pair)))).tensors
    finally:
        folder.close()
