"""Deltas are applied to exactly their base, and files that are not bit for bit the version are never used."""

import asyncio
import contextlib

import pytest
import torch
from fetch_kit import following, http_config, open_learner
from sync_kit import Replica, Stream, publish, until

from streamrl.config import DeltaConfig, WeightsConfig
from streamrl.errors import WeightsError
from streamrl.weight_sync.chain import Staging
from streamrl.weight_sync.files import StagingFolder
from streamrl.weight_sync.manifest import Manifest, decode, encode
from streamrl.weight_sync.publisher import Publisher
from streamrl.weight_sync.source import FolderSource

DELTAS = DeltaConfig(enabled=True, every=50, max_density=0.5)


def settings(**changes):
    return WeightsConfig(
        **{"transport": "shm", "dtype": "bfloat16", "shard_bytes": 8192, "delta": DELTAS, "deadline": 20, **changes}
    )


def model(version):
    """Weights of which version n differs from n - 1 in some places."""
    generator = torch.Generator().manual_seed(0)
    made = {
        "a": torch.randn(64, 64, generator=generator).bfloat16(),
        "b": torch.randn(5000, generator=generator).bfloat16(),
        "c": torch.arange(7),
        "still": torch.ones(300).bfloat16(),
    }
    for step in range(2, version + 1):
        made["a"][step % 64, :3] = float(step)
        made["b"][step::977] = -float(step)
        made["c"][step % 7] = step
    return made


def exactly(found, version):
    expected = model(version)
    return found.keys() == expected.keys() and all(torch.equal(found[name], expected[name]) for name in found)


class Line:
    """A publisher, and what a replica holds of its versions."""

    def __init__(self, run_dir, config=None):
        config = config or settings()
        self.publisher = Publisher(config, "r", run_dir)
        self.folder = StagingFolder(run_dir, "rollout.0")
        self.folder.open()
        self.staging = Staging(config, FolderSource(self.publisher.root), self.folder)

    def write(self, version, epoch=1):
        return decode(publish(self.publisher, version, model(version), epoch=epoch))

    async def bring(self, manifest):
        return await self.staging.apply(await self.staging.links(manifest))

    def file(self, manifest, index=0):
        return self.publisher.root / manifest.folder / manifest.shards[index].file

    def close(self):
        self.staging.close()
        self.folder.close()
        self.publisher.close(unlink=True)


@pytest.fixture
def line(tmp_path):
    line = Line(tmp_path)
    yield line
    line.close()


def flip(path, at=-1):
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)


async def test_each_version_bit_for_bit_in_the_same_files(line):
    files = None
    for version in range(1, 8):
        manifest = line.write(version)
        assert (manifest.base is None) == (version == 1)
        found = await line.bring(manifest)
        assert exactly(found.tensors, version)
        assert found.folder == line.folder.root / "base"
        state = {name: (found.folder / name).stat().st_ino for name in found.files}
        assert files in (None, state)  # patched in place
        files = state
        again = await line.staging.apply(await line.staging.links(manifest))
        assert exactly(again.tensors, version)


async def test_a_receiver_several_versions_behind_applies_the_chain(line):
    await line.bring(line.write(1))
    for version in range(2, 6):
        manifest = line.write(version)
    chain = await line.staging.links(manifest)
    assert [link.manifest.version for link in chain] == [2, 3, 4, 5]
    assert exactly((await line.staging.apply(chain)).tensors, 5)


async def test_a_wrong_bit_in_the_base_is_found_and_healed(line):
    for version in (1, 2):
        found = await line.bring(line.write(version))
    found.tensors["still"].view(torch.int16)[7] ^= 1  # no delta ever touches this value
    manifest = line.write(3)
    chain = await line.staging.links(manifest)
    assert [link.manifest.version for link in chain] == [3]
    with pytest.raises(WeightsError, match="still of version"):
        await line.staging.apply(chain)
    assert line.staging._base.pair is None
    chain = await line.staging.links(manifest)
    assert [link.manifest.version for link in chain] == [1, 2, 3]
    assert exactly((await line.staging.apply(chain)).tensors, 3)


async def test_a_corrupt_delta_is_refused_until_the_next_full_version(line):
    await line.bring(line.write(1))
    bad = line.write(2)
    flip(line.file(bad))
    with pytest.raises(WeightsError, match="checksum"):
        await line.bring(bad)
    with pytest.raises(WeightsError, match="checksum"):
        await line.bring(bad)  # from the anchor, with the same result
    later = line.write(3)
    with pytest.raises(WeightsError, match="next full version"):
        await line.bring(later)  # and not once more for each version that builds on it
    line.publisher._chained = False
    anchor = line.write(4)
    assert anchor.base is None
    assert exactly((await line.bring(anchor)).tensors, 4)
    assert exactly((await line.bring(line.write(5))).tensors, 5)


async def test_a_corrupt_anchor_is_refused(line):
    manifest = line.write(1)
    flip(line.file(manifest))
    with pytest.raises(WeightsError, match="checksum"):
        await line.bring(manifest)
    assert line.staging._base.pair is None


def changed(manifest, **changes):
    return decode(
        encode(Manifest(**{**{name: getattr(manifest, name) for name in Manifest.__struct_fields__}, **changes}))
    )


async def test_manifests_that_lie_about_the_result(line):
    """Hashes of another version, no hashes, the wrong base: the base never becomes that version."""
    await line.bring(line.write(1))
    second, third = line.write(2), line.write(3)
    no_hashes = [type(entry)(entry.name, entry.dtype, entry.shape, entry.parts, []) for entry in third.tensors]
    for lie in (
        changed(third, base=(1, 1)),
        changed(third, tensors=second.tensors),
        changed(third, tensors=no_hashes),
    ):
        with pytest.raises(WeightsError):
            await line.bring(lie)
        assert line.staging._base.pair is None
        assert exactly((await line.bring(second)).tensors, 2)
    with pytest.raises(WeightsError):
        await line.staging.links(changed(third, base=(1, 3)))
    assert exactly((await line.bring(third)).tensors, 3)


async def test_a_patch_that_is_cancelled_leaves_no_half_version(line, monkeypatch):
    """Whatever the thread still does, the next version is right."""
    await line.bring(line.write(1))
    chain = await line.staging.links(line.write(2))
    entered, go_on = asyncio.Event(), asyncio.Event()
    loop = asyncio.get_running_loop()
    before = line.staging._base._prove

    def slow(manifest):
        loop.call_soon_threadsafe(entered.set)
        asyncio.run_coroutine_threadsafe(go_on.wait(), loop).result(20)
        before(manifest)

    monkeypatch.setattr(line.staging._base, "_prove", slow)
    patching = asyncio.create_task(line.staging.apply(chain))
    await asyncio.wait_for(entered.wait(), 10)
    assert line.staging._base.pair is None
    patching.cancel()
    with pytest.raises(asyncio.CancelledError):
        await patching
    monkeypatch.setattr(line.staging._base, "_prove", before)
    preparing = await line.staging.links(line.write(3))
    go_on.set()
    assert exactly((await line.staging.apply(preparing)).tensors, 3)


async def test_mixed_versions_replace_whole_files(line):
    """Each rank sends a delta or its shard whole: here the second file is whole."""
    await line.bring(line.write(1))
    second = line.write(2)
    full = Publisher(settings(delta=DeltaConfig()), "r", line.publisher.root.parent / "other")
    whole = decode(full.publish(epoch=1, version=2, step=2, tensors=model(2).items()))
    names = [shard.file for shard in whole.shards]
    assert names == [shard.file for shard in second.shards]
    mixed = changed(second, shards=[second.shards[0], *whole.shards[1:]])
    for shard in whole.shards[1:]:
        (full.root / whole.folder / shard.file).replace(line.publisher.root / second.folder / shard.file)
    full.close(unlink=True)
    assert exactly((await line.bring(mixed)).tensors, 2)
    assert exactly((await line.bring(line.write(3))).tensors, 3)


@pytest.mark.parametrize("transport", ["shm", "directory"])
async def test_a_follower_of_deltas_heals_by_itself(tmp_path, transport):
    config = settings(transport=transport)
    publisher, stream = Publisher(config, "r", tmp_path), Stream()
    replica = Replica(stream, config, tmp_path)
    stop = asyncio.Event()

    async def put(version):
        await stream.put(publish(publisher, version, model(version)))

    async with asyncio.TaskGroup() as group:
        group.create_task(replica.follower.run(stop))
        for version in (1, 2, 3):
            await put(version)
            await replica.until(version)
        for path in replica.follower._staging._folder.root.glob("base/*"):
            flip(path)
        await put(4)
        await replica.until(4)
        stop.set()
    assert all(exactly(found, pair[1]) for pair, found in replica.applied)
    assert [pair[1] for pair, _ in replica.applied] == [1, 2, 3, 4]
    assert replica.follower.refused == 0
    publisher.close(unlink=True)


async def test_deltas_over_http(tmp_path):
    """A late joiner at version 40, and one that saw them all: the bytes of deltas, not those of the weights."""
    config = http_config(dtype="bfloat16", delta=DELTAS, shard_bytes=8192)
    async with open_learner(config, tmp_path) as learner, contextlib.AsyncExitStack() as stack:
        early = await stack.enter_async_context(following(learner, "rollout.0"))
        full = (await learner.publish(1, tensors=model(1))).total_bytes
        await early.until(1)
        sent = full
        for version in range(2, 41):
            sent += (await learner.publish(version, tensors=model(version))).total_bytes
        await until(lambda: early.follower.version == 40)
        late = await stack.enter_async_context(following(learner, "rollout.1"))
        await late.until(1)
        for replica in (early, late):
            assert exactly(replica.applied[-1][1], 40)
            assert replica.follower.refused == 0
            assert replica.follower.traffic.bytes == sent
            assert replica.follower._staging._folder.count() == 0
        await learner.publish(41, tensors=model(41))
        await asyncio.gather(early.until(len(early.applied) + 1), late.until(2))
        assert exactly(late.applied[-1][1], 41)
        assert late.follower._staging._folder.count() <= 2


async def test_the_staging_folder_stays_small(tmp_path):
    """Full versions: the one in use and the one that comes."""
    config = http_config()
    async with open_learner(config, tmp_path) as learner, following(learner) as replica:
        for version in range(1, 8):
            await learner.publish(version)
            await replica.until(version)
            names = sorted(entry.name for entry in replica.follower._staging._folder.root.iterdir())
            assert names == [f"v-1-{seen}" for seen in range(max(1, version - 1), version + 1)]
