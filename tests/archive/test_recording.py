"""Recordings: what is synced is read back, each group once, and what a crash or a fool leaves gives a clear end."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from streamrl.archive.reader import Header, RecordedGroup, read_groups, read_header, recording_files
from streamrl.archive.writer import RecordingWriter
from streamrl.errors import CannotCreate, ConfigError, WireError

HEADER = Header(id="one", run="r", model="m", temperature=1.0)


def group(group_id: int, size: int = 3) -> RecordedGroup:
    return RecordedGroup(
        group_id=group_id, prompt=b"p%d" % group_id, samples=[(b"\x00\xff" * size, b"s%d" % k) for k in range(size)]
    )


def record(folder, group_ids, *, epoch=1, header=HEADER, file_bytes=1 << 20, each=2):
    writer = RecordingWriter(folder, epoch, header, file_bytes)
    links = []
    for place, group_id in enumerate(group_ids, 1):
        writer.add(group(group_id))
        if place % each == 0:
            links = writer.sync()
    links = writer.sync()
    writer.close()
    return links


@settings(max_examples=100, deadline=None)  # a disk takes its time
@given(st.lists(st.integers(0, 9), max_size=12), st.integers(1, 400), st.integers(1, 4))
def test_groups_come_back_in_order_and_once(tmp_path_factory, group_ids, file_bytes, each):
    folder = tmp_path_factory.mktemp("recording")
    links = record(folder, group_ids, file_bytes=file_bytes, each=each)
    assert list(read_groups(folder)) == [group(group_id) for group_id in dict.fromkeys(group_ids)]
    assert [(file.name, file.stat().st_size) for file in recording_files(folder)][: len(links)] == links
    assert read_header(folder) == HEADER


def test_files_of_several_recorders_are_one_recording(tmp_path):
    folder = tmp_path / "run" / "recording"
    record(folder, range(3), epoch=2)
    record(folder, range(2, 12), epoch=10, file_bytes=150)
    assert [found.group_id for found in read_groups(tmp_path / "run")] == list(range(12))
    last = recording_files(folder)[-1]
    assert recording_files(last) == [last]
    with pytest.raises(CannotCreate):
        record(folder, [1], epoch=2)


def test_a_file_that_a_crash_cut_off_ends_where_it_was_whole(tmp_path):
    """At any byte; the next recorder's file goes on, also where not even the header was written."""
    record(tmp_path, range(4), each=2)
    first = recording_files(tmp_path)[0]
    whole = first.read_bytes()
    record(tmp_path, range(2, 6), epoch=2)
    for cut in range(len(whole)):
        first.write_bytes(whole[:cut])
        found = [each.group_id for each in read_groups(tmp_path)]
        assert found == sorted(set(found))
        assert set(found) >= {2, 3, 4, 5}
        assert read_header(tmp_path) == HEADER


def test_a_changed_byte_is_an_error(tmp_path):
    record(tmp_path, range(6), each=2)
    (file,) = recording_files(tmp_path)
    whole = bytearray(file.read_bytes())
    for place in range(0, len(whole), 5):
        changed = bytearray(whole)
        changed[place] ^= 0x41
        file.write_bytes(changed)
        with pytest.raises((WireError, ConfigError)):
            list(read_groups(tmp_path))


def test_what_is_no_recording_is_refused(tmp_path):
    assert read_header(tmp_path) is None
    assert list(read_groups(tmp_path)) == []
    record(tmp_path / "a", [1])
    record(tmp_path / "a", [2], epoch=2, header=Header(id="two", run="r", model="m", temperature=1.0))
    with pytest.raises(ConfigError, match="another recording"):
        list(read_groups(tmp_path / "a"))
    record(tmp_path / "b", [1], header=Header(schema="streamrl.recording/9", id="x", run="r", model="m", temperature=1))
    with pytest.raises(ConfigError, match="schema"):
        read_header(tmp_path / "b")
    (tmp_path / "c.txt").write_text("hello")
    with pytest.raises(ConfigError, match="not a file of a recording"):
        read_header(tmp_path / "c.txt")


def test_the_names_of_files_and_folder_are_durable_before_a_group_counts(tmp_path, monkeypatch):
    """Who syncs groups retires them next, so a new file must be in its folder, and the folder in that of the run."""
    synced, real = [], os.fsync

    def fsync(descriptor):
        synced.append(str(Path(f"/proc/self/fd/{descriptor}").readlink()))
        real(descriptor)

    monkeypatch.setattr("os.fsync", fsync)
    folder = tmp_path / "run" / "recording"
    writer = RecordingWriter(folder, 1, HEADER, 1)
    for group_id in range(2):
        writer.add(group(group_id))
        writer.sync()
        assert synced == [str(folder), str(folder.parent), str(folder / f"groups-1-{group_id}.msgpack.zst")]
        synced.clear()
    writer.close()


def test_a_full_disk_leaves_whole_blocks(tmp_path, monkeypatch):
    writer = RecordingWriter(tmp_path, 1, HEADER, 1 << 20)
    real = os.pwrite
    for group_id in range(1, 4):
        calls = iter([4, OSError(28, "No space left on device")])

        def pwrite(descriptor, data, offset, calls=calls):
            answer = next(calls, None)
            if isinstance(answer, OSError):
                raise answer
            return real(descriptor, data[:answer] if answer else data, offset)

        with monkeypatch.context() as patch:
            patch.setattr("streamrl.archive.writer.os.pwrite", pwrite)
            writer.add(group(10 * group_id))
            with pytest.raises(OSError, match="No space"):
                writer.sync()
        writer.add(group(group_id))
        ((name, size),) = writer.sync()
        assert (tmp_path / name).stat().st_size == size
        assert [each.group_id for each in read_groups(tmp_path)] == list(range(1, group_id + 1))
    writer.close()


def test_a_file_whose_name_could_not_be_made_durable_is_made_again(tmp_path, monkeypatch):
    def broken(_: Path) -> None:
        raise OSError(errno.EIO, "Input/output error")

    writer = RecordingWriter(tmp_path, 1, HEADER, 1)
    writer.add(group(1))
    writer.sync()
    open_before = len(list(Path("/proc/self/fd").iterdir()))
    with monkeypatch.context() as patch:
        patch.setattr("streamrl.archive.writer.fsync_directory", broken)
        for _ in range(2):
            writer.add(group(2))
            with pytest.raises(CannotCreate, match="Input/output error"):
                writer.sync()  # the file is full: another one is due
    assert len(list(Path("/proc/self/fd").iterdir())) == open_before
    assert len(recording_files(tmp_path)) == 1
    writer.add(group(2))
    writer.sync()
    writer.close()
    assert [found.group_id for found in read_groups(tmp_path)] == [1, 2]
