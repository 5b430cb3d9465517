"""Agents show images at each of the endpoint's APIs, in messages and in results of tools."""

from __future__ import annotations

import base64
import io

import numpy as np
import openai
import pytest
from PIL import Image

from streamrl.config import ModelConfig
from streamrl.images.encoded import data_url
from streamrl.producers.episodes.endpoint.calls import content_of
from streamrl.producers.tokenizer import Tokenizer
from tests.vision_kit import make_vision_model, picture

from .endpoint_kit import post

RED, BLUE = picture(1), picture(2)
ROOM = {"model": {"context": 4096}}
TEXT = {"type": "text", "text": "which colour?"}


@pytest.fixture(scope="module")
def qwen(tmp_path_factory):
    return Tokenizer.load(ModelConfig(path=str(make_vision_model(tmp_path_factory.mktemp("model"), "qwen2_vl"))))


def shown(data):
    return {"type": "image_url", "image_url": {"url": data_url(data)}}


def source(data):
    return {
        "type": "image",
        "source": {"type": "base64", "media_type": "image/png", "data": base64.b64encode(data).decode()},
    }


CHAT = {
    "messages": [
        {"role": "user", "content": [TEXT, shown(RED)]},
        {"role": "assistant", "content": "look", "tool_calls": [
            {"id": "c", "type": "function", "function": {"name": "look", "arguments": "{}"}}
        ]},
        {"role": "tool", "tool_call_id": "c", "content": [TEXT, shown(BLUE)]},
    ]
}  # fmt: skip
RESPONSES = {
    "input": [
        {
            "role": "user",
            "content": [{"type": "input_text", "text": "?"}, {"type": "input_image", "image_url": data_url(RED)}],
        },
        {"type": "function_call", "call_id": "c", "name": "look", "arguments": "{}"},
        {
            "type": "function_call_output",
            "call_id": "c",
            "output": [{"type": "input_image", "image_url": data_url(BLUE)}],
        },
    ]
}
ANTHROPIC = {
    "max_tokens": 9,
    "messages": [
        {"role": "user", "content": [TEXT, source(RED)]},
        {"role": "assistant", "content": [{"type": "tool_use", "id": "c", "name": "look", "input": {}}]},
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "c", "content": [TEXT, source(BLUE)]}]},
    ],
}


@pytest.mark.parametrize(
    ("path", "body"),
    [("chat/completions", CHAT), ("responses", RESPONSES), ("messages", ANTHROPIC)],
    ids=["chat", "responses", "anthropic"],
)
async def test_images_reach_the_engine_in_their_order(serve, qwen, path, body):
    served = await serve("red", tokenizer=qwen, sections=ROOM)
    status, answer = await post(served, {"model": "policy", **body}, path=path)
    assert status == 200, answer
    (request,) = served.engine.requests
    assert [image.data for image in request.images] == [RED, BLUE]
    sample = served.session.sample()
    assert (sample.v, sample.blobs, len(sample.images)) == (3, [RED, BLUE], 2)


@pytest.mark.parametrize(
    ("path", "messages"),
    [
        ("chat/completions", [{"type": "image_url", "image_url": {"url": "https://example.org/a.png"}}]),
        ("chat/completions", [{"type": "image_url", "image_url": 7}]),
        ("chat/completions", [{"type": "image", "sha256": "0" * 64}]),
        ("responses", [{"type": "input_image", "image_url": "http://example.org/a.png"}]),
        ("responses", [{"type": "input_image", "file_id": "file-1"}]),
        ("messages", [{"type": "image", "source": {"type": "url", "url": "https://example.org/a.png"}}]),
        ("messages", [{"type": "image", "source": "https://example.org/a.png"}]),
    ],
)
async def test_each_api_refuses_an_image_that_is_elsewhere_in_its_own_form(serve, qwen, path, messages):
    served = await serve("red", tokenizer=qwen, sections=ROOM)
    said = [{"role": "user", "content": messages}]
    body = {"model": "policy", "max_tokens": 9, "input" if path == "responses" else "messages": said}
    body = {key: value for key, value in body.items() if path != "responses" or key != "max_tokens"}
    status, answer = await post(served, body, path=path)
    assert status == 400
    assert "nothing is fetched here" in answer["error"]["message"]
    assert answer["error"]["type"] == "invalid_request_error"
    assert answer.get("type") == ("error" if path == "messages" else None)
    assert served.engine.requests == []


async def test_bytes_of_images_do_not_fill_the_context(serve, qwen):
    """The body is longer than any text that fits; the image is some dozen tokens."""
    served = await serve("red", tokenizer=qwen, sections=ROOM)
    noise = np.random.default_rng(0).integers(0, 256, (400, 400, 3), dtype=np.uint8)
    written = io.BytesIO()
    Image.fromarray(noise).save(written, "PNG")
    large = written.getvalue()
    assert len(large) > 64 * 4096
    await served.ask([{"role": "user", "content": [TEXT, shown(large)]}])
    assert [image.data for image in served.engine.requests[0].images] == [large]
    with pytest.raises(openai.BadRequestError, match="leaves no room"):
        await served.ask([{"role": "user", "content": [{"type": "text", "text": "a" * 300_000}, shown(RED)]}])


@pytest.mark.parametrize("url", ["file:///etc/passwd", "data:image/png;base64,AAAA"])
async def test_what_is_no_image_is_refused_and_nothing_is_fetched(serve, qwen, url):
    served = await serve("red", tokenizer=qwen, sections=ROOM)
    with pytest.raises(openai.BadRequestError, match="image"):
        await served.ask([{"role": "user", "content": [{"type": "image_url", "image_url": {"url": url}}]}])
    assert served.engine.requests == []


def test_texts_in_a_list_are_parts_of_a_result():
    """As Anthropic's `tool_result` may have them, also beside an image."""
    assert content_of(["a", {"type": "text", "text": "b"}]) == "ab"
    assert content_of(["a", shown(RED)]) == [{"type": "text", "text": "a"}, shown(RED)]
