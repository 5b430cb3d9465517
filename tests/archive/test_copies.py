"""Finished files of an archive in a store: each once, under a store that is away, and after a kill."""

from __future__ import annotations

import asyncio
from pathlib import Path

import fsspec
import pytest

from streamrl.archive.reader import ARCHIVE, EVALUATION, archive_files, read_archive, read_groups
from streamrl.archive.thinning import thin
from streamrl.archive.writer import Archive
from tests.archive_kit import archived, closed, configured, kept_up


def copies(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.glob("*/groups-*")}


async def until(condition) -> None:
    async with asyncio.timeout(20):
        while not condition():  # noqa: ASYNC110  (a thread rings no bell here)
            await asyncio.sleep(0.01)


async def test_files_are_copied_when_they_are_finished(tmp_path):
    there = tmp_path / "store" / "kept" / ARCHIVE
    archive = Archive(configured(file_bytes=1, store=f"file://{tmp_path}/store"), tmp_path / "run")
    for group_id in range(3):
        archive.add(closed(group_id))
        await archive.sync()
    await until(lambda: copies(there))
    await archive.close()
    assert copies(there) == {
        file.name: file.read_bytes() for file in archive_files(tmp_path / "run") if file.stat().st_size
    }
    (folder,) = there.iterdir()
    assert [group.group_id for group in read_archive(folder)] == [0, 1, 2]
    assert [group.group_id for group in read_groups(folder)] == [0, 1, 2], "a copy can be trained"


async def test_a_file_that_is_begun_meanwhile_is_copied_when_it_is_finished(tmp_path):
    archive = Archive(configured(file_bytes=1, store=f"file://{tmp_path}/store"), tmp_path / "run")
    archive.add(closed(1))
    await archive.sync()
    (first,) = archive_files(tmp_path / "run")
    second = first.with_name(first.name.replace("-0.", "-1."))
    second.touch()
    archive._keep_up(first.name)
    second.unlink()
    archive.add(closed(2))
    await archive.sync()
    await archive.close()
    (folder,) = (tmp_path / "store" / "kept" / ARCHIVE).iterdir()
    assert [group.group_id for group in read_archive(folder)] == [1, 2]


async def test_another_host_never_replaces_what_one_has_written(tmp_path):
    config = configured(store=str(tmp_path / "store"))
    for host in ("here", "there"):
        await archived(tmp_path / host, config, closed(1), evaluation=True)
    found = list((tmp_path / "store" / "kept" / ARCHIVE / EVALUATION).iterdir())
    assert [len(list(read_archive(folder))) for folder in found] == [1, 1]


async def test_while_the_store_is_away_everything_stays_and_is_copied_later(tmp_path, caplog):
    blocker = tmp_path / "store"
    blocker.write_text("no directory")
    config = configured(file_bytes=1, max_bytes=1, store=str(blocker))
    await archived(tmp_path / "run", config, closed(1))
    assert "cannot be copied" in caplog.text
    assert "are not in archive.store" in caplog.text
    archive = Archive(config, tmp_path / "run")
    for group_id in (2, 3):
        archive.add(closed(group_id))
        await archive.sync()
    kept_up(archive)
    assert len(archive_files(tmp_path / "run")) >= 3, "nothing is thinned that is not copied"
    blocker.unlink()
    archive.add(closed(4))
    await archive.sync()
    kept_up(archive)
    (folder,) = (blocker / "kept" / ARCHIVE).iterdir()
    assert [group.group_id for group in read_archive(folder)] == [1, 2, 3]
    await archive.close()
    assert [group.group_id for group in read_archive(folder)] == [1, 2, 3, 4]


async def test_copies_stay_whole_when_files_here_are_thinned(tmp_path):
    config = configured(max_bytes=8_000, store=str(tmp_path / "store"))
    for life in range(6):
        await archived(tmp_path / "run", config, *(closed(group_id) for group_id in range(50 * life, 50 * life + 50)))
    assert len(list(read_archive(tmp_path / "run"))) < 300
    (folder,) = (tmp_path / "store" / "kept" / ARCHIVE).iterdir()
    assert [group.group_id for group in read_archive(folder)] == list(range(300))


async def test_a_file_that_was_thinned_before_there_was_a_store_is_copied(tmp_path):
    await archived(tmp_path / "run", configured(), *(closed(group_id) for group_id in range(50)))
    (file,) = archive_files(tmp_path / "run")
    thin([file], file.stat().st_size - 1)
    await archived(tmp_path / "run", configured(store=str(tmp_path / "store")), closed(50))
    (folder,) = (tmp_path / "store" / "kept" / ARCHIVE).iterdir()
    assert (folder / file.name).read_bytes() == file.read_bytes()
    whole = (folder / file.name).read_bytes()
    thin([file], file.stat().st_size - 1)
    await archived(tmp_path / "run", configured(store=str(tmp_path / "store")), closed(51))
    assert (folder / file.name).read_bytes() == whole, "a copy is never replaced by less"


async def test_a_copy_that_broke_off_is_made_again_by_the_next_process(tmp_path):
    url = "memory://bucket/of/runs"
    files = fsspec.filesystem("memory")
    config = configured(store=url)
    await archived(tmp_path, config, closed(1))
    (name,) = files.glob("/bucket/of/runs/kept/archive/*/*")
    whole = files.cat_file(name)
    files.pipe_file(name, whole[:-3])
    await archived(tmp_path, config, closed(2))
    assert files.cat_file(name) == whole
    assert len(files.glob("/bucket/of/runs/kept/archive/*/*")) == 2
    files.store.clear()


@pytest.mark.parametrize("archive", [{"enabled": False, "store": "memory://none"}, {"store": None}])
async def test_without_a_store_nothing_is_copied(tmp_path, archive):
    config = configured()
    config = config.model_copy(update={"archive": config.archive.model_copy(update=archive)})
    made = Archive(config, tmp_path)
    made.add(closed(1))
    await made.close()
    assert fsspec.filesystem("memory").store == {}
