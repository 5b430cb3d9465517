"""Files and directories appear whole or not at all."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from streamrl.atomic import whole_directory, write_durably, write_whole


@pytest.mark.parametrize("write", [write_whole, write_durably])
def test_a_file_is_replaced_whole(tmp_path: Path, write):
    path = tmp_path / "a.json"
    for data in (b"first", b"second"):
        write(path, data)
        assert path.read_bytes() == data
    assert [entry.name for entry in tmp_path.iterdir()] == ["a.json"]


def test_many_writers_of_one_file_leave_it_whole(tmp_path: Path):
    path = tmp_path / "a.json"
    contents = [bytes([65 + writer]) * 50_000 for writer in range(8)]
    path.write_bytes(contents[0])
    with ThreadPoolExecutor(8) as writers:
        writing = [writers.submit(write_whole, path, contents[turn % 8]) for turn in range(200)]
        while not all(writer.done() for writer in writing):
            assert path.read_bytes() in contents
        assert [writer.result() for writer in writing] == [None] * 200
    assert [entry.name for entry in tmp_path.iterdir()] == ["a.json"]


def test_a_file_with_the_same_bytes_stays_and_is_new_again(tmp_path: Path):
    path = tmp_path / "a.json"
    write_whole(path, b"same", private=True)
    before = path.stat()
    assert before.st_mode & 0o777 == 0o600
    os.utime(path, (1, 1))
    write_whole(path, b"same", private=True)
    assert path.stat().st_ino == before.st_ino
    assert path.stat().st_mtime >= before.st_mtime
    write_whole(path, b"other", private=True)
    assert path.stat().st_ino != before.st_ino
    assert path.stat().st_mode & 0o777 == 0o600


def test_a_file_that_cannot_be_written_leaves_what_was_there(tmp_path: Path, monkeypatch):
    path = tmp_path / "a.json"
    write_whole(path, b"before")

    def fails(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "rename", fails)
    with pytest.raises(OSError, match="No space"):
        write_whole(path, b"after")
    assert [(entry.name, entry.read_bytes()) for entry in tmp_path.iterdir()] == [("a.json", b"before")]


def test_a_directory_is_replaced_whole_or_stays(tmp_path: Path):
    folder = tmp_path / "new" / "folder"
    for name in ("first", "second"):
        with whole_directory(folder) as draft:
            (draft / name).touch()
            assert not (folder / name).exists()
        assert [entry.name for entry in folder.iterdir()] == [name]
    with pytest.raises(ValueError, match="no"), whole_directory(folder) as draft:
        (draft / "third").touch()
        raise ValueError("no")
    assert [entry.name for entry in folder.iterdir()] == ["second"]
    assert [entry.name for entry in folder.parent.iterdir()] == ["folder"]


def test_files_of_a_directory_follow_the_umask(tmp_path: Path):
    before = os.umask(0o027)
    try:
        with whole_directory(tmp_path / "model") as draft:
            (draft / "adapter").mkdir()
            save_file({"w": np.zeros(3, np.float32)}, draft / "adapter" / "model.safetensors")
    finally:
        os.umask(before)
    assert (tmp_path / "model" / "adapter" / "model.safetensors").stat().st_mode & 0o777 == 0o640
