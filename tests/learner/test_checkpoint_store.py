"""Copies of checkpoints in stores that fsspec knows: a directory, and one in memory."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import fsspec
import pytest

from streamrl.config import RunConfig
from streamrl.errors import ConfigError
from streamrl.learner.checkpoint import Checkpoints, CheckpointShard, Meta, describe, read_meta
from streamrl.learner.checkpoint_store import CheckpointStore, store_of
from streamrl.store import ObjectStore


@pytest.fixture(params=["directory", "memory"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    yield f"{tmp_path}/store" if request.param == "directory" else "memory://bucket/of/runs"
    fsspec.filesystem("memory").store.clear()


def store_at(url: str, run_dir: Path) -> CheckpointStore:
    return CheckpointStore(ObjectStore(url, "checkpoint.store"), run_dir)


def write(run_dir: Path, epoch: int, step: int, before: Meta | None = None) -> Meta:
    """A checkpoint with files of a few bytes."""
    checkpoints = Checkpoints.of(run_dir)
    draft = checkpoints.begin((epoch, step))
    shards: list[CheckpointShard] = []
    for rank in range(2):
        (draft / f"rank-{rank}-of-2.safetensors").write_bytes(bytes([rank, step]) * 1000)
        shards.append(describe(draft / f"rank-{rank}-of-2.safetensors"))
    meta = Meta(
        format=2, epoch=epoch, step=step, version=step, world=2, shards=shards, trained=[(0, step)], count=step + 1,
        bases=[before.position] if before and before.epoch != epoch else [],
    )  # fmt: skip
    checkpoints.finish(meta)
    return meta


def test_another_host_goes_on_with_what_was_copied(tmp_path: Path, url: str):
    here, there = tmp_path / "here", tmp_path / "there"
    store = store_at(url, here)
    first = write(here, 1, 1)
    store.put(first)
    second = write(here, 1, 2, first)
    store.put(second)
    store.put(second)  # a repeat
    brought = store_at(url, there).fetch_newest()
    assert brought == ["ckpt-1-2"]
    ours, theirs = Checkpoints.of(here), Checkpoints.of(there)
    assert theirs.greatest(None, 0) == ours.greatest(None, 0) == second
    assert store_at(url, there).fetch_newest() == []
    third = write(there, 2, 3, second)
    store_at(url, there).put(third)
    assert store.fetch_newest() == ["ckpt-2-3"]
    assert ours.greatest(None, 0) == third


def test_a_copy_that_broke_off_does_not_count(tmp_path: Path, url: str, monkeypatch: pytest.MonkeyPatch):
    here = tmp_path / "here"
    store = store_at(url, here)
    first = write(here, 1, 1)
    store.put(first)
    second = write(here, 1, 2, first)
    files = store._store._files
    upload, sent = files.put_file, []

    def breaks(file: str, name: str) -> None:
        if len(sent) == 1:
            raise RuntimeError("connection reset")
        sent.append(file)
        upload(file, name)

    monkeypatch.setattr(files, "put_file", breaks)
    with pytest.raises(OSError, match=r"checkpoint.store .*ckpt-1-2/.* cannot be written: RuntimeError: connection"):
        store.put(second)
    assert [name for name in store_at(url, tmp_path / "there").fetch_newest() if name.startswith("ckpt")] == [
        "ckpt-1-1"
    ]
    monkeypatch.undo()
    store.put(second)
    assert "ckpt-1-2" in store_at(url, tmp_path / "there").fetch_newest()


def test_only_the_newest_is_brought_and_old_ones_removed(tmp_path: Path, url: str):
    here = tmp_path / "here"
    store, before = store_at(url, here), None
    for step in range(1, 5):
        before = write(here, 1, step, before)
        store.put(before)
    brought = store_at(url, tmp_path / "there").fetch_newest(None, 0, "1-4")
    assert [name for name in brought if name.startswith("ckpt")] == ["ckpt-1-4"]
    store.remove([(1, 1), (1, 2)], 1)
    store.remove([(1, 1)], 1)
    assert store.positions() == [(1, 3), (1, 4)]


def test_a_void_checkpoint_is_not_brought(tmp_path: Path, url: str):
    """Its learner was paused in its save, while a successor declared another base."""
    here = tmp_path / "here"
    store = store_at(url, here)
    first = write(here, 1, 1)
    store.put(first)
    store.put(write(here, 1, 2, first))
    there = tmp_path / "there"
    brought = store_at(url, there).fetch_newest("1-1", 2, "1-1")
    assert [name for name in brought if name.startswith("ckpt")] == ["ckpt-1-1"]
    assert Checkpoints.of(there).greatest("1-1", 2, "1-1") == first


def test_a_fetch_that_was_killed_goes_on_where_it_was(tmp_path: Path, url: str, monkeypatch: pytest.MonkeyPatch):
    here, there = tmp_path / "here", tmp_path / "there"
    first = write(here, 1, 1)
    store_at(url, here).put(first)
    torn = Checkpoints.of(there).begin((1, 1))
    (torn / "rank-0-of-2.safetensors").write_bytes(b"of a learner that died in its save")
    store = store_at(url, there)
    download, got = store._store._files.get_file, []

    def dies(place: str, into: str) -> None:
        download(place, into)
        if place.endswith(".safetensors"):
            got.append(place.rpartition("/")[2])
            if len(got) == 2:
                Path(into).write_bytes(b"half")
                raise KeyboardInterrupt

    monkeypatch.setattr(store._store._files, "get_file", dies)
    with pytest.raises(KeyboardInterrupt):
        store.fetch_newest()
    store.fetch_newest()
    assert (len(got), len(set(got))) == (3, 2), "what was whole is not brought again"
    assert Checkpoints.of(there).greatest(None, 0) == first


def test_a_damaged_copy_is_found_out_when_it_is_read(tmp_path: Path):
    here, there = tmp_path / "here", tmp_path / "there"
    store = store_at(f"{tmp_path}/store", here)
    first = write(here, 1, 1)
    store.put(first)
    store.put(write(here, 1, 2, first))
    (tmp_path / "store" / "checkpoints" / "ckpt-1-2" / "rank-1-of-2.safetensors").write_bytes(b"x" * 2000)
    store_at(f"{tmp_path}/store", there).fetch_newest()
    assert Checkpoints.of(there).greatest(None, 0) == first


def test_what_is_no_store_is_refused(tmp_path: Path):
    with pytest.raises(ConfigError, match="nothing-like-it"):
        store_at("nothing-like-it://x", tmp_path)
    with pytest.raises(ValueError, match="absolute path or a URL"):
        RunConfig.model_validate({"name": "r", "checkpoint": {"store": "relative/path"}})
    assert store_of(RunConfig(name="r"), tmp_path) is None
    config = RunConfig.model_validate({"name": "r", "checkpoint": {"store": str(tmp_path / "s")}})
    found = store_of(config, tmp_path)
    assert found is not None
    write(tmp_path, 1, 1)
    found.put(read_meta(Checkpoints.of(tmp_path).path((1, 1))))
    assert (tmp_path / "s" / "r" / "checkpoints" / "ckpt-1-1" / "meta.json").exists()
