"""`streamrl trace` names images and writes them."""

from __future__ import annotations

import hashlib

from streamrl import wire
from streamrl.commands.groups import _image_lines, _Images, prompt_data
from streamrl.config import RunConfig
from streamrl.images.store import ImageStore
from tests.vision_kit import picture

SMALL, LARGE = picture(1), picture(2, 400, 400, format="JPEG")


def name(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def test_images_are_named_with_size_and_hash_and_written(tmp_path):
    config = RunConfig.model_validate({"name": "t", "images": {"inline": 500}})
    store = ImageStore.of(config, tmp_path)
    assert store.keep({name(LARGE): LARGE}) == []
    gone = "0" * 64
    prompt = wire.Prompt(v=3, tokens=wire.pack_int32([1]), images=[name(SMALL), name(LARGE), gone], blobs=[SMALL])
    images = _Images(store)
    data = prompt_data(wire.encode(prompt), images)
    small, large, missing = data["images"]
    assert small == {"sha256": name(SMALL), "bytes": len(SMALL), "width": 40, "height": 32}
    assert (large["width"], large["bytes"]) == (400, len(LARGE))
    assert "is not in" in missing["missing"]
    lines = list(_image_lines(data, "  "))
    assert lines[0] == f"  image   {name(SMALL)[:12]}  40 x 32, {len(SMALL):,} bytes"
    assert images.write(tmp_path / "out")["count"] == 2
    written = {path.name: path.read_bytes() for path in (tmp_path / "out").iterdir()}
    assert written == {f"{name(SMALL)}.png": SMALL, f"{name(LARGE)}.jpeg": LARGE}


def test_a_prompt_without_images_is_told_as_before():
    plain = wire.Prompt(tokens=wire.pack_int32([1]), text="a")
    assert "images" not in prompt_data(wire.encode(plain))
