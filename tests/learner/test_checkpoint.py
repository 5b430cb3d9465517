"""Checkpoints: whole or not at all, read back, and void ones never loaded."""

from __future__ import annotations

import resource
import signal

import msgspec
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors import safe_open

from streamrl.errors import CannotCreate
from streamrl.learner.checkpoint import (
    Checkpoints,
    InvalidCheckpoint,
    Meta,
    describe,
    milestones,
    parse_name,
    shard_name,
)
from streamrl.learner.checkpoint_files import open_shards, write_shard
from streamrl.learner.ranks import rows_of
from streamrl.store import ObjectStore

TENSORS = {
    "weight": torch.arange(12.0).reshape(3, 4),
    "odd": torch.tensor([float("nan"), -0.0, float("inf")]),
    "half": torch.ones(5, dtype=torch.bfloat16),
    "steps": torch.tensor(7),
}


def same_bytes(read, tensor) -> bool:
    return (
        (read.dtype, read.shape) == (tensor.dtype, tensor.shape)
        and bytes(read.reshape(-1).view(torch.uint8)) == bytes(tensor.reshape(-1).view(torch.uint8))
    )  # fmt: skip


def make(folder, epoch, step, *, world=1, version=1, bases=()):
    checkpoints = Checkpoints(folder)
    draft = checkpoints.begin((epoch, step))
    shards = [write_shard(draft / shard_name(rank, world), TENSORS) for rank in range(world)]
    assert shards == [describe(draft / shard.file) for shard in shards]
    meta = Meta(epoch=epoch, step=step, version=version, world=world, shards=shards, bases=list(bases))
    checkpoints.finish(meta)
    return meta


def test_what_is_written_is_read_bit_for_bit(tmp_path):
    make(tmp_path, 1, 3, world=2)
    checkpoints = Checkpoints(tmp_path)
    meta = checkpoints.greatest(None, 0)
    assert meta is not None
    assert meta.position == (1, 3)
    assert meta.name == "1-3"
    for rank in range(2):
        with open_shards(checkpoints.path((1, 3)), 2) as shards:
            assert shards.names == sorted(TENSORS)
        with safe_open(checkpoints.path((1, 3)) / shard_name(rank, 2), framework="pt") as file:
            for name, tensor in TENSORS.items():
                assert same_bytes(file.get_tensor(name), tensor)


def test_a_draft_is_no_checkpoint(tmp_path):
    checkpoints = Checkpoints(tmp_path)
    write_shard(checkpoints.begin((1, 1)) / shard_name(0, 1), TENSORS)
    assert checkpoints.greatest(None, 0) is None
    checkpoints.remove_unfinished(1)
    assert checkpoints.path((1, 1)).exists()  # of this epoch: not mine to remove
    checkpoints.remove_unfinished(2)
    assert not checkpoints.path((1, 1)).exists()


@pytest.mark.parametrize("damage", ["meta", "shard", "byte", "short", "renamed"])
def test_a_damaged_checkpoint_is_passed_over(tmp_path, damage):
    make(tmp_path, 1, 1)
    make(tmp_path, 1, 2)
    path = Checkpoints(tmp_path).path((1, 2))
    assert Checkpoints(tmp_path).greatest(None, 0).position == (1, 2)
    shard = path / shard_name(0, 1)
    if damage == "meta":
        (path / "meta.json").write_text("{")
    elif damage == "shard":
        shard.unlink()
    elif damage == "byte":
        data = bytearray(shard.read_bytes())
        data[-3] ^= 1
        shard.write_bytes(data)
    elif damage == "short":
        shard.write_bytes(shard.read_bytes()[:-4])
    else:
        path.rename(Checkpoints(tmp_path).path((1, 9)))
    assert Checkpoints(tmp_path).greatest(None, 0).position == (1, 1)


def before(folder, log=b"3\n1\n2\n7\n", **changes):
    """A checkpoint as versions of streamrl before 2026-11-28 wrote it, of the second learner of a run."""
    meta = make(folder, 2, 3, version=9, bases=[(1, 2)])
    path = Checkpoints(folder).path((2, 3)) / "meta.json"
    links = {"chain": [("trained-1.log", 4), ("trained-2.log", 4)], "count": 4, "record": [("groups-1.msgpack", 9)]}
    path.write_bytes(msgspec.json.encode({**msgspec.to_builtins(meta), **links, **changes}))
    (folder / "trained-1.log").write_bytes(log[:4] + b"9\n")
    (folder / "trained-2.log").write_bytes(log[4:])
    notes = [b"1 1 0 a", b"1 4 2 a", b"1 5 3 a", b"2 8 2 b", b"3 9", b"2 9 3 b", b"4 11 1 c", b"\xff 1 1 1"]
    (folder / "versions.log").write_bytes(b"\n".join(notes))


def test_what_was_in_files_beside_a_checkpoint_is_read(tmp_path):
    """Only the bytes that it names count, and the versions of its learners up to its step."""
    before(tmp_path)
    meta = Checkpoints(tmp_path).greatest(None, 0)
    assert (meta.trained, meta.count) == ([(1, 3), (7, 7)], 4)
    assert meta.versions == {1: 0, 4: 2, 5: 3, 8: 2, 9: 3}
    assert Checkpoints(tmp_path).greatest_epoch() == 2
    before(tmp_path / "short", b"3\n1\n2\n")
    before(tmp_path / "foreign", b"3\n1\nx\n7\n")
    assert Checkpoints(tmp_path / "short").greatest(None, 0) is None
    assert Checkpoints(tmp_path / "foreign").greatest(None, 0) is None


def test_an_epoch_has_one_learner(tmp_path):
    checkpoints = Checkpoints(tmp_path)
    assert checkpoints.greatest_epoch() == 0
    make(tmp_path, 3, 1)
    checkpoints.mark_epoch(7)
    assert Checkpoints(tmp_path).greatest_epoch() == 7
    with pytest.raises(CannotCreate, match="epoch-7"):
        checkpoints.mark_epoch(7)


def test_void_checkpoints_are_not_loaded(tmp_path):
    # Hole 4b: epoch 2 declared 1-10 as its base; a paused learner of epoch 1 then finished 1-20.
    for epoch, step in [(1, 10), (1, 20)]:
        make(tmp_path, epoch, step)
    checkpoints = Checkpoints(tmp_path)
    assert checkpoints.greatest(None, 0).position == (1, 20)
    assert checkpoints.greatest("1-10", 2).position == (1, 10)
    make(tmp_path, 2, 12)
    assert checkpoints.greatest("1-10", 2).position == (2, 12)
    assert checkpoints.greatest("0-0", 3) is None  # the declared base is the model of the run itself


def test_a_line_that_lacks_what_redis_retired_is_not_loaded(tmp_path):
    # Redis came back from before epoch 2, which had gone on from 1-10; the woken epoch 1 then retired for 1-20.
    checkpoints = Checkpoints(tmp_path)
    for step in (10, 20):
        make(tmp_path, 1, step)
    make(tmp_path, 2, 12, bases=[(1, 10)])
    assert checkpoints.greatest("1-5", 1, "1-10").position == (2, 12)  # both lines hold what was retired
    assert checkpoints.greatest("1-5", 1, "1-20").position == (1, 20)
    assert checkpoints.greatest("1-5", 1, "2-12").position == (2, 12)
    assert checkpoints.greatest("1-5", 1, "0-0").position == (2, 12)
    assert checkpoints.greatest("1-5", 1, "1-21") is None


def test_old_ones_are_removed_up_to_the_newest(tmp_path):
    metas = [make(tmp_path, 1, step) for step in (1, 2, 3)]
    make(tmp_path, 2, 1)
    checkpoints = Checkpoints(tmp_path)
    checkpoints.remove_older(metas[-1], keep=2)
    assert checkpoints.positions() == [(1, 2), (1, 3), (2, 1)]


def test_a_void_one_takes_no_place_of_those_that_are_kept(tmp_path):
    for step in (1, 2, 4):
        make(tmp_path, 1, step)
    checkpoints = Checkpoints(tmp_path)
    checkpoints.remove_older(make(tmp_path, 2, 3, bases=[(1, 2)]), keep=2)
    assert checkpoints.positions() == [(1, 2), (1, 4), (2, 3)]
    checkpoints.remove_older(make(tmp_path, 2, 4, bases=[(1, 2)]), keep=2)
    assert checkpoints.positions() == [(2, 3), (2, 4)]


def test_the_first_at_or_after_each_multiple_is_kept_as_well(tmp_path):
    checkpoints = Checkpoints(tmp_path)
    for step in (10, 13, 20, 33, 40, 41, 65, 70):
        checkpoints.remove_older(make(tmp_path, 1, step), keep=1, keep_every=20)
    assert checkpoints.positions() == [(1, 20), (1, 40), (1, 65), (1, 70)]


@given(st.lists(st.integers(1, 200), unique=True, min_size=1), st.integers(0, 50), st.integers(1, 3))
def test_what_is_kept_does_not_depend_on_when_the_others_went(steps, every, keep):
    line = [(1, step) for step in sorted(steps)]
    kept: list = []
    for place in line:
        kept = [*kept, place]
        kept = [place for place in kept if place in {*kept[-keep:], *milestones(kept, every)}]
    assert kept == [place for place in line if place in {*line[-keep:], *milestones(line, every)}]
    if every:
        assert len(milestones(line, every)) == len({step // every for step in steps} - {0})


def rows_of_all(tensor, world):
    return [tensor[rows_of(tensor.shape[0], rank, world)] for rank in range(world)]


@pytest.mark.parametrize("wrote", [1, 2, 3, 5])
@pytest.mark.parametrize("reads", [1, 2, 4, 7])
def test_any_number_of_ranks_reads_what_any_other_number_wrote(tmp_path, wrote, reads):
    """Also when some ranks have no rows of a tensor, as with 3 rows and 5 ranks."""
    whole = {
        "a": torch.arange(21.0).reshape(7, 3),
        "b": torch.arange(3),
        "c": torch.randn(1, 2, 2),
        "n": torch.tensor(9),
    }
    for rank in range(wrote):
        mine = {name: t if not t.dim() else rows_of_all(t, wrote)[rank] for name, t in whole.items()}
        write_shard(tmp_path / shard_name(rank, wrote), {n: t for n, t in mine.items() if t.numel()})
    with open_shards(tmp_path, wrote) as shards:
        assert {name: shards.shape(name) for name in shards.names} == {n: list(t.shape) for n, t in whole.items()}
        assert all(torch.equal(shards.read(name), tensor) for name, tensor in whole.items())
        for rank in range(reads):
            expected = {n: t if not t.dim() else rows_of_all(t, reads)[rank] for n, t in whole.items()}
            found = shards.rows(rank, reads)
            assert found.keys() == {n for n, t in expected.items() if t.numel()}
            assert all(torch.equal(found[name], expected[name]) for name in found)


def test_names(tmp_path):
    assert parse_name("3-120") == (3, 120) > parse_name(None) == parse_name("0-0")
    (tmp_path / "ckpt-latest").mkdir()
    assert Checkpoints(tmp_path).positions() == []


def test_a_checkpoint_that_its_learner_does_not_know_as_saved_is_written_again(tmp_path):
    """The answer of a store may be lost after the file is there."""
    make(tmp_path, 1, 1)
    make(tmp_path, 1, 1, version=2)
    assert Checkpoints(tmp_path).greatest(None, 0).version == 2


def test_a_mark_of_an_epoch_is_made_once(tmp_path):
    for root in (Checkpoints(tmp_path / "here"), Checkpoints(tmp_path, ObjectStore(f"memory://{tmp_path}", "key"))):
        root.mark_epoch(3)
        assert root.greatest_epoch() == 3
        with pytest.raises(CannotCreate, match="another learner"):
            root.mark_epoch(3)


def test_a_full_disk_gives_an_error_and_no_checkpoint(tmp_path):
    make(tmp_path, 1, 1)
    big = {"weight": torch.zeros(1 << 20)}
    checkpoints = Checkpoints(tmp_path)
    old = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (256 << 10, old[1]))
        with pytest.raises((OSError, InvalidCheckpoint)):
            write_shard(checkpoints.begin((1, 2)) / shard_name(0, 1), big)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, old)
        signal.signal(signal.SIGXFSZ, handler)
    assert checkpoints.greatest(None, 0).position == (1, 1)
