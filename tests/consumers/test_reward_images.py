"""What rewards see of images."""

from __future__ import annotations

import hashlib

import pytest

from streamrl import wire
from streamrl.config import RunConfig
from streamrl.consumers.models.judge import Judge
from streamrl.consumers.reward import RewardSample
from streamrl.consumers.samples import make_sample
from streamrl.errors import DataError
from streamrl.images.encoded import data_url
from streamrl.images.store import ImageStore
from tests.vision_kit import picture

SMALL, LARGE, SHOWN = picture(1), picture(2, 400, 400), picture(3)


def name(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def seen(store: ImageStore | None = None) -> RewardSample:
    prompt = wire.Prompt(v=3, tokens=wire.pack_int32([1]), images=[name(SMALL), name(LARGE)], blobs=[SMALL])
    turns = [
        wire.Turn(sampled=1, finish="stop"),
        wire.Turn(parent=0, role="tool", observed=wire.pack_int32([1]), media=[name(SHOWN), name(SMALL)]),
        wire.Turn(parent=1, sampled=1, finish="stop"),
    ]
    logprobs, tokens = wire.pack_float32([-1, -1]), wire.pack_int32([1, 2])
    sample = wire.Sample(
        v=3, tokens=tokens, logprobs=logprobs, runs=[(0, 0)], finish="stop", turns=turns, blobs=[SHOWN]
    )
    return RewardSample.of(prompt, sample, store=store)


def test_images_of_the_prompt_and_of_turns_in_their_order(tmp_path):
    store = ImageStore.of(RunConfig.model_validate({"name": "t", "images": {"inline": 1000}}), tmp_path)
    store.keep({name(LARGE): LARGE})
    sample = seen(store)
    assert [image.data for image in sample.prompt.images] == [SMALL, LARGE]
    assert [image.data for image in sample.images] == [SMALL, LARGE, SHOWN, SMALL]
    assert sample.images[0].sha256 == name(SMALL)


def test_a_large_one_that_is_gone_is_an_error_when_it_is_looked_at():
    sample = seen()
    assert sample.images[2].data == SHOWN
    with pytest.raises(DataError, match=f"the image {name(LARGE)[:12]} is not in"):
        _ = sample.images[1].data


def test_a_sample_made_for_a_test_shows_what_it_is_given():
    sample = make_sample("red", images=[SMALL, SHOWN])
    assert [image.data for image in sample.prompt.images] == [image.data for image in sample.images] == [SMALL, SHOWN]
    assert make_sample("red").images == ()


def test_a_judge_is_shown_images_when_it_is_asked_to():
    sample = make_sample("red", prompt="which colour?", images=[SMALL])
    (asked,) = Judge("critic", images=True)._messages(sample)
    text, image = asked["content"]
    assert "which colour?" in text["text"]
    assert image == {"type": "image_url", "image_url": {"url": data_url(SMALL)}}
    (plain,) = Judge("critic")._messages(sample)
    assert plain["content"] == text["text"]
