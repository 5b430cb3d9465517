"""A version is written over the files of one that was removed, but never under the eyes of a reader."""

import subprocess
import sys

import pytest
import torch
from safetensors.torch import load_file

from streamrl.config import DeltaConfig, WeightsConfig
from streamrl.errors import WeightsError
from streamrl.weight_sync.files import take_spare
from streamrl.weight_sync.manifest import decode
from streamrl.weight_sync.publisher import Publisher
from streamrl.weight_sync.tensors import map_version

SHAPES = {"a": (300, 40), "b": (7,), "c": (200, 60)}


def tensors(version, rows=1):
    return {name: torch.full((rows * shape[0], *shape[1:]), float(version)) for name, shape in SHAPES.items()}


class Hand:
    """Publishes and looks at the files."""

    def __init__(self, config, run_dir):
        self.publisher = Publisher(config, "r", run_dir)

    def publish(self, version, rows=1):
        named = tensors(version, rows).items()
        return decode(self.publisher.publish(epoch=1, version=version, step=version, tensors=named))

    def map(self, manifest):
        return map_version(self.publisher.root / manifest.folder, manifest)

    def files(self, manifest):
        return {
            shard.file: (self.publisher.root / manifest.folder / shard.file).stat().st_ino for shard in manifest.shards
        }

    def names(self):
        return sorted(entry.name for entry in self.publisher.root.iterdir())


@pytest.fixture
def hand(tmp_path):
    made = Hand(WeightsConfig(shard_bytes=64 << 10), tmp_path)
    yield made
    made.publisher.close(unlink=True)


def holds(version, number, rows=1):
    return all(torch.equal(version.tensors[name], tensor) for name, tensor in tensors(number, rows).items())


def test_the_files_of_a_removed_version_are_used_again(hand):
    manifests = [hand.publish(version) for version in (1, 2)]
    first, second = map(hand.files, manifests)
    third = hand.publish(3)
    assert len(first) == 2
    assert hand.files(third) == first
    assert hand.names() == ["v-1-2", "v-1-3"]
    assert holds(hand.map(third), 3)
    fourth = hand.publish(4)
    assert hand.files(fourth) == second
    for shard in fourth.shards:
        load_file(hand.publisher.root / fourth.folder / shard.file)


def test_what_is_mapped_is_left_alone(hand):
    first = hand.publish(1)
    reader = hand.map(first)
    before = hand.files(first)
    hand.publish(2)
    third = hand.publish(3)
    assert set(hand.files(third).values()).isdisjoint(before.values())
    assert holds(reader, 1)
    assert holds(hand.map(third), 3)
    assert hand.names() == ["v-1-2", "v-1-3"]


def test_one_file_that_is_read_keeps_only_itself(hand):
    first = hand.publish(1)
    before = hand.files(first)
    name, other = sorted(before)
    with (hand.publisher.root / first.folder / name).open("rb") as reader:
        content = reader.read()
        hand.publish(2)
        after = hand.files(hand.publish(3))
        assert after[name] != before[name]
        assert after[other] == before[other]
        reader.seek(0)
        assert reader.read() == content


READER = """
import mmap, sys
with open(sys.argv[1], "rb") as file:
    mapped = mmap.mmap(file.fileno(), 0, flags=mmap.MAP_PRIVATE, prot=mmap.PROT_READ)
before = bytes(mapped)
print("mapped", flush=True)
sys.stdin.readline()
sys.exit(0 if bytes(mapped) == before else 1)
"""


def test_a_reader_in_another_process_is_left_alone(hand):
    first = hand.publish(1)
    before = hand.files(first)
    path = hand.publisher.root / first.folder / min(before)
    reader = subprocess.Popen(
        [sys.executable, "-c", READER, path], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    try:
        assert reader.stdout.readline() == "mapped\n"
        hand.publish(2)
        after = hand.files(hand.publish(3))
        assert after[min(before)] != before[min(before)]
        reader.communicate("\n", 20)
        assert reader.returncode == 0
    finally:
        reader.kill()
        reader.wait(10)


@pytest.mark.parametrize("rows", [2, 1])
def test_other_sizes(hand, rows):
    for version in (1, 2):
        hand.publish(version, rows=3 - rows)
    third = hand.publish(3, rows=rows)
    assert holds(hand.map(third), 3, rows)
    assert [(hand.publisher.root / third.folder / shard.file).stat().st_size for shard in third.shards] == [
        shard.bytes for shard in third.shards
    ]


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
    hand = Hand(config, tmp_path)
    seen = []
    for version in range(1, 5):
        manifest = hand.publish(version)
        if config.transport != "directory":  # a disk gives numbers of files out again
            assert not set(hand.files(manifest).values()) & set(seen)
        seen += hand.files(manifest).values()
        assert holds(hand.map(manifest), version)
        assert not [name for name in hand.names() if "spare" in name]
    hand.publisher.close(unlink=True)


def test_a_version_that_fails_halfway_leaves_nothing_and_harms_nobody(hand):
    for version in (1, 2):
        newest = hand.publish(version)

    def broken():
        yield from tensors(3).items()
        raise WeightsError("the copy broke")

    with pytest.raises(WeightsError, match="broke"):
        hand.publisher.publish(epoch=1, version=3, step=3, tensors=broken())
    assert hand.names() == ["v-1-2"]
    assert holds(hand.map(newest), 2)
    assert holds(hand.map(hand.publish(4)), 4)


def test_a_file_that_is_not_there_or_whose_place_is_not_there(tmp_path):
    assert take_spare(tmp_path / "none", tmp_path / "new") is None
    (tmp_path / "old").write_bytes(b"old")
    assert take_spare(tmp_path / "old", tmp_path / "nowhere" / "new") is None
    assert (tmp_path / "old").exists()
    assert take_spare(tmp_path / "old", tmp_path / "new") == 3
    assert not (tmp_path / "old").exists()


def test_where_the_kernel_grants_no_leases_nothing_is_taken(tmp_path, monkeypatch):
    def refuse(*_):
        raise OSError(22, "Invalid argument")

    monkeypatch.setattr("fcntl.fcntl", refuse)
    (tmp_path / "old").write_bytes(b"old")
    assert take_spare(tmp_path / "old", tmp_path / "new") is None
    assert not list(tmp_path.iterdir())


def test_a_file_with_another_name_is_left_alone(tmp_path):
    (tmp_path / "old").write_bytes(b"old")
    (tmp_path / "kept").hardlink_to(tmp_path / "old")
    assert take_spare(tmp_path / "old", tmp_path / "new") is None
    assert [path.name for path in tmp_path.iterdir()] == ["kept"]
    (tmp_path / "symbolic").symlink_to(tmp_path / "kept")
    assert take_spare(tmp_path / "symbolic", tmp_path / "new") is None
    assert (tmp_path / "kept").read_bytes() == b"old"
