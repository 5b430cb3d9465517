"""Files and directories appear whole or not at all."""

from __future__ import annotations

from pathlib import Path

import pytest

from streamrl.atomic import draft_of, whole_directory, write_durably, write_whole


@pytest.mark.parametrize("write", [write_whole, write_durably])
def test_a_file_is_replaced_whole(tmp_path: Path, write):
    path = tmp_path / "a.json"
    draft_of(path).write_bytes(b"what a crash left, and it is longer")
    for data in (b"first", b"second"):
        write(path, data)
        assert path.read_bytes() == data
    assert [entry.name for entry in tmp_path.iterdir()] == ["a.json"]


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
