"""What vLLM and SGLang are told about images, and what is made of their answers; the live tests have real servers."""

from __future__ import annotations

import base64
from pathlib import Path

import numpy as np
import orjson
import pytest

from streamrl.config import RunConfig
from streamrl.engine import Request, RequestImage, RequestLimits
from streamrl.errors import ConfigError, DataError
from streamrl.servers.dialect import IMAGES, Chunk, sees, unexpanded
from streamrl.servers.launch import PLUGIN
from streamrl.servers.request import Response
from streamrl.servers.sglang import SglangDialect
from streamrl.servers.vllm import VllmDialect
from streamrl.weight_sync.tensors import Version
from tests.vision_kit import make_vision_model

PNG = b"\x89PNG..."
SHOWN = (RequestImage("aa", PNG, 1, 3, 9), RequestImage("bb", b"\xff\xd8..", 5, 1, 9))
REQUEST = Request("r", np.array([5, 9, 9, 9, 6, 9, 7], np.int32), 8, images=SHOWN, forbidden=(9, 10))
PLAIN = Request("r", np.array([5, 6], np.int32), 8)
KINDS = [VllmDialect, SglangDialect]


def config(kind: str, *, path: str = "m", processor: dict[str, object] | None = None, **learner: object) -> RunConfig:
    model = {"path": path, "context": 64, "image_processor": processor or {}}
    engine = {"kind": kind, "device": "cpu"}
    data = {"model": model, "engine": engine, "learner": learner, "data": {"max_prompt_tokens": 16}}
    return RunConfig.model_validate({"sampling": {"max_new_tokens": 8}, **data})


def body_of(kind, request):
    return orjson.loads(orjson.dumps(kind(config(kind.kind)).generation(request, version=1).body))


def test_images_travel_once_and_their_tokens_as_one():
    assert unexpanded(REQUEST) == [5, 9, 6, 9, 7]
    vllm, sglang = body_of(VllmDialect, REQUEST), body_of(SglangDialect, REQUEST)
    assert vllm["token_ids"] == sglang["input_ids"] == [5, 9, 6, 9, 7]
    url = "data:image/png;base64," + base64.b64encode(PNG).decode()
    assert vllm["content_parts"][0] == {"type": "image_url", "url": url, "uuid": "aa"}
    assert sglang["image_data"][0] == url
    assert [part["uuid"] for part in vllm["content_parts"]] == ["aa", "bb"]
    assert vllm["sampling_params"]["logit_bias"] == sglang["sampling_params"]["logit_bias"] == {"9": -100, "10": -100}


@pytest.mark.parametrize("kind", KINDS)
def test_without_images_nothing_of_them_is_said(kind):
    body = body_of(kind, PLAIN)
    assert not {"content_parts", "image_data"} & set(body)
    assert "logit_bias" not in body["sampling_params"]


@pytest.mark.parametrize("count", [None, 7])
def test_a_server_that_counts_as_we_do(count):
    Response(REQUEST, RequestLimits(64, 100), 1).add(Chunk([1], [-1.0], prompt_tokens=count))


def test_a_server_that_counts_otherwise_has_another_processor():
    with pytest.raises(DataError, match="counts 9 tokens in a prompt with images, streamrl 7") as caught:
        Response(REQUEST, RequestLimits(64, 100), 1).add(Chunk([1], [-1.0], prompt_tokens=9))
    assert "model.image_processor" in caught.value.hint
    Response(PLAIN, RequestLimits(64, 100), 1).add(Chunk([1], [-1.0], prompt_tokens=9))


def test_a_trained_image_side_is_forgotten_with_each_version():
    """What servers keep of an image is known there by its hash alone."""
    version = Version((2, 17), 17, {}, Path("/v"), ("a.st",))
    for trained in (False, True):
        calls = VllmDialect(config("vllm", train_vision=trained)).update(version, "17")
        assert ([call.path for call in calls][3:] == ["/reset_encoder_cache"]) is trained
        (call,) = SglangDialect(config("sglang", train_vision=trained)).update(version, "17")
        frame = base64.b64decode(call.body["serialized_named_tensors"][0])
        assert (b'"forget_images":true' in frame) is trained


def test_a_model_of_the_hub_is_known_where_it_has_been_fetched(tmp_path, monkeypatch):
    hub = tmp_path / "models--a--b"
    folder = make_vision_model(hub / "snapshots" / "f00", "qwen2_vl")
    (hub / "refs").mkdir()
    (hub / "refs" / "main").write_text("f00")
    assert sees(str(folder))
    assert not sees("a/b")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    assert sees("a/b")


@pytest.mark.parametrize("kind", KINDS)
def test_servers_of_a_model_that_sees_read_images_as_we_do(kind, tmp_path, tiny_dir):
    folder = make_vision_model(tmp_path / "m", "qwen2_vl")
    size = {"shortest_edge": 784, "longest_edge": 3136}
    speak = kind(config(kind.kind, path=str(folder), processor={"size": size}))
    environ = speak.environ(str(folder), cpu=True)
    assert orjson.loads(environ[IMAGES]) == {"path": str(folder), "size": size}
    assert IMAGES not in speak.environ(str(tiny_dir), cpu=True)
    if kind is SglangDialect:  # reads images only with a tokenizer
        flags = [speak.needed_flags(str(path), cpu=True)["skip-tokenizer-init"] for path in (folder, tiny_dir)]
        assert flags == [False, True]
    assert f'VARIABLE = "{IMAGES}"' in (PLUGIN / "streamrl_engine" / "images.py").read_text()


def test_sglang_refuses_families_for_which_it_has_no_processor(tmp_path):
    folder = make_vision_model(tmp_path / "m", "smolvlm")
    with pytest.raises(ConfigError, match="no image processor for models of kind smolvlm"):
        SglangDialect(config("sglang")).needed_flags(str(folder), cpu=True)
