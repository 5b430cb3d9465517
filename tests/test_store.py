"""Stores that fsspec knows: what is put there comes back, and whatever is wrong with one is said with its key."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fsspec
import pytest
from fsspec.implementations.memory import MemoryFileSystem

from streamrl.config import RunConfig
from streamrl.errors import CannotCreate, ConfigError
from streamrl.runtime.preflight import check_stores
from streamrl.store import ObjectStore


@pytest.fixture(params=["directory", "file", "memory"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[ObjectStore]:
    urls = {"directory": f"{tmp_path}/a b", "file": f"file://{tmp_path}/store/", "memory": "memory://bucket/runs"}
    yield ObjectStore(urls[request.param], "checkpoint.store")
    if request.param == "memory":
        fsspec.filesystem("memory").rm("/bucket", recursive=True)


def test_files_come_back_and_a_repeat_replaces(store: ObjectStore, tmp_path: Path):
    file = tmp_path / "file"
    for content in (b"first", b"2"):
        file.write_bytes(content)
        store.put(file, "deep/er/file")
        store.get("deep/er/file", tmp_path / "back")
        assert (tmp_path / "back").read_bytes() == content
        assert store.size("deep/er/file") == len(content)
    assert (store.names(), store.names("deep"), store.names("none")) == (["deep"], ["er"], [])
    store.remove("deep/er")
    store.remove("deep/er")
    assert not store.has("deep/er/file")
    with pytest.raises(OSError, match=r"checkpoint\.store .*deep/er/file cannot be read"):
        store.get("deep/er/file", tmp_path / "back")
    assert (tmp_path / "back").read_bytes() == b"2"


DIES_IN_A_COPY = """
import os, signal, sys
from pathlib import Path
from streamrl.store import ObjectStore

copy = os.sendfile

def half(into, source, offset, count):
    copy(into, source, offset, 3)
    os.kill(os.getpid(), signal.SIGKILL)

os.sendfile = half
ObjectStore(sys.argv[1], "checkpoint.store").put(Path(sys.argv[2]), "checkpoints/trained-1.log")
"""


def test_a_writer_that_dies_in_a_copy_leaves_what_was_there(tmp_path: Path):
    file, url = tmp_path / "file", f"file://{tmp_path}/store"
    store = ObjectStore(url, "checkpoint.store")
    file.write_bytes(b"whole")
    store.put(file, "checkpoints/trained-1.log")
    file.write_bytes(b"whole, and longer")
    dead = subprocess.run([sys.executable, "-c", DIES_IN_A_COPY, url, str(file)], check=False)
    assert dead.returncode == -9
    folder = tmp_path / "store" / "checkpoints"
    assert (folder / "trained-1.log").read_bytes() == b"whole"
    assert [path.read_bytes() for path in folder.glob(".draft-*")] == [b"who"]
    assert store.names("checkpoints") == ["trained-1.log"], "nobody sees a draft"
    store.get_folder("checkpoints", tmp_path / "back")
    assert [path.name for path in (tmp_path / "back").iterdir()] == ["trained-1.log"]
    store.put(file, "checkpoints/trained-1.log")
    assert [path.name for path in folder.iterdir()] == ["trained-1.log"]
    assert (folder / "trained-1.log").read_bytes() == b"whole, and longer"


def test_a_folder_is_there_alone_afterwards(store: ObjectStore, tmp_path: Path):
    for files in (["a", "sub/b", "model-1-of-2"], ["a", "sub/b"]):
        folder = tmp_path / f"folder-{len(files)}"
        for name in files:
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_text(name)
        store.put_folder(folder, "model")
    assert sorted(store.names("model")) == ["a", "sub"]
    assert store.names("model/sub") == ["b"]


def test_a_probe_leaves_nothing(store: ObjectStore):
    store.probe()
    store.probe()
    assert store.names() == []


class Refusing(MemoryFileSystem):
    """Takes no file, with an error of its own."""

    protocol = "refusing"

    def pipe_file(self, path: str, value: bytes, mode: str = "overwrite", **kwargs: Any) -> None:
        raise RuntimeError("AccessDenied")


def config(**sections: dict[str, Any]) -> RunConfig:
    return RunConfig.model_validate({"name": "r", **sections})


def test_a_store_that_cannot_be_written_is_found_before_anything_starts(tmp_path: Path):
    fsspec.register_implementation("refusing", Refusing, clobber=True)
    (tmp_path / "file").touch()
    for key, url, word in (
        ("checkpoint", f"{tmp_path}/file/store", "Not a directory|exists"),
        ("archive", "refusing://bucket", "RuntimeError: AccessDenied"),
    ):
        with pytest.raises(CannotCreate, match=rf"{key}\.store .*cannot be written: .*({word})") as error:
            check_stores(config(**{key: {"store": url, **({"enabled": True} if key == "archive" else {})}}))
        assert "resume.md" in error.value.hint


def test_a_store_that_nobody_knows_is_refused():
    with pytest.raises(ConfigError, match=r"checkpoint\.store .*nothing-like-it"):
        check_stores(config(checkpoint={"store": "nothing-like-it://x"}))


def test_a_store_whose_package_is_missing_is_refused(monkeypatch: pytest.MonkeyPatch):
    known = {"class": "no_such_s3fs.S3FileSystem", "err": "Install s3fs to access S3"}
    monkeypatch.setitem(sys.modules["fsspec.registry"].known_implementations, "s3", known)
    with pytest.raises(ConfigError, match=r"checkpoint\.store .*Install s3fs") as error:
        check_stores(config(checkpoint={"store": "s3://bucket/runs"}))
    assert "package" in error.value.hint


def test_stores_that_work_are_named_and_left_empty(tmp_path: Path):
    sections = {"checkpoint": {"store": f"{tmp_path}/c"}, "archive": {"store": f"{tmp_path}/a"}}
    assert check_stores(config(**sections)) == f"{tmp_path}/c/r, {tmp_path}/a/r"
    assert check_stores(config(archive={"enabled": False, "store": f"{tmp_path}/off"})) == "none"
    assert not [path for path in tmp_path.rglob("*") if path.is_file()]


def test_a_secret_has_no_place_in_the_url():
    with pytest.raises(ValueError, match="shown to everybody"):
        config(checkpoint={"store": "s3://key:secret@bucket/runs"})
    with pytest.raises(ValueError, match="absolute path or a URL"):
        config(archive={"store": "relative/path"})
