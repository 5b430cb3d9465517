"""Images by their hash: small ones travel, large ones are files, once."""

from __future__ import annotations

import hashlib

import pytest

from streamrl.config import ImagesConfig, RunConfig
from streamrl.errors import DataError
from streamrl.images.store import ImageStore
from tests.vision_kit import picture


def name(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


SMALL, LARGE = picture(1), picture(2, 400, 400)


@pytest.fixture(params=["run directory", "url"])
def store(request, tmp_path):
    url = None if request.param == "run directory" else f"file://{tmp_path}/store"
    config = RunConfig.model_validate({"name": "t", "images": {"url": url, "inline": 1000}})
    assert len(SMALL) <= 1000 < len(LARGE)
    return ImageStore.of(config, tmp_path / "run")


def files(folder):
    return [path for path in folder.rglob("*") if path.is_file()]


def test_small_ones_travel_and_large_ones_are_one_file(store, tmp_path):
    images = {name(data): data for data in (SMALL, LARGE)}
    assert store.keep(images) == store.keep(images) == [SMALL]
    [file] = files(tmp_path)
    assert file.name == name(LARGE)
    assert store.read(list(images), [SMALL]) == images


def test_one_that_is_gone_is_named_with_what_to_do(store, tmp_path):
    store.keep({name(LARGE): LARGE})
    [file] = files(tmp_path)
    file.unlink()
    with pytest.raises(DataError, match=f"the image {name(LARGE)[:12]} is not in") as missing:
        store.read([name(LARGE)], [])
    assert "images.url" in missing.value.hint
    with pytest.raises(DataError, match=f"the image {name(SMALL)[:12]} is not in"):
        store.read([name(SMALL)], [])
    with pytest.raises(DataError, match=f"the image {name(SMALL)[:12]} did not come with its group"):
        ImageStore(ImagesConfig()).read([name(SMALL)], [])


def test_a_store_that_is_away_is_no_missing_image(store, tmp_path):
    """A folder stands where its file or its folder should be."""
    store.keep({name(LARGE): LARGE})
    [file] = files(tmp_path)
    file.unlink()
    file.mkdir()
    with pytest.raises(OSError, match=r"(?i)directory"):
        store.read([name(LARGE)], [])


def test_a_run_that_trains_a_recording_finds_images_in_a_store_of_both(tmp_path):
    url = f"file://{tmp_path}/store"
    configs = [RunConfig.model_validate({"name": run, "images": {"url": url, "inline": 1000}}) for run in "ab"]
    made, trains = (ImageStore.of(config, tmp_path / config.name) for config in configs)
    made.keep({name(LARGE): LARGE})
    assert trains.read([name(LARGE)], []) == {name(LARGE): LARGE}


def test_other_bytes_under_its_name_are_refused(store, tmp_path):
    store.keep({name(LARGE): LARGE})
    [file] = files(tmp_path)
    file.write_bytes(SMALL)
    with pytest.raises(DataError, match="has other bytes than when it was kept"):
        store.read([name(LARGE)], [])
