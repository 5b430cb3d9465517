"""A version is written whole or not at all, and nothing of it stays behind when that fails."""

import asyncio
import errno
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import orjson
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import load_file
from sync_kit import both_folders, folders, publish, same, tensors

from streamrl.config import DeltaConfig, WeightsConfig
from streamrl.errors import CannotCreate, ConfigError, DeadlineExceeded, WeightsError
from streamrl.weight_sync import files as files_module
from streamrl.weight_sync.manifest import decode, read_manifest, versions
from streamrl.weight_sync.publisher import Publisher
from streamrl.weight_sync.tensors import map_version


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
async def test_every_bit_arrives_and_the_library_reads_the_same_files(tmp_path, dtype):
    config = WeightsConfig(transport="directory", shard_bytes=4096, dtype=dtype)
    publisher = Publisher(config, "r", tmp_path)
    source = {**tensors(dtype=getattr(torch, dtype)), "steps": torch.arange(9), "zero": torch.tensor([-0.0, 1e-45])}
    data = publisher.publish(epoch=3, version=7, step=5, tensors=source.items())
    manifest = decode(data)
    folder = publisher.root / "v-3-7"
    mapped = map_version(folder, manifest)
    assert (folder / "manifest.json").read_bytes() == data
    assert list(mapped.tensors) == list(source)
    by_library = {}
    for shard in manifest.shards:
        by_library.update(load_file(folder / shard.file))
        with safe_open(folder / shard.file, "pt") as file:
            assert set(file.keys()) == {
                entry.name for entry in manifest.tensors if manifest.shards[entry.shard].file == shard.file
            }
    for name, tensor in source.items():
        for got in (mapped.tensors[name], by_library[name]):
            assert got.dtype == tensor.dtype
            assert got.shape == tensor.shape
            assert got.reshape(-1).view(torch.uint8).tolist() == tensor.reshape(-1).view(torch.uint8).tolist()
    assert len(manifest.shards) > (dtype == "float32")
    assert all(shard.bytes <= 4096 + 1024 for shard in manifest.shards if shard.file != "00000.safetensors")


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
    assert same(map_version(publisher.root / manifest.folder, manifest).tensors, source)


@both_folders
def test_old_versions_stay_readable_while_mapped(publisher):
    manifest = decode(publish(publisher, 1))
    mapped = map_version(publisher.root / manifest.folder, manifest)
    for version in range(2, 5):
        publish(publisher, version)
    assert not (publisher.root / "v-1-1").exists()
    assert same(mapped.tensors, tensors(1))


def test_a_holder_cannot_change_the_files(publisher):
    manifest = decode(publish(publisher, 1))
    map_version(publisher.root / manifest.folder, manifest).tensors["norm"].fill_(3.0)
    assert same(map_version(publisher.root / manifest.folder, manifest).tensors, tensors(1))


CRASHING = """
import sys, pathlib, torch
from streamrl.config import DeltaConfig, WeightsConfig
from streamrl.weight_sync.publisher import Publisher
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


@both_folders
async def test_a_publisher_killed_in_mid_write_leaves_nothing_that_anybody_reads(config, tmp_path, stream, replica):
    process = subprocess.Popen(  # noqa: ASYNC220
        [sys.executable, "-c", CRASHING, config.transport, str(tmp_path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    data = await asyncio.to_thread(process.stdout.readline)
    assert await asyncio.to_thread(process.stdout.readline) == b"writing\n"
    root = files_module.store_of(config.transport, tmp_path).root
    draft = [entry for entry in root.iterdir() if entry.name.startswith(".draft-1-2")]
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
    shutil.rmtree(successor.root, ignore_errors=True)


@both_folders
def test_a_start_removes_stale_versions_but_the_newest(config, tmp_path):
    first = Publisher(config, "r", tmp_path)
    for version in (1, 2):
        publish(first, version)
    (first.root / ".draft-1-3-99999").mkdir()
    (first.root / "v-1-10").mkdir()
    (first.root / "something else").mkdir()
    second = Publisher(config, "r", tmp_path)
    assert folders(second) == ["something else", "v-1-2"]
    publish(second, 2, tensors(5))  # a fresh run in an old directory may use the numbers again
    assert same(map_version(second.root / "v-1-2", second.manifest).tensors, tensors(5))
    shutil.rmtree(second.root)


@pytest.mark.parametrize("failing", [1, 2, 3])
def test_a_start_removes_nothing_that_a_file_system_fails_to_read(tmp_path, monkeypatch, failing):
    config = WeightsConfig(transport="directory", delta=DeltaConfig(enabled=True))
    first = Publisher(config, "r", tmp_path)
    for version in (1, 2, 3):
        weights = torch.zeros(10000)
        weights[:version] = version
        first.publish(epoch=1, version=version, step=version, tensors=[("a", weights)])
    assert [found.kind for found in versions(first.root).values()] == ["full", "delta", "delta"]
    (first.root / "v-1-4").mkdir()
    read = Path.read_bytes

    def failing_read(path):
        if path.parent.name == f"v-1-{failing}":
            raise OSError(errno.EIO, "input/output error")
        return read(path)

    with monkeypatch.context() as patch:
        patch.setattr(Path, "read_bytes", failing_read)
        second = Publisher(config, "r", tmp_path)
    assert folders(second) == ["v-1-1", "v-1-2", "v-1-3"]
    with pytest.raises(ConfigError):
        second.publish(epoch=2, version=4, step=4, tensors=[("a", torch.tensor([torch.nan]))])
    assert folders(second) == ["v-1-1", "v-1-2", "v-1-3"]
    second.publish(epoch=2, version=5, step=5, tensors=[("a", torch.zeros(10000))])
    second.publish(epoch=2, version=6, step=6, tensors=[("a", torch.ones(10000))])
    second.publish(epoch=2, version=7, step=7, tensors=[("a", torch.zeros(10000))])
    assert not {"v-1-1", "v-1-2", "v-1-3"} & set(folders(second))


def test_the_supervisor_gives_the_memory_of_an_ended_run_back_without_torch(tmp_path):
    publisher = Publisher(WeightsConfig(), "r", tmp_path)
    manifest = decode(publish(publisher, 1))
    mapped = map_version(publisher.root / "v-1-1", manifest)
    program = """
import pathlib, sys
from streamrl.weight_sync.files import release_memory
release_memory(pathlib.Path(sys.argv[1]))
release_memory(pathlib.Path(sys.argv[1]))
assert "torch" not in sys.modules
"""
    subprocess.run([sys.executable, "-c", program, str(tmp_path)], check=True)
    assert not publisher.root.exists()
    assert same(mapped.tensors, tensors(1))


@both_folders
def test_one_version_is_published_once(publisher, config, tmp_path):
    other = Publisher(config, "r", tmp_path)
    publish(publisher, 1)
    with pytest.raises(WeightsError, match="another learner"):
        publish(other, 1)
    assert folders(publisher) == ["v-1-1"]


@pytest.fixture
def tiny_memory(tmp_path):
    """A real file system of 256 KiB."""
    mount = tmp_path / "shm"
    mount.mkdir()
    made = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=256k", "none", str(mount)], capture_output=True, check=False
    )
    if made.returncode:
        pytest.skip(f"mounting a tmpfs is not allowed here: {' '.join(made.stderr.decode().split())}")
    yield mount
    subprocess.run(["umount", "--lazy", str(mount)], check=True)


@pytest.mark.parametrize("checked", [True, False])
def test_full_shared_memory_is_a_clear_error_and_leaves_nothing(tmp_path, tiny_memory, monkeypatch, checked):
    monkeypatch.setattr(files_module, "_SHARED_MEMORY", tiny_memory)
    monkeypatch.setattr("streamrl.weight_sync.publisher.SLACK_BYTES", 0)
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

    monkeypatch.setattr(files_module.os, "statvfs", lambda path: Full)
    with pytest.raises(CannotCreate, match="no room"):
        publish(publisher, 1)
    assert folders(publisher) == []


def test_a_root_of_somebody_else_is_not_used(tmp_path, monkeypatch):
    monkeypatch.setattr(files_module, "_SHARED_MEMORY", tmp_path)
    root = files_module.shm_store(tmp_path).root
    (tmp_path / "elsewhere").mkdir()
    root.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(CannotCreate, match="somebody else"):
        Publisher(WeightsConfig(), "r", tmp_path)


@pytest.mark.parametrize("delta", [False, True])
@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_weights_that_are_not_finite_never_become_a_version(tmp_path, value, delta):
    config = WeightsConfig(transport="directory", shard_bytes=64, delta=DeltaConfig(enabled=delta, max_density=1.0))
    publisher = Publisher(config, "r", tmp_path)
    publisher.publish(epoch=1, version=1, step=1, tensors=[("a", torch.zeros(9)), ("b", torch.zeros(40))])
    bad = torch.zeros(40)
    bad[7] = value
    with pytest.raises(ConfigError, match="b has values that are not finite"):
        publisher.publish(epoch=1, version=2, step=2, tensors=[("a", torch.zeros(9)), ("b", bad)])
    assert folders(publisher) == ["v-1-1"]


def test_a_version_of_an_older_program_is_named_and_replaced(tmp_path):
    """Its files stay for nobody: the next learner publishes its weights anew."""
    old = tmp_path / "weights" / "v-1-3"
    old.mkdir(parents=True)
    entry = {"name": "a", "dtype": "F32", "shape": [2], "parts": [0], "hashes": []}
    manifest = {"type": "manifest", "v": 2, "run": "r", "version": 3, "epoch": 1, "step": 3, "shards": [],
                "transport": "directory", "folder": "v-1-3", "tensors": [entry]}  # fmt: skip
    (old / "manifest.json").write_bytes(orjson.dumps(manifest))
    with pytest.raises(WeightsError, match="version of schema 2, this program reads 3") as caught:
        read_manifest(old)
    assert "publishes its weights anew" in caught.value.hint
    publisher = Publisher(WeightsConfig(transport="directory"), "r", tmp_path)
    assert versions(publisher.root) == {}
    publish(publisher, 4, epoch=2)
    publish(publisher, 5, epoch=2)
    assert folders(publisher) == ["v-2-4", "v-2-5"]


def test_the_deadline_of_a_publisher(tmp_path):
    publisher = Publisher(WeightsConfig(transport="directory", deadline=0.05, shard_bytes=1), "r", tmp_path)

    def slow():
        yield "a", torch.zeros(1)
        time.sleep(0.1)
        yield "b", torch.zeros(1)
        yield "c", torch.zeros(1)

    with pytest.raises(DeadlineExceeded, match=r"0\.05 s"):
        publisher.publish(epoch=1, version=1, step=1, tensors=slow())
    assert folders(publisher) == []
