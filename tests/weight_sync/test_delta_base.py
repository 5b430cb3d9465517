"""Deltas are applied to exactly their base, and files that are not bit for bit the version are never used."""

import asyncio
import contextlib
import shutil
import threading

import msgspec
import pytest
import torch
from fetch_kit import following, http_config, open_learner
from sync_kit import Replica, Stream, publish, until

from streamrl.config import DeltaConfig, WeightsConfig
from streamrl.errors import WeightsError
from streamrl.weight_sync.chain import Staging
from streamrl.weight_sync.files import StagingFolder, file_checksum
from streamrl.weight_sync.manifest import TensorEntry, decode, encode
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
        return await self.staging.bring(manifest)

    async def chain(self, manifest):
        """The versions that lead to one, from what is held on."""
        return [link.manifest.version for link in await self.staging._links(manifest)]

    def file(self, manifest, index=0):
        return self.publisher.root / manifest.folder / manifest.shards[index].file

    def close(self):
        self.folder.close()
        shutil.rmtree(self.publisher.root, ignore_errors=True)


@pytest.fixture
def line(tmp_path):
    line = Line(tmp_path)
    yield line
    line.close()


def flip(path, at=-1):
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)


async def test_each_version_bit_for_bit_in_a_copy_of_the_one_before(line):
    before = None
    for version in range(1, 8):
        manifest = line.write(version)
        assert (manifest.base is None) == (version == 1)
        found = await line.bring(manifest)
        assert exactly(found.tensors, version)
        assert before is None or exactly(before.tensors, version - 1)  # an engine may still read it
        assert len([*line.folder.root.iterdir()]) == min(version - 1, 2)
        again = await line.bring(manifest)
        assert again.folder == found.folder
        assert exactly(again.tensors, version)
        before = found


async def test_a_receiver_several_versions_behind_applies_the_chain(line):
    await line.bring(line.write(1))
    for version in range(2, 6):
        manifest = line.write(version)
    assert await line.chain(manifest) == [1, 2, 3, 4, 5]
    assert exactly((await line.bring(manifest)).tensors, 5)


async def test_a_wrong_bit_in_the_base_is_found_and_healed(line, caplog):
    for version in (1, 2):
        found = await line.bring(line.write(version))
    flip(found.folder / found.files[-1])  # of a value that no delta ever touches
    manifest = line.write(3)
    assert await line.chain(manifest) == [2, 3]
    assert exactly((await line.bring(manifest)).tensors, 3)
    assert "weights do not fit what this host holds" in caplog.text
    assert await line.chain(line.write(4)) == [3, 4]


async def test_a_base_whose_files_are_gone_is_made_anew(line):
    for version in (1, 2):
        found = await line.bring(line.write(version))
    (found.folder / found.files[0]).unlink()
    assert exactly((await line.bring(line.write(3))).tensors, 3)


async def test_a_corrupt_delta_is_refused_until_the_next_full_version(line):
    await line.bring(line.write(1))
    bad = line.write(2)
    flip(line.file(bad))
    for manifest in (bad, bad, line.write(3)):  # from the anchor on too
        with pytest.raises(WeightsError, match="checksum"):
            await line.bring(manifest)
    line.publisher.force_full_next()
    anchor = line.write(4)
    assert anchor.base is None
    assert exactly((await line.bring(anchor)).tensors, 4)
    assert exactly((await line.bring(line.write(5))).tensors, 5)


async def test_a_corrupt_anchor_is_refused(line):
    manifest = line.write(1)
    flip(line.file(manifest))
    with pytest.raises(WeightsError, match="checksum"):
        await line.bring(manifest)
    assert line.staging._held is None


def changed(manifest, **changes):
    return decode(encode(msgspec.structs.replace(manifest, **changes)))


async def test_manifests_that_lie_about_the_result(line):
    """Checksums of another version, the wrong base, other files: no such version is ever handed on."""
    await line.bring(line.write(1))
    second, third = line.write(2), line.write(3)
    swapped = [
        msgspec.structs.replace(new, makes=old.makes) for new, old in zip(third.shards, second.shards, strict=True)
    ]
    for lie in (
        changed(third, base=(1, 1)),
        changed(third, shards=swapped),
        changed(third, shards=third.shards[::-1]),
        changed(third, tensors=[*third.tensors, TensorEntry("more", "F32", [1], 0)]),
    ):
        with pytest.raises(WeightsError):
            await line.bring(lie)
        assert exactly((await line.bring(second)).tensors, 2)
    with pytest.raises(WeightsError):
        await line.bring(changed(third, base=(1, 3)))
    assert exactly((await line.bring(third)).tensors, 3)


async def test_a_patch_that_is_cancelled_leaves_no_half_version(line, monkeypatch):
    """Whatever the thread still does, the next version is right."""
    await line.bring(line.write(1))
    second = line.write(2)
    entered, go_on = threading.Event(), threading.Event()

    def slow(path):
        entered.set()
        go_on.wait(20)
        return file_checksum(path)

    monkeypatch.setattr("streamrl.weight_sync.chain.file_checksum", slow)
    patching = asyncio.create_task(line.bring(second))
    await asyncio.to_thread(entered.wait, 10)
    patching.cancel()
    with pytest.raises(asyncio.CancelledError):
        await patching
    monkeypatch.undo()
    third = line.write(3)
    assert exactly((await line.bring(third)).tensors, 3)
    go_on.set()
    assert exactly((await line.bring(line.write(4))).tensors, 4)


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
        for path in replica.follower._staging._folder.root.glob("patched-*/*"):
            flip(path)
        await put(4)
        await replica.until(4)
        stop.set()
    assert all(exactly(found, pair[1]) for pair, found in replica.applied)
    assert [pair[1] for pair, _ in replica.applied] == [1, 2, 3, 4]
    assert replica.follower.refused == 0
    shutil.rmtree(publisher.root, ignore_errors=True)


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
        await learner.publish(41, tensors=model(41))
        await asyncio.gather(early.until(len(early.applied) + 1), late.until(2))
        assert exactly(late.applied[-1][1], 41)
        assert len(list(late.follower._staging._folder.root.glob("v-*"))) <= 2  # the deltas of the last change


async def test_the_staging_folder_stays_small(tmp_path):
    """Full versions: the one in use and the one that comes."""
    config = http_config()
    async with open_learner(config, tmp_path) as learner, following(learner) as replica:
        for version in range(1, 8):
            await learner.publish(version)
            await replica.until(version)
            names = sorted(entry.name for entry in replica.follower._staging._folder.root.iterdir())
            assert names == [f"v-1-{seen}" for seen in range(max(1, version - 1), version + 1)]
