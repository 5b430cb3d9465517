"""A version is seen whole or not at all, never an older one after a newer one, and a bad one never at all."""

import asyncio
import os
import signal
import subprocess
import sys
import threading
import time

import orjson
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import load_file

from streamrl.config import WeightsConfig
from streamrl.errors import CannotCreate, DeadlineExceeded, WeightsError
from streamrl.weight_sync import Follower, Manifest, Publisher
from streamrl.weight_sync import transports as transports_module
from streamrl.weight_sync.follower import map_version
from streamrl.weight_sync.manifest import decode, encode


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
                async with asyncio.timeout(seconds):
                    await self.bell.wait_for(lambda: self.entry is not None and self.entry[0] > version)
            except TimeoutError:
                return None
            return self.entry


class Replica:
    """Records what a follower applied, as copies."""

    def __init__(self, stream, config, run_dir, run="r"):
        self.applied = []
        self.fail = None
        self.follower = Follower(stream, config, self.apply, run=run, run_dir=run_dir)
        self.changed = asyncio.Condition()

    async def apply(self, manifest, tensors):
        if self.fail is not None:
            raise self.fail
        async with self.changed:
            self.applied.append((manifest.pair, {name: tensor.clone() for name, tensor in tensors.items()}))
            self.changed.notify_all()

    async def until(self, count):
        async with asyncio.timeout(10), self.changed:
            await self.changed.wait_for(lambda: len(self.applied) >= count)


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


def tensors(seed=0, dtype=torch.float32):
    generator = torch.Generator().manual_seed(seed)
    shapes = {"embed.weight": (64, 16), "odd": (3, 5, 7), "scalar": (), "empty": (0, 4), "norm": (17,)}
    return {name: torch.randn(shape, generator=generator).to(dtype) for name, shape in shapes.items()}


def publish(publisher, version, epoch=1, seed=None):
    return publisher.publish(
        epoch=epoch, version=version, step=version, tensors=tensors(version if seed is None else seed).items()
    )


def folders(publisher):
    return sorted(entry.name for entry in publisher.root.iterdir())


def same(left, right):
    return left.keys() == right.keys() and all(
        torch.equal(left[name], right[name]) and left[name].dtype == right[name].dtype for name in left
    )


async def until(check):
    async with asyncio.timeout(10):
        while not check():  # noqa: ASYNC110  (polls what a follower in another task counts)
            await asyncio.sleep(0.005)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
async def test_every_bit_arrives_and_the_library_reads_the_same_files(tmp_path, dtype):
    config = WeightsConfig(transport="directory", shard_bytes=4096, dtype=dtype)
    publisher = Publisher(config, "r", tmp_path)
    source = {**tensors(), "steps": torch.arange(9), "nan": torch.tensor([float("nan"), float("inf"), -0.0])}
    data = publisher.publish(epoch=3, version=7, step=5, tensors=source.items())
    manifest = decode(data)
    folder = publisher.root / "v-3-7"
    mapped = map_version(folder, manifest)
    assert (folder / "manifest.json").read_bytes() == data
    assert list(mapped) == list(source)
    by_library = {}
    for shard in manifest.shards:
        by_library.update(load_file(folder / shard.file))
        with safe_open(folder / shard.file, "pt") as file:
            assert set(file.keys()) == {
                entry.name for entry in manifest.tensors if manifest.shards[entry.shard].file == shard.file
            }
    for name, tensor in source.items():
        expected = tensor.to(getattr(torch, dtype)) if tensor.is_floating_point() else tensor
        for got in (mapped[name], by_library[name]):
            assert got.dtype == expected.dtype
            assert got.shape == expected.shape
            assert got.reshape(-1).view(torch.uint8).tolist() == expected.reshape(-1).view(torch.uint8).tolist()
    assert len(manifest.shards) > (dtype == "float32")
    assert all(shard.bytes <= 4096 + 1024 for shard in manifest.shards if shard.file != "shard-00000.safetensors")


@settings(max_examples=40, deadline=None)
@given(
    st.lists(st.tuples(st.lists(st.integers(0, 5), max_size=3), st.sampled_from(["f", "b", "i"])), max_size=8),
    st.integers(1, 300),
)
def test_any_shapes_in_any_shards(tmp_path_factory, shapes, limit):
    kinds = {"f": torch.float32, "b": torch.bool, "i": torch.int64}
    source = {
        f"t{index}": torch.arange(int(torch.Size(shape).numel())).reshape(shape).to(kinds[kind])
        for index, (shape, kind) in enumerate(shapes)
    }
    config = WeightsConfig(transport="directory", shard_bytes=limit)
    publisher = Publisher(config, "r", tmp_path_factory.mktemp("run"))
    manifest = decode(publisher.publish(epoch=1, version=1, step=0, tensors=source.items()))
    assert same(map_version(publisher.root / manifest.folder, manifest), source)


async def test_newest_only_and_old_versions_go(publisher, stream, config, tmp_path):
    for version in range(1, 6):
        await stream.put(publish(publisher, version))
    assert folders(publisher) == ["v-1-4", "v-1-5"]
    replica = Replica(stream, config, tmp_path)  # joins late: takes the newest alone
    stop = asyncio.Event()
    async with asyncio.TaskGroup() as group:
        group.create_task(replica.follower.run(stop))
        await replica.until(1)
        await stream.put(publish(publisher, 6))
        await replica.until(2)
        stop.set()
    assert [pair for pair, _ in replica.applied] == [(1, 5), (1, 6)]
    assert same(replica.applied[1][1], tensors(6))
    assert (replica.follower.version, replica.follower.refused) == (6, 0)


def test_old_versions_stay_readable_while_mapped(publisher):
    manifest = decode(publish(publisher, 1))
    mapped = map_version(publisher.root / manifest.folder, manifest)
    for version in range(2, 5):
        publish(publisher, version)
    assert not (publisher.root / "v-1-1").exists()
    assert same(mapped, tensors(1))


def test_a_holder_cannot_change_the_files(publisher):
    manifest = decode(publish(publisher, 1))
    map_version(publisher.root / manifest.folder, manifest)["norm"].fill_(3.0)
    assert same(map_version(publisher.root / manifest.folder, manifest), tensors(1))


def corrupt_byte(path):
    with path.open("r+b") as file:
        file.seek(-1, os.SEEK_END)
        last = file.read(1)[0]
        file.seek(-1, os.SEEK_END)
        file.write(bytes([last ^ 1]))


def truncate(path):
    os.truncate(path, path.stat().st_size - 1)


@pytest.mark.parametrize("damage", [corrupt_byte, truncate])
async def test_a_damaged_shard_is_refused_and_the_next_version_is_taken(publisher, stream, replica, damage):
    await stream.put(publish(publisher, 1))
    await replica.until(1)
    data = publish(publisher, 2)
    damage(publisher.root / "v-1-2" / decode(data).shards[-1].file)
    await stream.put(data)
    await until(lambda: replica.follower.refused == 1)
    assert replica.follower.version == 1
    await stream.put(publish(publisher, 3))
    await replica.until(2)
    assert [pair for pair, _ in replica.applied] == [(1, 1), (1, 3)]


def foreign(data, **changes):
    return encode(Manifest(**{**{name: getattr(decode(data), name) for name in Manifest.__struct_fields__}, **changes}))


@pytest.mark.parametrize(
    "change",
    [
        lambda data: b"\x00 no json",
        lambda data: b"[" * 100_000,
        lambda data: data.replace(b'"v":1', b'"v":2', 1),
        lambda data: data.replace(b"v-1-1", b"../v-1", 1),
        lambda data: foreign(data, run="other"),
        lambda data: foreign(data, base=0),
        lambda data: foreign(data, folder="v-1-9"),
        lambda data: foreign(data, tensors=decode(data).tensors[:-1]),
        lambda data: foreign(data, shards=decode(data).shards[::-1]),
        lambda data: foreign(data, transport={"shm": "directory", "directory": "shm"}[decode(data).transport]),
    ],
)
async def test_a_foreign_manifest_is_refused(publisher, stream, replica, change):
    good = publish(publisher, 1)
    await stream.put(change(good), number=1)
    await until(lambda: replica.follower.refused == 1)
    await stream.put(publish(publisher, 2))
    await replica.until(1)
    assert [pair for pair, _ in replica.applied] == [(1, 2)]


async def test_an_engine_that_refuses_keeps_its_version_and_a_broken_one_ends_the_follower(
    publisher, stream, config, tmp_path
):
    replica = Replica(stream, config, tmp_path)
    replica.fail = WeightsError("a name does not fit")
    await stream.put(publish(publisher, 1))
    task = asyncio.create_task(replica.follower.run(asyncio.Event()))
    await until(lambda: replica.follower.refused == 1)
    assert replica.follower.version == 0
    assert not replica.follower.first.is_set()
    replica.fail = RuntimeError("the engine is broken")
    await stream.put(publish(publisher, 2))
    with pytest.raises(RuntimeError, match="broken"):
        await asyncio.wait_for(task, 10)


async def test_a_slow_engine_meets_the_deadline(tmp_path, stream):
    config = WeightsConfig(transport="directory", deadline=0.2)
    publisher = Publisher(config, "r", tmp_path)

    async def never(manifest, tensors):
        await asyncio.Event().wait()

    follower = Follower(stream, config, never, run="r", run_dir=tmp_path)
    stop = asyncio.Event()
    task = asyncio.create_task(follower.run(stop))
    await stream.put(publish(publisher, 1))
    await until(lambda: follower.refused == 1)
    stop.set()
    await asyncio.wait_for(task, 10)


async def test_two_epochs_with_one_number_are_two_versions(config, tmp_path, stream, replica):
    old, new = Publisher(config, "r", tmp_path), Publisher(config, "r", tmp_path)
    stale = publish(old, 5, epoch=1, seed=1)
    await stream.put(publish(new, 5, epoch=2, seed=2))
    await replica.until(1)
    assert folders(new) == ["v-1-5", "v-2-5"]
    assert same(replica.applied[0][1], tensors(2))
    await stream.put(stale)  # the paused learner wakes up
    await stream.put(publish(old, 6, epoch=1))  # with a greater number even: still an older epoch
    await until(lambda: replica.follower.refused == 1)
    await stream.put(publish(new, 7, epoch=2))
    await replica.until(2)
    assert [pair for pair, _ in replica.applied] == [(2, 5), (2, 7)]
    publish(old, 7, epoch=1)
    publish(old, 8, epoch=1)
    assert {"v-2-5", "v-2-7"} <= set(folders(new))  # an old publisher never removes what is not its own
    old.close(unlink=True)
    new.close(unlink=True)


async def test_a_version_that_is_gone_is_an_error_only_when_no_newer_one_came(publisher, config, tmp_path):
    class Late(Stream):
        """Shows version 1 to `after` although 2 is there: the follower was slow between the two."""

        async def newest(self):
            return self.next

    stream = Late()
    stream.next = None
    first = publish(publisher, 1)
    for version in (2, 3):
        publish(publisher, version)
    replica = Replica(stream, config, tmp_path)
    stop = asyncio.Event()
    task = asyncio.create_task(replica.follower.run(stop))
    stream.next = (3, b"")
    await stream.put(first)
    await until(lambda: replica.follower._seen == 1)
    assert replica.follower.refused == 0
    stream.next = (2, b"")
    gone = foreign(first, version=2, folder="v-9-2", epoch=9)
    await stream.put(gone)
    await until(lambda: replica.follower.refused == 1)
    stop.set()
    await asyncio.wait_for(task, 10)


CRASHING = """
import sys, pathlib, torch
from streamrl.config import WeightsConfig
from streamrl.weight_sync import Publisher
publisher = Publisher(WeightsConfig(transport=sys.argv[1], shard_bytes=4096), "r", pathlib.Path(sys.argv[2]))
first = [(f"t{i}", torch.full((1024,), 1.0)) for i in range(8)]
sys.stdout.buffer.write(publisher.publish(epoch=1, version=1, step=1, tensors=first) + b"\\n")
def endless():
    for i in range(10**9):
        if i == 5:
            print("writing", flush=True)
            sys.stdin.read()
        yield f"t{i}", torch.full((1024,), 2.0)
publisher.publish(epoch=1, version=2, step=2, tensors=endless())
"""


async def test_a_publisher_killed_in_mid_write_leaves_nothing_that_anybody_reads(config, tmp_path, stream, replica):
    process = subprocess.Popen(  # noqa: ASYNC220
        [sys.executable, "-c", CRASHING, config.transport, str(tmp_path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    data = await asyncio.to_thread(process.stdout.readline)
    assert await asyncio.to_thread(process.stdout.readline) == b"writing\n"
    root = transports_module.make_transport(config.transport, tmp_path).root
    draft = [entry for entry in root.iterdir() if entry.name.startswith(".draft-1-2-")]
    assert len(draft) == 1
    assert len(list(draft[0].iterdir())) >= 4  # some shards are written
    os.kill(process.pid, signal.SIGKILL)
    process.wait(10)
    process.stdin.close()
    process.stdout.close()
    await stream.put(data.rstrip(b"\n"))  # version 1 stays whole for a late joiner
    await replica.until(1)
    assert replica.applied[0][1]["t3"].tolist() == [1.0] * 1024
    successor = Publisher(config, "r", tmp_path)
    assert folders(successor) == ["v-1-1"]
    await stream.put(publish(successor, 2, epoch=2))
    await replica.until(2)
    publish(successor, 3, epoch=2)
    assert folders(successor) == ["v-2-2", "v-2-3"]
    successor.close(unlink=True)


def test_a_start_removes_stale_versions_but_the_newest(config, tmp_path):
    first = Publisher(config, "r", tmp_path)
    for version in (1, 2):
        publish(first, version)
    (first.root / ".draft-1-3-99999").mkdir()
    (first.root / "v-1-10").mkdir()
    (first.root / "something else").mkdir()
    second = Publisher(config, "r", tmp_path)
    assert folders(second) == ["something else", "v-1-10"]
    publish(second, 10, epoch=1)  # a fresh run in an old directory may use the numbers again
    assert decode((second.root / "v-1-10" / "manifest.json").read_bytes()).pair == (1, 10)
    second.close(unlink=True)
    assert folders(second) == ["something else"]
    (second.root / "something else").rmdir()
    second.root.rmdir()


def test_the_supervisor_gives_the_memory_of_an_ended_run_back_without_torch(tmp_path):
    publisher = Publisher(WeightsConfig(), "r", tmp_path)
    manifest = decode(publish(publisher, 1))
    mapped = map_version(publisher.root / "v-1-1", manifest)
    program = """
import pathlib, sys
from streamrl.weight_sync.transports import release_memory
release_memory(pathlib.Path(sys.argv[1]))
release_memory(pathlib.Path(sys.argv[1]))
assert "torch" not in sys.modules
"""
    subprocess.run([sys.executable, "-c", program, str(tmp_path)], check=True)
    assert not publisher.root.exists()
    assert same(mapped, tensors(1))


def test_one_version_is_published_once(publisher, config, tmp_path):
    other = Publisher(config, "r", tmp_path)
    publish(publisher, 1)
    with pytest.raises(WeightsError, match="another learner"):
        publish(other, 1)
    assert folders(publisher) == ["v-1-1"]
    other.close(unlink=False)


@pytest.fixture
def tiny_memory(tmp_path):
    """A real file system of 256 KiB."""
    mount = tmp_path / "shm"
    mount.mkdir()
    made = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=256k", "none", str(mount)], capture_output=True, check=False
    )
    if made.returncode:
        pytest.skip(f"mounting a tmpfs needs root: {made.stderr.decode().strip()}")
    yield mount
    subprocess.run(["umount", "--lazy", str(mount)], check=True)


@pytest.mark.parametrize("checked", [True, False])
def test_full_shared_memory_is_a_clear_error_and_leaves_nothing(tmp_path, tiny_memory, monkeypatch, checked):
    monkeypatch.setattr(transports_module, "_SHARED_MEMORY", tiny_memory)
    monkeypatch.setattr("streamrl.weight_sync.publisher._SLACK_BYTES", 0)
    if not checked:  # the check is a courtesy; the file system has the last word
        monkeypatch.setattr("streamrl.weight_sync.publisher.check_room", lambda transport, need: None)
    publisher = Publisher(WeightsConfig(shard_bytes=16384), "r", tmp_path)
    small = [("a", torch.zeros(1000))]
    publisher.publish(epoch=1, version=1, step=1, tensors=small)
    with pytest.raises(CannotCreate) as caught:
        publisher.publish(epoch=1, version=2, step=2, tensors=[(f"t{i}", torch.zeros(4096)) for i in range(20)])
    assert "weights.transport=directory" in caught.value.hint
    assert caught.value.exit_code == 73
    assert folders(publisher) == ["v-1-1"]
    publisher.publish(epoch=1, version=2, step=2, tensors=small)
    assert folders(publisher) == ["v-1-1", "v-1-2"]


def test_room_is_checked_without_a_mount_too(publisher, monkeypatch):
    """Same as above where nobody may mount: the answer of the file system is played, because it cannot be had."""

    class Full:
        f_bavail, f_frsize = 1, 4096

    monkeypatch.setattr(transports_module.os, "statvfs", lambda path: Full)
    with pytest.raises(CannotCreate, match="no room"):
        publish(publisher, 1)
    assert folders(publisher) == []


def test_a_root_of_somebody_else_is_not_used(tmp_path, monkeypatch):
    monkeypatch.setattr(transports_module, "_SHARED_MEMORY", tmp_path)
    root = transports_module.ShmTransport.of_run(tmp_path).root
    (tmp_path / "elsewhere").mkdir()
    root.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(CannotCreate, match="somebody else"):
        Publisher(WeightsConfig(), "r", tmp_path)


def test_bad_tensors_and_the_deadline_of_a_publisher(tmp_path):
    publisher = Publisher(WeightsConfig(transport="directory", deadline=0.05, shard_bytes=1), "r", tmp_path)
    with pytest.raises(WeightsError, match="twice"):
        publisher.publish(epoch=1, version=1, step=1, tensors=[("a", torch.zeros(1)), ("a", torch.zeros(1))])
    with pytest.raises(WeightsError, match="complex64"):
        publisher.publish(epoch=1, version=1, step=1, tensors=[("a", torch.zeros(1, dtype=torch.complex64))])

    def slow():
        yield "a", torch.zeros(1)
        time.sleep(0.1)
        yield "b", torch.zeros(1)
        yield "c", torch.zeros(1)

    with pytest.raises(DeadlineExceeded, match=r"0\.05 s"):
        publisher.publish(epoch=1, version=1, step=1, tensors=slow())
    assert folders(publisher) == []


async def test_training_goes_on_while_versions_are_written_and_read(tmp_path):
    """Every tensor on its way out, and every version applied, waits for one more optimizer step: a lock would hang."""
    torch.set_num_threads(1)
    config = WeightsConfig(transport="directory", shard_bytes=1 << 20)
    publisher = Publisher(config, "r", tmp_path)
    stream, loop = Stream(), asyncio.get_running_loop()
    model, stop, done = torch.nn.Linear(64, 64), asyncio.Event(), threading.Event()
    stepped = threading.Condition()
    steps = [0]

    def train():
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
        while not done.is_set():
            model(torch.ones(1, 64)).sum().backward()
            optimizer.step()
            with stepped:
                steps[0] += 1
                stepped.notify_all()

    def one_more_step():
        with stepped:
            now = steps[0]
            assert stepped.wait_for(lambda: steps[0] > now, 30)

    def snapshot():
        for index in range(6):
            one_more_step()
            yield f"t{index}", torch.randn(1 << 18)

    def publish_three():
        for version in (1, 2, 3):
            data = publisher.publish(epoch=1, version=version, step=version, tensors=snapshot())
            asyncio.run_coroutine_threadsafe(stream.put(data), loop).result(30)

    async def apply(manifest, tensors):
        await asyncio.to_thread(one_more_step)

    follower = Follower(stream, config, apply, run="r", run_dir=tmp_path)
    async with asyncio.TaskGroup() as group:
        group.create_task(follower.run(stop))
        trainer = group.create_task(asyncio.to_thread(train))
        await asyncio.to_thread(publish_three)
        await until(lambda: follower.version == 3)
        done.set()
        stop.set()
        await trainer
    assert follower.refused == 0
