"""The archive: what was added is read back, whoever dies; a disk that is full or hangs costs the archive alone."""

from __future__ import annotations

import asyncio
import dataclasses
import errno
import os
import shutil
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from streamrl import wire
from streamrl.archive import writer as module
from streamrl.archive.reader import ARCHIVE, EVALUATION, archive_files, read_archive, read_groups, read_header
from streamrl.archive.thinning import thin
from streamrl.archive.writer import Archive
from streamrl.errors import ConfigError
from tests.archive_kit import archived, closed, configured, kept_up, response_of, score_of


async def test_what_was_added_is_read_back_whole(tmp_path):
    await archived(tmp_path, configured(), closed(7, dead=(1,)), closed(8))
    seven, eight = read_archive(tmp_path)
    assert (seven.group_id, seven.attempt, seven.version, seven.causes) == (7, 1, 3, {1: "deadline: sample 1"})
    assert seven.at > 1.6e9
    assert (seven.prompt.answer, seven.prompt.metadata) == ("8", {"level": 1})
    assert [sample.number for sample in seven.samples] == [0, 2, 3]
    for group in (seven, eight):
        for sample in group.samples:
            assert sample.response == response_of(group.group_id, sample.number)
            assert sample.score == score_of(group.group_id, sample.number)
    assert (eight.header.run, eight.header.logprobs) == ("kept", True)
    assert [group.group_id for group in read_groups(tmp_path / ARCHIVE)] == [7, 8]  # it can be trained


async def test_held_out_groups_are_apart(tmp_path):
    await archived(tmp_path, configured(), closed(0))
    await archived(tmp_path, configured(), closed(0, evaluation=True, bonus=1.0), evaluation=True)
    (train,), (held_out,) = read_archive(tmp_path), read_archive(tmp_path, evaluation=True)
    assert (train.prompt.evaluation, held_out.prompt.evaluation) == (False, True)
    assert held_out.samples[0].score.value == 2.0
    assert archive_files(tmp_path / ARCHIVE, evaluation=True)[0].parent == tmp_path / ARCHIVE / EVALUATION


async def test_lives_of_a_writer_are_one_recording_and_the_last_of_two_counts(tmp_path):
    """Redis that lost seconds has a group generated again: the one that was read last was trained."""
    await archived(tmp_path, configured(), closed(1), closed(2))
    await archived(tmp_path, configured(), closed(2, bonus=0.5), closed(3), closed(1, attempt=2))
    reading = read_archive(tmp_path)
    assert [(group.group_id, group.attempt) for group in reading] == [(1, 1), (2, 1), (3, 1), (1, 2)]
    assert [group.samples[0].score.value for group in reading] == [0.0, 1.5, 0.0, 0.0]
    assert [group.attempt for group in reading.find(1)] == [1, 2]
    assert reading.find(2)[0].samples[0].score.value == 1.5
    assert reading.find(99) == []
    assert len({read_header(file).id for file in reading.files}) == 1


async def test_a_group_that_closes_again_with_other_responses_is_archived_again(tmp_path):
    """Redis went back while its reader lived on: the last one that was read was trained."""
    archive = Archive(configured(), tmp_path)
    for bonus in (0.0, 0.0, 0.5, 0.5, 0.0):
        archive.add(closed(17, bonus=bonus))
        await archive.sync()
    archive.add(closed(18))
    archive.add(closed(18, dead=(3,)))
    await archive.close()
    assert archive.counts == {"archived": 5, "archive_lost": 0}
    seventeen, eighteen = read_archive(tmp_path)
    assert seventeen.samples[1].score.value == 1.0
    assert eighteen.causes == {3: "deadline: sample 3"}


async def test_other_sampling_begins_another_recording(tmp_path):
    await archived(tmp_path, configured(), closed(1))
    warm = configured()
    warm = warm.model_copy(update={"sampling": warm.sampling.model_copy(update={"temperature": 0.5})})
    await archived(tmp_path, warm, closed(2))
    assert [group.header.temperature for group in read_archive(tmp_path)] == [1.0, 0.5]
    with pytest.raises(ConfigError, match="another recording"):
        list(read_groups(tmp_path / ARCHIVE))


async def test_log_probabilities_can_be_left_out(tmp_path):
    spoilt = closed(2)
    spoilt.samples[0] = b"no message", spoilt.samples[0][1]
    await archived(tmp_path, configured(logprobs=False), closed(1), spoilt)
    reading = read_archive(tmp_path)
    (group,) = reading
    assert not group.header.logprobs
    assert {float(number) for sample in group.samples for number in sample.response.token_logprobs} == {0.0}
    assert group.samples[1].response.tokens == response_of(1, 1).tokens
    assert len(reading.problems) == 1
    assert "group 2" in reading.problems[0]


async def test_no_group_waits_while_files_are_thinned(tmp_path, monkeypatch, caplog):
    go_on = threading.Event()
    monkeypatch.setattr(module, "PATIENCE", 1.0)
    monkeypatch.setattr(module, "thin", lambda files, limit: go_on.wait(60))
    archive = Archive(configured(max_bytes=8_000), tmp_path)
    try:
        archive.add(closed(1))
        await archive.sync()
        archive.add(closed(2))
        await archive.sync()
        assert archive.written == 2
        assert [group.group_id for group in read_archive(tmp_path)] == [1, 2]
        assert caplog.records == []
    finally:
        go_on.set()
        await archive.close()


async def test_a_disk_without_room_for_a_draft_loses_the_oldest_file(tmp_path, monkeypatch, caplog):
    for life in range(3):
        await archived(tmp_path, configured(), *(closed(group_id) for group_id in range(50 * life, 50 * life + 50)))
    oldest, *files = archive_files(tmp_path)
    taken = sum(file.stat().st_size for file in (oldest, *files))
    monkeypatch.setattr("streamrl.archive.thinning.draft_of", lambda file: file / "nowhere")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(taken, taken, 1))
    thin([oldest, *files], taken - 1)
    assert archive_files(tmp_path) == files
    assert [group.group_id for group in read_archive(tmp_path)] == list(range(50, 150))
    await archived(tmp_path, configured(max_bytes=taken), closed(150))
    assert [group.group_id for group in read_archive(tmp_path)] == [150]
    assert caplog.records == []


async def test_a_file_that_a_quota_does_not_let_rewrite_goes(tmp_path, monkeypatch):
    await archived(tmp_path, configured(), *(closed(group_id) for group_id in range(50)))

    def full(descriptor):
        raise OSError(errno.EDQUOT, "Disk quota exceeded")

    monkeypatch.setattr(os, "fsync", full)
    (file,) = archive_files(tmp_path)
    thin([file], file.stat().st_size - 1)
    assert list(file.parent.iterdir()) == []


async def test_a_file_stays_when_another_process_took_the_draft(tmp_path, monkeypatch):
    await archived(tmp_path, configured(), *(closed(group_id) for group_id in range(50)))
    (file,) = archive_files(tmp_path)
    monkeypatch.setattr(os, "fsync", lambda descriptor: file.with_name(f"{file.name}.draft").unlink())
    with pytest.raises(FileNotFoundError):
        thin([file], file.stat().st_size - 1)
    assert len(list(read_archive(tmp_path))) == 50


async def test_what_a_kill_left_of_thinning_goes_when_the_next_process_begins(tmp_path):
    await archived(tmp_path, configured(), closed(1))
    (file,) = archive_files(tmp_path)
    draft = file.with_name(f"{file.name}.draft")
    draft.write_bytes(b"half")
    await archived(tmp_path, configured(), closed(2))
    assert not draft.exists()
    assert [group.group_id for group in read_archive(tmp_path)] == [1, 2]


async def test_a_limit_keeps_the_newest_groups_and_a_sample_of_all_others(tmp_path):
    limit, count, sizes = 60_000, 3000, []
    for life in range(3):
        archive = Archive(configured(max_bytes=limit), tmp_path)
        for group_id in range(life * 1000, life * 1000 + 1000):
            archive.add(closed(group_id))
            if group_id % 5 == 4:
                await archive.sync()
                kept_up(archive)
                sizes.append(sum(file.stat().st_size for file in archive_files(tmp_path)))
        await archive.close()
    assert limit / 2 < max(sizes) <= limit
    reading = read_archive(tmp_path)
    kept = [group.group_id for group in reading]
    assert reading.problems == []
    assert kept == sorted(set(kept))
    assert kept[-50:] == list(range(count - 50, count)), "the newest are all there"
    for part in range(0, count, count // 10):  # some of every tenth of the run
        assert any(part <= group_id < part + count // 10 for group_id in kept)
    assert [group.group_id for group in read_groups(tmp_path / ARCHIVE)] == kept


async def test_versions_of_a_group_stay_or_go_together(tmp_path):
    config = configured(max_bytes=8_000)
    for bonus in (0.0, 0.5):
        await archived(tmp_path, config, *(closed(group_id, bonus=bonus) for group_id in range(100)))
    for group_id in range(100, 300, 100):
        await archived(tmp_path, config, *(closed(group_id + index) for index in range(100)))
    old = [group for group in read_archive(tmp_path) if group.group_id < 100]
    assert 0 < len(old) < 100
    assert {group.samples[0].score.value - (group.group_id + 1) % 2 for group in old} == {0.5}


async def test_a_reading_goes_on_while_files_are_thinned(tmp_path):
    await archived(tmp_path, configured(), *(closed(group_id, bonus=0.5) for group_id in range(100)))
    reading = iter(read_archive(tmp_path))
    first = next(reading).group_id
    (file,) = archive_files(tmp_path)
    thin([file], file.stat().st_size - 1)
    assert {group.group_id for group in reading} | {first} >= {group.group_id for group in read_archive(tmp_path)}
    assert 0 < len(list(read_archive(tmp_path))) < 100


async def test_without_an_archive_nothing_happens(tmp_path):
    config = configured().model_copy(update={"archive": configured().archive.model_copy(update={"enabled": False})})
    archive = Archive(config, tmp_path)
    archive.add(closed(1))
    await archive.sync()
    await archive.sync()
    await archive.close()
    assert (list(tmp_path.iterdir()), archive.counts) == ([], {})
    with pytest.raises(ConfigError, match="no archived groups") as caught:
        read_archive(tmp_path)
    assert "archive.enabled" in caught.value.hint


LIFE = """
import asyncio, os, signal, sys
sys.path.insert(0, {kit!r})
from pathlib import Path
from tests.archive_kit import closed, configured
from streamrl.archive.writer import Archive

async def main():
    archive = Archive(configured(file_bytes=600), Path({folder!r}))
    for group_id in range({first}, {first} + 5):
        archive.add(closed(group_id))
        await archive.sync()
        print(group_id, flush=True)
    os.kill(os.getpid(), signal.SIGKILL)

asyncio.run(main())
"""


def test_a_kill_takes_back_nothing_that_was_settled(tmp_path):
    for first in (0, 3, 6):
        code = LIFE.format(kit=str(Path(__file__).parents[2]), folder=str(tmp_path), first=first)
        done = subprocess.run([sys.executable, "-c", code], check=False, capture_output=True, text=True, timeout=100)
        assert done.returncode == -signal.SIGKILL, done.stderr
        assert done.stdout.split() == [str(group_id) for group_id in range(first, first + 5)]
    assert [group.group_id for group in read_archive(tmp_path)] == [0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10]


async def test_a_full_disk_costs_groups_that_are_counted_and_leaves_no_half_block(tmp_path, monkeypatch, caplog):
    archive = Archive(configured(), tmp_path)
    archive.add(closed(0))
    await archive.sync()
    full, real = True, os.pwrite

    def pwrite(descriptor, data, offset):
        if not full:
            return real(descriptor, data, offset)
        real(descriptor, data[:5], offset)
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("streamrl.archive.writer.os.pwrite", pwrite)
    for group_id in (1, 2):
        archive.add(closed(group_id))
        await archive.sync()
    assert archive.counts == {"archived": 1, "archive_lost": 2}
    assert [record.message for record in caplog.records].count("the archive cannot be written") == 1
    reading = read_archive(tmp_path)
    assert [group.group_id for group in reading] == [0]
    full = False
    archive.add(closed(3))
    await archive.close()
    assert archive.counts == {"archived": 2, "archive_lost": 2}
    assert [group.group_id for group in reading] == [0, 3]
    assert reading.problems == []


async def test_what_an_earlier_writer_noted_as_lost_is_no_group(tmp_path):
    """Until November 2026 a record without responses said that the version before it is not the one that counts."""
    archive = Archive(configured(), tmp_path)
    archive.add(closed(17))
    archive.add(closed(18))
    await archive.sync()
    archive.add(dataclasses.replace(closed(17), samples={}))
    await archive.close()
    reading = read_archive(tmp_path)
    assert [group.group_id for group in reading] == [18]
    assert (reading.find(17), reading.problems) == ([], [])


async def test_an_archive_without_a_place_is_tried_again_with_the_next_group(tmp_path, caplog):
    (tmp_path / ARCHIVE).write_text("in the way")
    archive = Archive(configured(), tmp_path)
    for group_id in range(3):
        archive.add(closed(group_id))
        await archive.sync()
    assert archive.counts == {"archived": 0, "archive_lost": 3}
    assert [record.message for record in caplog.records].count("the archive cannot be written") == 1
    (tmp_path / ARCHIVE).unlink()
    archive.add(closed(3))
    await archive.close()
    assert archive.counts == {"archived": 1, "archive_lost": 3}
    assert [group.group_id for group in read_archive(tmp_path)] == [3]


async def test_a_disk_that_hangs_holds_up_nobody_for_long(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(module, "PATIENCE", 0.05)
    archive = Archive(configured(), tmp_path)
    archive.add(closed(0))
    await archive.sync()
    go_on, real = threading.Event(), os.fsync

    def fsync(descriptor):
        assert go_on.wait(60)
        real(descriptor)

    monkeypatch.setattr("streamrl.archive.writer.os.fsync", fsync)
    for group_id in range(1, 4):
        archive.add(closed(group_id))
        await archive.sync()  # returns: the first after the patience, the others at once
    assert "the archive cannot be written" in caplog.text
    monkeypatch.setattr(module, "MAX_WAITING", 0)
    archive.add(closed(4))
    assert archive.lost == 1, "memory is bounded too"
    go_on.set()
    while archive.written < 4:
        await asyncio.sleep(0.01)
        await archive.sync()
    await archive.close()
    assert [group.group_id for group in read_archive(tmp_path)] == [0, 1, 2, 3]
    assert archive.lost == 1


async def test_a_repeat_adds_nothing_and_memory_is_bounded(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "_REMEMBERED", 2)
    archive = Archive(configured(), tmp_path)
    for group_id in (0, 1, 1, 2, 0):  # 0 was forgotten: once too often does no harm
        archive.add(closed(group_id))
    await archive.close()
    assert archive.written == 4
    assert [group.group_id for group in read_archive(tmp_path)] == [1, 2, 0]


async def test_a_damaged_file_is_read_up_to_there_and_named(tmp_path):
    archive = Archive(configured(), tmp_path)
    for group_id in range(2):
        archive.add(closed(group_id))
        await archive.sync()
    await archive.close()
    await archived(tmp_path, configured(), closed(2))
    first, _ = archive_files(tmp_path)
    whole = bytearray(first.read_bytes())
    whole[-3] ^= 0x41
    first.write_bytes(whole)
    reading = read_archive(tmp_path)
    assert [group.group_id for group in reading] == [0, 2]
    assert len(reading.problems) == 1
    assert str(first) in reading.problems[0]
    first.write_bytes(b"what is this")
    assert [group.group_id for group in reading] == [2]
    assert len(reading.problems) == 1
    with pytest.raises(ConfigError, match="not a file of a recording"):
        read_archive(first)
    await archived(tmp_path, configured(), closed(3))  # and nobody stops writing for it
    assert [group.group_id for group in reading] == [2]
    assert [group.group_id for group in read_archive(tmp_path)] == [2, 3]


async def test_it_may_be_read_while_it_is_written(tmp_path):
    archive = Archive(configured(), tmp_path)
    for group_id in range(3):
        archive.add(closed(group_id))
        await archive.sync()
        reading = iter(read_archive(tmp_path))
        assert next(reading).group_id == 0
        archive.add(closed(100 + group_id))
        await archive.sync()
        assert len(list(reading)) == 2 * group_id  # as it was when the reading began
    await archive.close()


def test_a_recording_is_read_where_there_is_no_archive(tmp_path):
    from streamrl.archive.reader import FOLDER, Header, RecordedGroup
    from streamrl.archive.writer import RecordingWriter

    writer = RecordingWriter(tmp_path / FOLDER, 1, Header(id="x", run="r", model="m", temperature=1.0), 1 << 20)
    group = closed(5, dead=(0,))
    writer.add(RecordedGroup.of(group))
    old = RecordedGroup(
        group_id=6, prompt=group.prompt, samples=list(group.samples.values())
    )  # before there were causes
    writer.add(old)
    writer.sync()
    writer.close()
    five, six = read_archive(tmp_path)
    assert ([sample.number for sample in five.samples], five.causes) == ([1, 2, 3], {0: "deadline: sample 0"})
    assert ([sample.number for sample in six.samples], six.causes, six.at) == ([0, 1, 2], {}, 0.0)
    assert isinstance(six.samples[0].score, wire.SampleScore)
