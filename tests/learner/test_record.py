"""The durable record of trained groups."""

from __future__ import annotations

import resource
import signal

import pytest

from streamrl.learner.record import RECORD_FILE, GroupRecord
from streamrl.wire import read_frames


def gids(run_dir):
    return [frame["gid"] for frame in read_frames(run_dir / RECORD_FILE)]


def test_frames_appear_with_the_checkpoint(tmp_path):
    record = GroupRecord(tmp_path, 0)
    record.append({"gid": 1, "rewards": [0.5, 1.0]})
    assert gids(tmp_path) == []
    record.sync()
    assert list(read_frames(tmp_path / RECORD_FILE)) == [{"gid": 1, "rewards": [0.5, 1.0]}]


def test_what_no_checkpoint_holds_is_cut_off(tmp_path):
    first = GroupRecord(tmp_path, 0)
    first.append({"gid": 1})
    size = first.sync()
    first.append({"gid": 2})
    first.sync()
    with (tmp_path / RECORD_FILE).open("ab") as file:
        file.write(b"\x82\xa3gi")  # a crash in the middle of a frame
    second = GroupRecord(tmp_path, size)
    second.append({"gid": 3})
    second.sync()
    assert gids(tmp_path) == [1, 3]


def test_a_full_disk_forgets_no_frame(tmp_path):
    record = GroupRecord(tmp_path, 0)
    record.append({"gid": 1})
    size = record.sync()
    record.append({"gid": 2, "rewards": [1.0] * 100})
    old = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (size + 10, old[1]))
        with pytest.raises(OSError):
            record.sync()
        assert gids(tmp_path) == [1]
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, old)
        signal.signal(signal.SIGXFSZ, handler)
    record.sync()
    assert gids(tmp_path) == [1, 2]
