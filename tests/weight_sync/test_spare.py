"""A version is written over the files of one that was removed, but never under the eyes of a reader."""

import mmap
import subprocess
import sys

import pytest
import torch
from safetensors.torch import load_file
from sync_kit import folders

from streamrl.config import DeltaConfig, WeightsConfig
from streamrl.errors import WeightsError
from streamrl.weight_sync.files import take_spare
from streamrl.weight_sync.manifest import decode
from streamrl.weight_sync.publisher import Publisher
from streamrl.weight_sync.tensors import map_version

SHAPES = {"a": (300, 40), "b": (7,), "c": (200, 60)}


def tensors(version, rows=1):
    return {name: torch.full((rows * shape[0], *shape[1:]), float(version)) for name, shape in SHAPES.items()}


@pytest.fixture
def publisher(tmp_path):
    made = Publisher(WeightsConfig(shard_bytes=64 << 10), "r", tmp_path)
    yield made
    made.close(unlink=True)


def publish(publisher, version, rows=1):
    """Publish a version; its folder, and the inode of each of its files."""
    named = tensors(version, rows).items()
    manifest = decode(publisher.publish(epoch=1, version=version, step=version, tensors=named))
    folder = publisher.root / manifest.folder
    found = map_version(folder, manifest).tensors
    assert all(torch.equal(found[name], tensor) for name, tensor in tensors(version, rows).items())
    assert all((folder / shard.file).stat().st_size == shard.bytes for shard in manifest.shards)
    return folder, {shard.file: (folder / shard.file).stat().st_ino for shard in manifest.shards}


def test_the_files_of_a_removed_version_are_used_again(publisher):
    (_, first), (_, second), (_, third) = (publish(publisher, version) for version in (1, 2, 3))
    assert len(first) == 2
    assert third == first
    assert folders(publisher) == ["v-1-2", "v-1-3"]
    folder, fourth = publish(publisher, 4)
    assert fourth == second
    for file in fourth:
        load_file(folder / file)
    publish(publisher, 5, rows=2)  # larger files over smaller ones, and back
    publish(publisher, 6, rows=2)
    publish(publisher, 7)


READER = """
import mmap, sys
with open(sys.argv[1], "rb") as file:
    mapped = mmap.mmap(file.fileno(), 0, flags=mmap.MAP_PRIVATE, prot=mmap.PROT_READ)
before = bytes(mapped)
print("mapped", flush=True)
sys.stdin.readline()
sys.exit(0 if bytes(mapped) == before else 1)
"""


@pytest.mark.parametrize("how", ["open", "mapped", "mapped by another process"])
def test_a_file_that_is_read_is_left_alone_and_keeps_only_itself(publisher, how):
    folder, before = publish(publisher, 1)
    name, other = sorted(before)
    with (folder / name).open("rb") as file:
        content = file.read()
        mapped = mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ)
        file.seek(0)
        if how == "open":
            mapped.close()
        else:
            file.close()
        if how == "mapped by another process":
            mapped.close()
            reader = subprocess.Popen(
                [sys.executable, "-c", READER, folder / name], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
            )
            assert reader.stdout.readline() == "mapped\n"
        publish(publisher, 2)
        _, after = publish(publisher, 3)
        assert after[name] != before[name]
        assert after[other] == before[other]
        if how == "open":
            assert file.read() == content
        elif how == "mapped":
            assert mapped[:] == content
        else:
            reader.communicate("\n", 20)
            assert reader.returncode == 0
    assert folders(publisher) == ["v-1-2", "v-1-3"]


@pytest.mark.parametrize(
    "config",
    [
        WeightsConfig(transport="http"),
        WeightsConfig(transport="collective"),
        WeightsConfig(transport="directory"),
        WeightsConfig(delta=DeltaConfig(enabled=True, every=1)),
    ],
    ids=["http", "collective", "directory", "delta"],
)
def test_not_where_files_are_sent_or_kept(config, tmp_path):
    publisher = Publisher(config, "r", tmp_path)
    seen = set()
    for version in range(1, 5):
        _, files = publish(publisher, version)
        if config.transport != "directory":  # a disk gives numbers of files out again
            assert not set(files.values()) & seen
        seen |= set(files.values())
        assert not [name for name in folders(publisher) if "spare" in name]
    publisher.close(unlink=True)


def test_a_version_that_fails_halfway_leaves_nothing_and_harms_nobody(publisher):
    for version in (1, 2):
        folder, files = publish(publisher, version)

    def broken():
        yield from tensors(3).items()
        raise WeightsError("the copy broke")

    with pytest.raises(WeightsError, match="broke"):
        publisher.publish(epoch=1, version=3, step=3, tensors=broken())
    assert folders(publisher) == ["v-1-2"]
    for file in files:
        assert all(tensor.eq(2.0).all() for tensor in load_file(folder / file).values())
    publish(publisher, 4)


def test_what_is_no_spare_file(tmp_path, monkeypatch):
    assert take_spare(tmp_path / "none", tmp_path / "new") is None
    (tmp_path / "old").write_bytes(b"old")
    assert take_spare(tmp_path / "old", tmp_path / "nowhere" / "new") is None
    assert (tmp_path / "old").exists()
    (tmp_path / "kept").hardlink_to(tmp_path / "old")  # it has another name
    assert take_spare(tmp_path / "old", tmp_path / "new") is None
    assert [path.name for path in tmp_path.iterdir()] == ["kept"]
    (tmp_path / "symbolic").symlink_to(tmp_path / "kept")
    assert take_spare(tmp_path / "symbolic", tmp_path / "new") is None
    assert (tmp_path / "kept").read_bytes() == b"old"
    assert take_spare(tmp_path / "kept", tmp_path / "new") == 3
    assert not (tmp_path / "kept").exists()

    def refuse(*_):
        raise OSError(22, "Invalid argument")

    monkeypatch.setattr("fcntl.fcntl", refuse)  # a kernel that grants no leases
    assert take_spare(tmp_path / "new", tmp_path / "newer") is None
    assert not list(tmp_path.iterdir())
