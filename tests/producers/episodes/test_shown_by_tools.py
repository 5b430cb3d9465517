"""What tools and environments may return so that the model sees it."""

from __future__ import annotations

import base64
import io
from dataclasses import replace
from typing import ClassVar

import gymnasium
import msgspec
import numpy as np
import orjson
import pytest
from PIL import Image

from streamrl.config import ModelConfig
from streamrl.images.encoded import data_url
from streamrl.images.encoded import decode as opened
from streamrl.producers.episodes.adapters.gymnasium import GymnasiumEpisode
from streamrl.producers.episodes.environment import EnvironmentEpisode, ToolEpisode
from streamrl.producers.episodes.sampler import EpisodeFailed, EpisodeSampler
from streamrl.producers.episodes.tools import _cut_parts
from streamrl.producers.tokenizer import Tokenizer
from tests.vision_kit import make_vision_model, picture

from .chat_kit import HERMES, make_tokenizer
from .episode_kit import Script, call, config_of, order_of

PICTURE = picture(0)
ROOM = {"model": {"context": 4096}, "sampling": {"max_new_tokens": 256}}


class Says(Script):
    end = "<|end|>"


@pytest.fixture(scope="module")
def qwen(tmp_path_factory):
    return Tokenizer.load(ModelConfig(path=str(make_vision_model(tmp_path_factory.mktemp("model"), "qwen2_vl"))))


RED = np.full((8, 8, 3), (255, 0, 0), np.uint8)
FORMS = {
    "bytes": PICTURE,
    "a view": memoryview(PICTURE),
    "Pillow": Image.open(io.BytesIO(PICTURE)),
    "OpenAI": {"type": "image_url", "image_url": {"url": data_url(PICTURE)}},
    "TRL": {"type": "image", "image": Image.open(io.BytesIO(PICTURE))},
    "MCP": {"type": "image", "data": base64.b64encode(PICTURE).decode(), "mimeType": "image/png"},
}


@pytest.mark.parametrize("form", FORMS)
async def test_a_tool_may_return_an_image_in_each_form(qwen, form):
    def alone() -> object:
        """Alone."""
        return FORMS[form]

    def among() -> object:
        """Among texts."""
        return ("here: ", FORMS[form], {"count": 1})

    engine = Says(qwen, [call(*(f'{{"name": "{tool}", "arguments": {{}}}}' for tool in ("alone", "among"))), "done"])
    config = config_of({"tools": ["a:b"]}, **ROOM)
    async with EpisodeSampler(config, engine, qwen, ToolEpisode([alone, among])) as sampler:
        sample = await sampler.sample(order_of(qwen))
    first, second = engine.requests[1].images
    assert first.sha256 == second.sha256
    pixels = np.asarray(Image.open(io.BytesIO(first.data)))
    assert (pixels == np.asarray(Image.open(io.BytesIO(PICTURE)))).all()
    said = [message["content"] for message in sample.turns[-1].messages if message["role"] == "tool"]
    assert [each["type"] for each in said[0]] == ["image"]
    assert [each.get("text") for each in said[1]] == ["here: ", None, '{"count":1}']


class Room:
    """Shows where one is; the seed is its colour."""

    def reset(self, **row):
        return ["look: ", Image.fromarray(RED)] if row["answer"] == "red" else {"no": "text"}

    def turn(self) -> object:
        """Turn around."""
        return Image.fromarray(RED[:, :, ::-1])


async def test_an_environment_shows_images_at_its_beginning_and_in_its_tools(qwen):
    engine = Says(qwen, [call('{"name": "turn", "arguments": {}}'), "done"])
    config = config_of({"environment": "a:b"}, **ROOM)
    order = order_of(qwen)
    red = replace(order, prompt=msgspec.structs.replace(order.prompt, answer="red"))
    async with EpisodeSampler(config, engine, qwen, EnvironmentEpisode(Room)) as sampler:
        await sampler.sample(red)
        with pytest.raises(EpisodeFailed, match="reset returned a dict, not text, images or None"):
            await sampler.sample(order)
    colours = [opened(image.data).getpixel((0, 0)) for image in engine.requests[1].images]
    assert colours == [(255, 0, 0), (0, 0, 255)]


class Walk(gymnasium.Env):
    """Gets brighter with each step."""

    action_space = gymnasium.spaces.Discrete(2)
    observation_space = gymnasium.spaces.Discrete(10)
    metadata: ClassVar = {"render_modes": ["rgb_array"]}

    def __init__(self, render_mode=None):
        self.render_mode = render_mode

    def reset(self, *, seed=None, options=None):
        self.steps = 0
        return 0, {}

    def step(self, action):
        self.steps += 1
        return self.steps, 1.0, self.steps == 2, False, {}

    def render(self):
        return np.full((8, 8, 3), 100 * self.steps, np.uint8)


async def test_what_gymnasium_renders_is_seen(qwen):
    gymnasium.register("Walk-v0", entry_point=Walk, disable_env_checker=True)
    try:
        engine = Says(qwen, ["1", "0"])
        config = config_of({"run": "a:b"}, **ROOM)
        episode = GymnasiumEpisode("Walk-v0", kwargs={"render_mode": "rgb_array"}, observation="render")
        async with EpisodeSampler(config, engine, qwen, episode) as sampler:
            sample = await sampler.sample(order_of(qwen))
    finally:
        del gymnasium.registry["Walk-v0"]
    assert [opened(image.data).getpixel((0, 0))[0] for image in engine.requests[1].images] == [0, 100]
    assert len(sample.images) == 2


async def test_data_with_the_keys_of_an_image_stays_text():
    """What a shop or a search answers, of a model that takes text."""
    found = [{"title": "a mug", "image_url": "https://example.org/mug.png"}, {"type": "image", "url": "x"}]

    def search() -> object:
        """Search."""
        return found

    tokenizer = make_tokenizer(HERMES)
    engine = Script(tokenizer, [call('{"name": "search", "arguments": {}}'), "done"])
    async with EpisodeSampler(config_of({"tools": ["a:b"]}), engine, tokenizer, ToolEpisode([search])) as sampler:
        sample = await sampler.sample(order_of(tokenizer))
    (said,) = [message["content"] for message in sample.turns[-1].messages if message["role"] == "tool"]
    assert orjson.loads(said) == found


def test_texts_behind_a_cut_one_add_no_notes():
    parts = [{"type": "text", "text": "a" * 10}, {"type": "image"}, *[{"type": "text", "text": "b" * 9}] * 1000]
    kept = _cut_parts(parts, 12)
    assert [part.get("text") for part in kept] == ["a" * 10, None, "b\n[7 characters left out]\nb"]
