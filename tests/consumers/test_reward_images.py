"""What rewards see of images."""

from __future__ import annotations

import asyncio
import hashlib

import pytest

from streamrl import wire
from streamrl.config import ImagesConfig, RewardSpec, RunConfig
from streamrl.consumers import Score
from streamrl.consumers.adapters import adapt
from streamrl.consumers.models.judge import Judge
from streamrl.consumers.reward import RewardSample
from streamrl.consumers.samples import make_sample
from streamrl.consumers.transcript import transcript
from streamrl.errors import DataError, RewardUnavailable
from streamrl.images.encoded import data_url, decode
from streamrl.images.store import ImageStore, files_beside
from tests.consumers.test_http_reward import opened, served
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
    with pytest.raises(DataError, match=f"the image {name(LARGE)[:12]} did not come"):
        _ = sample.images[1].data


def test_a_sample_made_for_a_test_shows_what_it_is_given():
    sample = make_sample("red", images=[SMALL, SHOWN])
    assert [image.data for image in sample.prompt.images] == [image.data for image in sample.images] == [SMALL, SHOWN]
    assert make_sample("red").images == ()


@pytest.mark.parametrize("images", ["hash", "data"])
async def test_a_server_gets_hashes_or_bytes(images):
    bodies = []

    async def keep(body):
        bodies.append(body)
        return 1.0

    shown = make_sample("red", images=[SMALL, SHOWN])
    async with served(keep) as url, opened(url, images=images) as reward:
        await reward.score(shown)
        await reward.score(make_sample("red"))
    data = [data_url(SMALL), data_url(SHOWN)]
    assert bodies[0]["images"] == (data if images == "data" else [name(SMALL), name(SHOWN)])
    assert "images" not in bodies[1], "a text run posts what it did"


async def test_a_lost_image_costs_no_other_sample_of_its_batch():
    async def ones(body):
        return [1.0 for _ in body["samples"]]

    shown = make_sample("red", images=[SMALL])
    async with served(ones) as url, opened(url, images="data", send="batch") as reward:
        good, lost, also = await asyncio.gather(*map(reward.score, (shown, seen(), shown)), return_exceptions=True)
    assert (good, also) == (Score(1.0), Score(1.0))
    assert f"the image {name(LARGE)[:12]} did not come" in str(lost)


def test_a_store_that_is_away_is_waited_for(tmp_path):
    """A folder stands where its file should be."""
    store = ImageStore.of(RunConfig.model_validate({"name": "t", "images": {"inline": 1000}}), tmp_path)
    (tmp_path / "images" / name(LARGE)).mkdir(parents=True)
    with pytest.raises(RewardUnavailable, match="an image cannot be read"):
        _ = seen(store).images[1].data


def test_a_function_for_trl_gets_the_images_of_the_prompt():
    spec = RewardSpec(use="m:f", adapter="trl")
    seen = []

    def function(prompts, completions, images, **kwargs):
        seen.extend(images)
        return [float(image.getpixel((0, 0)) == decode(SMALL).getpixel((0, 0))) for (image,) in images]

    reward = adapt(function, spec, RunConfig())
    assert reward(make_sample("red", images=[SMALL])) == Score(1.0)
    assert seen[0][0].size == (40, 32)
    with pytest.raises(DataError, match="needs images"):
        reward(make_sample("red"))


def test_a_transcript_says_where_an_image_is():
    part = {"type": "image", "sha256": name(SMALL), "width": 40, "height": 32}
    tool = {"role": "tool", "content": [{"type": "text", "text": "here: "}, part]}
    said = [{"role": "assistant", "content": "look"}, tool, {"role": "assistant", "content": "red"}]
    assert transcript(make_sample("red", completion=said)) == (
        "look\n<tool_response>\nhere: [image]\n</tool_response>\nred"
    )


@pytest.mark.parametrize("place", ["archive", "archive/evaluation", "rescored/strict", "recording"])
def test_large_images_of_recorded_groups_are_found_in_their_run(tmp_path, place):
    """For rewards that score them again, and for a run that trains them."""
    ImageStore.of(RunConfig.model_validate({"name": "t", "images": {"inline": 1000}}), tmp_path).keep(
        {name(LARGE): LARGE}
    )
    store = ImageStore(ImagesConfig(), files_beside(tmp_path / place / "groups-1-0.msgpack.zst"))
    assert [image.data for image in seen(store).prompt.images] == [SMALL, LARGE]
    config = RunConfig.model_validate({"name": "u", "recording": {"mode": "read", "path": str(tmp_path / place)}})
    other = ImageStore.of(config, tmp_path / "other")
    assert other.read([name(LARGE)], []) == {name(LARGE): LARGE}
    (tmp_path / "images" / name(LARGE)).unlink()
    with pytest.raises(DataError, match=f"the image {name(LARGE)[:12]} is not in"):
        other.read([name(LARGE)], [])


def test_a_judge_is_shown_images_when_it_is_asked_to():
    sample = make_sample("red", prompt="which colour?", images=[SMALL])
    (asked,) = Judge("critic", images=True)._messages(sample)
    text, image = asked["content"]
    assert "which colour?" in text["text"]
    assert image == {"type": "image_url", "image_url": {"url": data_url(SMALL)}}
    (plain,) = Judge("critic")._messages(sample)
    assert plain["content"] == text["text"]
