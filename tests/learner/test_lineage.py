"""What was trained, as the files of each epoch say it, and the map from versions to steps of the surviving branch."""

from __future__ import annotations

import os
import resource
import signal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from streamrl.errors import CannotCreate, Refused
from streamrl.learner.lineage import (
    Branch,
    EpochFile,
    Lineage,
    TrainedDigest,
    VersionNote,
    VersionsLog,
    greatest_logged_epoch,
    read_record,
    read_trained,
    read_versions,
    record_file,
    trained_file,
)


@pytest.fixture
def make(tmp_path):
    (tmp_path / "checkpoints").mkdir()

    def lineage(epoch, *group_ids):
        made = Lineage(tmp_path, epoch)
        made.add({"gid": group_id, "rewards": [0.5]} for group_id in group_ids)
        return made

    return lineage


def held(run_dir, *links):
    """Ids by both files, which say the same."""
    ids = read_trained(run_dir / "checkpoints", [first for first, _ in links])
    assert [frame["gid"] for frame in read_record(run_dir, [second for _, second in links])] == ids
    return ids


def test_only_the_prefixes_that_a_checkpoint_names_count(tmp_path, make):
    """What was trained after it is of a branch that was lost, and an old learner that wakes up has its own files."""
    first = make(1, 3, 1)
    link = first.sync()
    assert link == (("trained-1.log", 4), ("groups-1.msgpack", (tmp_path / "groups-1.msgpack").stat().st_size))
    first.add([{"gid": 99}])
    first.sync()
    second = make(2, 5)
    newer = second.sync()
    second.add([{"gid": 6}])
    assert held(tmp_path, link, newer) == [3, 1, 5]
    assert held(tmp_path, link, second.sync()) == [3, 1, 5, 6]
    assert greatest_logged_epoch(tmp_path / "checkpoints") == 2
    assert next(read_record(tmp_path, [link[1]])) == {"gid": 3, "rewards": [0.5]}


def test_a_mark_is_what_the_next_sync_makes_durable(tmp_path, make):
    lineage = make(1, 1, 2)
    mark = lineage.mark()
    assert [(tmp_path / name).stat().st_size for name in ("checkpoints/trained-1.log", "groups-1.msgpack")] == [0, 0]
    lineage.add([{"gid": 3}])
    assert lineage.sync() != mark
    assert held(tmp_path, mark) == [1, 2]


def test_an_epoch_has_one_lineage(tmp_path, make):
    make(7)
    with pytest.raises(CannotCreate, match="trained-7"):
        Lineage(tmp_path, 7)
    (tmp_path / record_file(8)).touch()
    with pytest.raises(CannotCreate, match="groups-8"):
        Lineage(tmp_path, 8)


@pytest.mark.parametrize("damage", ["missing", "short", "foreign"])
def test_a_damaged_log_is_refused(tmp_path, damage):
    log = EpochFile(tmp_path, trained_file(1))
    log.append(b"0\n1\n2\n3\n")
    link = log.sync()
    path = tmp_path / link[0]
    if damage == "missing":
        path.unlink()
    elif damage == "short":
        os.truncate(path, link[1] - 1)
    else:
        path.write_bytes(b"x" * link[1])
    with pytest.raises(Refused):
        read_trained(tmp_path, [link])


def test_a_full_disk_delays_a_file_and_forgets_nothing(tmp_path):
    log = EpochFile(tmp_path, trained_file(1))
    log.append(b"1\n")
    link = log.sync()
    old = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (7, old[1]))
        log.append(b"11\n22\n33\n")  # the disk takes 5 of these 9 bytes
        with pytest.raises(OSError):
            log.sync()
        assert read_trained(tmp_path, [link]) == [1]
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, old)
        signal.signal(signal.SIGXFSZ, handler)
    log.append(b"44\n")
    assert read_trained(tmp_path, [log.sync()]) == [1, 11, 22, 33, 44]


def test_a_disk_that_is_full_for_the_second_file_alone_delays_both(tmp_path, make):
    """The ids are written before the groups fail; a repeat writes the groups and does not write the ids again."""
    lineage = make(1, 1)
    link = lineage.sync()
    lineage.add({"gid": group_id, "rewards": [0.5]} for group_id in (2, 3))
    room = (tmp_path / record_file(1)).stat().st_size + 5
    old = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (room, old[1]))
        with pytest.raises(OSError):
            lineage.sync()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, old)
        signal.signal(signal.SIGXFSZ, handler)
    assert (tmp_path / "checkpoints" / trained_file(1)).read_bytes() == b"1\n2\n3\n"
    assert (tmp_path / record_file(1)).stat().st_size == room
    assert held(tmp_path, link) == [1]
    lineage.add([{"gid": 4}])
    mark = lineage.mark()
    assert lineage.sync() == mark
    assert held(tmp_path, mark) == [1, 2, 3, 4]


def test_a_closed_file_writes_into_no_other_file(tmp_path):
    log = EpochFile(tmp_path, trained_file(1))
    log.append(b"1\n")
    log.close()
    log.close()
    other = os.open(tmp_path / "other", os.O_CREAT | os.O_WRONLY)  # has the descriptor that was closed
    try:
        with pytest.raises(OSError):
            log.sync()
        assert (tmp_path / "other").read_bytes() == b""
    finally:
        os.close(other)


@pytest.mark.parametrize("moment", ["pwrite", "fsync"])
def test_a_file_that_is_closed_while_a_thread_syncs_it_meets_no_other_file(tmp_path, monkeypatch, moment):
    log = EpochFile(tmp_path, trained_file(1))
    log.append(b"1\n")
    call, others, met = getattr(os, moment), [], []

    def closing(descriptor, *rest):
        log.close()
        others.append(os.open(tmp_path / "other", os.O_CREAT | os.O_WRONLY))
        met.append(os.fstat(descriptor).st_ino)
        return call(descriptor, *rest)

    monkeypatch.setattr(f"streamrl.learner.lineage.os.{moment}", closing)
    try:
        _, size = log.sync()
    finally:
        for other in others:
            os.close(other)
    path = tmp_path / trained_file(1)
    assert met == [path.stat().st_ino]
    assert path.stat().st_size == size == 2


def test_versions_survive_a_torn_line(tmp_path):
    log = VersionsLog(tmp_path, 1, "aa")
    log.note(1, 0)
    with (tmp_path / "versions.log").open("ab") as file:
        file.write(b"1 2")
    VersionsLog(tmp_path, 2, "bb").note(4, 3)
    assert read_versions(tmp_path) == [VersionNote(1, 1, 0, "aa"), VersionNote(2, 4, 3, "bb")]


def test_staleness_counts_steps_of_the_surviving_branch():
    # Epoch 1 made steps 0 to 3 as versions 1 to 4; its checkpoint at step 2 survives. Epoch 2 went on from there with
    # versions 5 (step 2) and 6 (step 3) and died without a checkpoint. Epoch 3 goes on from step 2 again.
    notes = [VersionNote(1, version, version - 1, "a") for version in (1, 2, 3, 4)]
    notes += [VersionNote(2, 5, 2, "b"), VersionNote(2, 6, 3, "b")]
    branch = Branch(notes, surviving=[1], epoch=3, step=2)
    assert branch.greatest == 6
    branch.note(7, 2)
    branch.note(8, 3)
    assert [branch.step(version) for version in range(9)] == [0, 0, 1, 2, 2, 2, 2, 2, 3]
    assert branch.step(100) == 3  # nobody wrote it down: the newest before it


def test_a_void_epoch_counts_from_where_it_left():
    # Epoch 2 started from step 4, but the base of epoch 3 is the older step 2 of epoch 1.
    notes = [VersionNote(1, 1, 0, "a"), VersionNote(2, 2, 4, "b"), VersionNote(2, 3, 5, "b")]
    branch = Branch(notes, surviving=[1], epoch=3, step=2)
    assert branch.step(3) == 2


def test_two_learners_with_one_number_the_later_one_published_it():
    notes = [VersionNote(1, 5, 4, "a"), VersionNote(2, 5, 3, "b"), VersionNote(1, 6, 5, "a")]
    branch = Branch(notes, surviving=[1, 2], epoch=3, step=3)
    assert branch.step(5) == 3


@given(st.lists(st.integers(0, 10**6), unique=True, min_size=1), st.randoms())
def test_the_digest_knows_no_order_and_sees_a_repeat(group_ids, random):
    first, second = TrainedDigest(), TrainedDigest()
    first.add(group_ids)
    shuffled = list(group_ids)
    random.shuffle(shuffled)
    second.add(shuffled)
    assert (first.count, first.hexdigest) == (second.count, second.hexdigest)
    again = TrainedDigest(first.count, first.hexdigest)
    again.add([group_ids[0]])
    assert again.hexdigest != first.hexdigest
