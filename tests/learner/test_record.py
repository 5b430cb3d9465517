"""The durable record of trained groups."""

from __future__ import annotations

import resource
import signal

import pytest

from streamrl.errors import CannotCreate
from streamrl.learner.record import GroupRecord, read_record


def gids(run_dir, *record):
    return [frame["gid"] for frame in read_record(run_dir, record)]


def test_frames_appear_with_the_checkpoint(tmp_path):
    record = GroupRecord(tmp_path, 1)
    record.append({"gid": 1, "rewards": [0.5, 1.0]})
    assert (tmp_path / "groups-1.msgpack").read_bytes() == b""
    assert list(read_record(tmp_path, [record.sync()])) == [{"gid": 1, "rewards": [0.5, 1.0]}]


def test_what_no_checkpoint_holds_does_not_count(tmp_path):
    """Nor does what an old learner writes that wakes up: it has a file of its own."""
    first, second = GroupRecord(tmp_path, 1), GroupRecord(tmp_path, 2)
    first.append({"gid": 1})
    link = first.sync()
    second.append({"gid": 3})
    newer = second.sync()
    first.append({"gid": 2})
    first.sync()
    second.append({"gid": 4})
    assert gids(tmp_path, link, newer) == [1, 3]
    assert gids(tmp_path, link, second.sync()) == [1, 3, 4]
    with pytest.raises(CannotCreate, match="groups-2"):
        GroupRecord(tmp_path, 2)


def test_a_full_disk_forgets_no_frame(tmp_path):
    record = GroupRecord(tmp_path, 1)
    record.append({"gid": 1})
    file, size = record.sync()
    record.append({"gid": 2, "rewards": [1.0] * 100})
    old = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (size + 10, old[1]))
        with pytest.raises(OSError):
            record.sync()
        assert gids(tmp_path, (file, size)) == [1]
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, old)
        signal.signal(signal.SIGXFSZ, handler)
    assert gids(tmp_path, record.sync()) == [1, 2]
