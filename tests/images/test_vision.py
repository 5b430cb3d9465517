"""The image side of models, against what transformers itself makes of the same images."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as some
from transformers import AutoModelForImageTextToText, AutoTokenizer

from streamrl.config import ImagesConfig, ModelConfig
from streamrl.errors import ConfigError, DataError
from streamrl.images.encoded import accept, decode
from streamrl.images.vision import Vision, auto_class, vision_of
from tests.vision_kit import KINDS, make_vision_model, picture

SIZES = [(40, 32), (100, 30), (8, 8), (64, 64), (1, 1), (31, 7)]


class Made:
    def __init__(self, folder: Path) -> None:
        self.folder, self.tokenizer = folder, AutoTokenizer.from_pretrained(folder)
        self.config = ModelConfig(path=str(folder))
        self.vision = vision_of(self.config, self.tokenizer)

    def text(self, images: int) -> str:
        parts: list[dict[str, Any]] = [{"type": "text", "text": "a<b"}]
        for number in range(images):
            parts += [{"type": "image"}, {"type": "text", "text": "x" * number}]
        messages = [{"role": "user", "content": parts}]
        return self.tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)

    def ids(self, sizes: list[tuple[int, int]]) -> list[int]:
        return self.tokenizer(self.vision.expand(self.text(len(sizes)), sizes), add_special_tokens=False)["input_ids"]


@pytest.fixture(scope="module", params=KINDS)
def made(request, tmp_path_factory) -> Made:
    return Made(make_vision_model(tmp_path_factory.mktemp(request.param), request.param))


def images_of(sizes):
    return [accept(picture(seed, *size), ImagesConfig()) for seed, size in enumerate(sizes)]


def whole(vision: Vision, images) -> dict[str, np.ndarray]:
    """All images at once through the processor of transformers."""
    opened = [decode(image.data) for image in images]
    return vision._processor(opened if vision.axes == 3 else [opened], return_tensors="np")


@pytest.mark.parametrize("count", range(1, 7))
def test_images_one_by_one_are_those_together(made, count):
    images = images_of(SIZES[:count])
    pixels = [made.vision.pixels(image.sha256, image.data) for image in images]
    joined, expected = made.vision.joined(pixels), whole(made.vision, images)
    for key, array in joined.items():
        assert array.dtype == expected[key].dtype
        assert np.array_equal(array, expected[key])


def test_an_image_is_processed_once(made):
    before, images = made.vision.processed, images_of([(24, 24), (25, 24)])
    for image in images * 3:
        made.vision.pixels(image.sha256, image.data)
    assert made.vision.processed - before <= 2
    assert made.vision.pixels(images[0].sha256, images[0].data) is made.vision.pixels(images[0].sha256, images[0].data)


def test_tokens_are_as_many_as_features_and_stand_where_spans_say(made):
    images = images_of(SIZES)
    ids = made.ids(SIZES)
    spans = made.vision.spans(ids, SIZES)
    assert len(spans) == len(SIZES)
    inside = [place for begin, count in spans for place in range(begin, begin + count)]
    assert {place for place, token in enumerate(ids) if token == made.vision.token_id} <= set(inside)
    assert inside == sorted(set(inside))
    model = AutoModelForImageTextToText.from_pretrained(made.folder)
    for image, (begin, count) in zip(images, spans, strict=True):
        pixels = {key: torch.from_numpy(array) for key, array in made.vision.pixels(image.sha256, image.data).items()}
        features = model.model.get_image_features(**pixels).pooler_output
        assert sum(map(len, features)) == ids[begin : begin + count].count(made.vision.token_id)


def test_positions_are_those_of_the_model(made):
    images = images_of(SIZES)
    ids = made.ids(SIZES)
    pixels = [made.vision.pixels(image.sha256, image.data) for image in images]
    places, end = made.vision.positions(ids, pixels)
    outlined, same = made.vision.positions(ids, [made.vision.outline(size) for size in SIZES])
    assert np.array_equal(outlined, places)
    assert same == end
    if made.vision.axes == 1:
        assert places.tolist() == [list(range(len(ids)))]
        assert end == len(ids)
        return
    model = AutoModelForImageTextToText.from_pretrained(made.folder).model
    row = torch.tensor([ids])
    kinds = (row == made.vision.token_id).int()
    grids = torch.from_numpy(made.vision.joined(pixels)["image_grid_thw"])
    expected, delta = model.get_rope_index(row, kinds, image_grid_thw=grids)
    assert torch.equal(expected[:, 0], torch.from_numpy(places))
    assert end == len(ids) + int(delta)


@settings(max_examples=30, deadline=None)
@given(some.lists(some.tuples(some.integers(1, 120), some.integers(1, 120)), max_size=5))
def test_any_sizes_are_found_again(sizes):
    made = test_any_sizes_are_found_again.made
    sizes = [size for size in sizes if max(size) <= 50 * min(size)]
    ids = made.ids(sizes)
    spans = made.vision.spans(ids, sizes)
    covered = sum(ids[begin : begin + count].count(made.vision.token_id) for begin, count in spans)
    assert covered == ids.count(made.vision.token_id)


@pytest.fixture(autouse=True)
def _given_model(made):
    test_any_sizes_are_found_again.made = made  # hypothesis has no fixtures of a module


def test_placeholders_and_images_must_be_as_many(made):
    for placeholders, sizes in ((2, SIZES[:1]), (1, SIZES[:2]), (0, SIZES[:1]), (1, [])):
        with pytest.raises(DataError, match=f"{placeholders} placeholders .* for {len(sizes)} images"):
            made.vision.expand(made.text(placeholders), sizes)


def test_a_shape_that_a_model_does_not_take_is_a_clear_error(made):
    size = (4000, 4)
    if made.vision.axes == 3:
        with pytest.raises(DataError, match="an image of 4000 x 4 pixels that the model refuses"):
            made.ids([size])
    else:
        assert made.vision.spans(made.ids([size]), [size])


def test_ids_with_other_images_are_refused(made):
    ids = made.ids(SIZES[:2])
    with pytest.raises(DataError, match="more images than it has"):
        made.vision.spans(ids, SIZES[:1])
    with pytest.raises(DataError, match="does not have its tokens"):
        made.vision.spans(ids, [*SIZES[:2], (64, 64)])


def test_settings_of_the_processor_change_the_fingerprint(made):
    same = vision_of(made.config, made.tokenizer)
    other = vision_of(made.config.model_copy(update={"image_processor": {"do_normalize": False}}), made.tokenizer)
    assert same.fingerprint == made.vision.fingerprint != other.fingerprint


def test_a_model_is_loaded_with_its_image_side(made, tmp_path):
    assert auto_class(made.config) is AutoModelForImageTextToText
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "qwen2"}))
    text = ModelConfig(path=str(tmp_path))
    assert auto_class(text) is not AutoModelForImageTextToText
    assert vision_of(text, made.tokenizer) is None


def test_a_family_that_is_not_known_is_refused(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llava", "vision_config": {}}))
    with pytest.raises(ConfigError, match="of the kind 'llava', whose images are not known"):
        vision_of(ModelConfig(path=str(tmp_path)), None)


def test_settings_with_which_the_processor_counts_nothing_are_refused(tmp_path):
    """`size` is replaced whole, and one of its sides is missing."""
    size = {"longest_edge": 200704}
    model = ModelConfig(path=str(make_vision_model(tmp_path, "qwen2_vl")), image_processor={"size": size})
    with pytest.raises(ConfigError, match=r"image processor of .* cannot be loaded") as error:
        vision_of(model)
    assert "each whole" in error.value.hint


def test_a_processor_that_is_missing_is_named(made, tmp_path):
    (tmp_path / "config.json").write_bytes((made.folder / "config.json").read_bytes())
    with pytest.raises(ConfigError, match=r"image processor of .* cannot be loaded"):
        vision_of(ModelConfig(path=str(tmp_path)), made.tokenizer)
