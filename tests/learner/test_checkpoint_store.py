"""Checkpoints in stores that fsspec knows: one in memory, and one of files that is no directory to us."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import fsspec
import pytest

from streamrl.config import RunConfig
from streamrl.errors import ConfigError, Unreachable
from streamrl.learner.checkpoint import Checkpoints, CheckpointShard, InvalidCheckpoint, Meta, describe
from streamrl.store import ObjectStore

Host = Callable[[str], Checkpoints]


@pytest.fixture(params=["memory://bucket/of/runs", "dir::file://{}/store"])
def host(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Host]:
    """The checkpoints as a host of this name sees them."""
    config = RunConfig.model_validate({"name": "r", "checkpoint": {"store": request.param.format(tmp_path)}})
    yield lambda name: Checkpoints.of(config, tmp_path / name)
    if request.param.startswith("memory"):
        fsspec.filesystem("memory").rm("/bucket", recursive=True)


def write(checkpoints: Checkpoints, epoch: int, step: int, before: Meta | None = None) -> Meta:
    """A checkpoint of two ranks with files of a few bytes."""
    place = epoch, step
    checkpoints.begin(place)
    shards: list[CheckpointShard] = []
    for rank in range(2):
        file = checkpoints.draft(place) / f"rank-{rank}-of-2.safetensors"
        file.write_bytes(bytes([rank, step]) * 1000)
        shards.append(describe(file))
        checkpoints.send(place, file)
    bases = [before.position] if before and before.epoch != epoch else []
    meta = Meta(format=2, epoch=epoch, step=step, version=step, world=2, shards=shards, bases=bases)
    checkpoints.finish(meta)
    return meta


def files(checkpoints: Checkpoints) -> list[str]:
    """What is here of checkpoints."""
    folder = checkpoints.folder
    return sorted(str(file.relative_to(folder)) for file in folder.rglob("*") if file.is_file() and file.suffix)


def test_another_host_goes_on(host: Host):
    here, there = host("here"), host("there")
    first = write(here, 1, 1)
    second = write(here, 1, 2, first)
    assert files(here) == [], "shards are here only on their way"
    assert there.positions() == [(1, 1), (1, 2)]
    assert there.greatest(None, 0) == second
    shards = ["ckpt-1-2/rank-0-of-2.safetensors", "ckpt-1-2/rank-1-of-2.safetensors"]
    assert files(there) == shards
    assert (there.fetch(second) / "rank-1-of-2.safetensors").read_bytes() == b"\1\2" * 1000
    third = write(there, 2, 3, second)
    there.remove_older(third, 2)
    assert here.greatest("1-2", 2, "1-2") == third
    assert here.positions() == [(1, 2), (2, 3)]
    assert there.fetch(third)
    assert all(name.startswith("ckpt-2-3/") for name in files(there)), "one checkpoint is kept here"


def test_one_that_broke_off_does_not_count(host: Host):
    here = host("here")
    first = write(here, 1, 1)
    folder = here.begin((1, 2))
    for name in ("rank-0-of-2.safetensors", "rank-1-of-2.safetensors"):
        (folder / name).write_bytes(b"x")
        here.send((1, 2), folder / name)
    assert host("there").greatest(None, 0) == first
    assert here.root.names().count("ckpt-1-2") == 1
    here.remove_unfinished(1)
    assert "ckpt-1-2" in here.root.names(), "of this epoch: its learner may still write it"
    here.remove_unfinished(2)
    assert sorted(here.root.names()) == ["ckpt-1-1"]


def test_an_epoch_has_one_learner_on_all_hosts(host: Host):
    host("here").mark_epoch(3)
    assert host("there").greatest_epoch() == 3


def test_a_fetch_that_was_killed_goes_on_where_it_was(host: Host, monkeypatch: pytest.MonkeyPatch):
    first, there = write(host("here"), 1, 1), host("there")
    assert there.store is not None
    download, got = there.store._files.get_file, []

    def dies(place: str, into: str) -> None:
        download(place, into)
        got.append(place.rpartition("/")[2])
        if len(got) == 2:
            Path(into).write_bytes(b"half")
            raise KeyboardInterrupt

    monkeypatch.setattr(there.store._files, "get_file", dies)
    with pytest.raises(KeyboardInterrupt):
        there.greatest(None, 0)
    assert there.greatest(None, 0) == first
    assert (len(got), len(set(got))) == (3, 2), "what was whole is not brought again"


@pytest.mark.parametrize("damage", ["changed", "missing", "meta"])
def test_a_damaged_one_is_passed_over(host: Host, damage: str):
    here, there = host("here"), host("there")
    first = write(here, 1, 1)
    second = write(here, 1, 2, first)
    shard = "ckpt-1-2/rank-1-of-2.safetensors"
    if damage == "changed":
        here.root.write(shard, b"x" * 2000)
    elif damage == "missing":
        here.root.remove(shard)
    else:
        here.root.write("ckpt-1-2/meta.json", b"{")
    assert there.greatest(None, 0) == first
    with pytest.raises(InvalidCheckpoint):
        there.validate(second.position)


def test_a_store_that_does_not_answer_makes_no_older_one_the_newest(host: Host, monkeypatch: pytest.MonkeyPatch):
    here = host("here")
    write(here, 1, 2, write(here, 1, 1))
    assert here.store is not None

    def away(*_: object) -> None:
        raise RuntimeError("connection reset")

    for call in ("get_file", "cat_file", "exists"):
        with monkeypatch.context() as patch:
            patch.setattr(here.store._files, call, away)
            with pytest.raises(Unreachable, match=r"checkpoint\.store .* RuntimeError: connection reset"):
                here.greatest(None, 0)
    monkeypatch.setattr(here.store._files, "put_file", away)
    with pytest.raises(OSError, match="cannot be written: RuntimeError"):
        write(here, 1, 3)


@pytest.mark.parametrize("url", ["{}/s", "file://{}/s"])
def test_a_directory_is_where_checkpoints_are(tmp_path: Path, url: str):
    config = RunConfig.model_validate({"name": "r", "checkpoint": {"store": url.format(tmp_path)}})
    checkpoints = Checkpoints.of(config, tmp_path / "run")
    assert (checkpoints.store, checkpoints.folder) == (None, tmp_path / "s" / "r" / "checkpoints")
    recording = RunConfig.model_validate({**config.model_dump(), "recording": {"mode": "write"}})
    for other in (recording, RunConfig(name="r")):
        found = Checkpoints.of(other, tmp_path / "run")
        assert (found.store, found.folder) == (None, tmp_path / "run" / "checkpoints")


def test_what_is_no_store_is_refused():
    with pytest.raises(ConfigError, match="nothing-like-it"):
        ObjectStore("nothing-like-it://x", "checkpoint.store")
    with pytest.raises(ValueError, match="absolute path or a URL"):
        RunConfig.model_validate({"name": "r", "checkpoint": {"store": "relative/path"}})
