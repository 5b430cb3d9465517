"""Loading a model, and which decode loop it gets."""

from __future__ import annotations

import asyncio
import json

import numpy as np
import pytest
import torch
import transformers
from engine_kit import COMMON, engine_config, plain, random_model, request

from streamrl.errors import ConfigError
from streamrl.producers.engines import model as engine_model
from streamrl.producers.engines.hf import HfEngine
from streamrl.producers.engines.model import (
    cache_bytes_per_token,
    choose_decode,
    context_length,
    load_model,
    pick_device,
    slots_obstacle,
    stop_tokens,
)


@pytest.mark.parametrize("decode", ["slots", "continuous"])
async def test_eager_attention_is_exact_too(start, decode):
    engine = await start(decode, attention="eager")
    text = [5, 6, 7, 8, 9]
    done = await asyncio.gather(*(engine.generate(request(str(k), text[: k + 1], 20)) for k in range(5)))
    for k, completion in enumerate(done):
        expected = plain(random_model("qwen2", 0), text[: k + 1], completion)
        np.testing.assert_allclose(completion.logprobs, expected, atol=1e-5)


@pytest.mark.parametrize("decode", ["slots", "continuous"])
async def test_bfloat16(start, decode):
    engine = await start(decode, dtype="bfloat16")
    completion = await engine.generate(request("a", [5, 6, 7], 30))
    expected = plain(random_model("qwen2", 0).bfloat16(), [5, 6, 7], completion)
    np.testing.assert_allclose(completion.logprobs, expected, atol=0.1)


async def test_auto_starts_slots_for_a_small_model(model_dir):
    engine = HfEngine(engine_config(model_dir("qwen2"), "auto"), seed=0)
    await engine.start()
    assert engine.decode == "slots"
    await engine.close()


def test_auto_takes_slots_only_where_they_are_cheap_and_right(model_dir, monkeypatch):
    model = random_model("qwen2", 0)
    path = model_dir("qwen2")
    assert choose_decode(engine_config(path, "auto"), model) == "slots"
    assert choose_decode(engine_config(path, "continuous"), model) == "continuous"
    # 2 layers x keys and values x 2 heads x 8 x 4 bytes; times 8 slots x 200 tokens = 400 KiB
    assert cache_bytes_per_token(model) == 256
    assert choose_decode(engine_config(path, "auto", kv_cache="400KiB"), model) == "slots"
    assert choose_decode(engine_config(path, "auto", kv_cache="399KiB"), model) == "continuous"
    monkeypatch.setattr(engine_model, "CHEAP_PARAMETERS", 1000)
    assert choose_decode(engine_config(path, "auto"), model) == "continuous"
    assert choose_decode(engine_config(path, "slots"), model) == "slots"


def sliding() -> transformers.PreTrainedModel:
    config = transformers.MistralConfig(
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        intermediate_size=48,
        sliding_window=8,
        **COMMON,
    )
    return transformers.AutoModelForCausalLM.from_config(config).eval()


def dynamic() -> transformers.PreTrainedModel:
    config = transformers.LlamaConfig(
        hidden_size=32,
        num_hidden_layers=1,
        num_attention_heads=4,
        intermediate_size=48,
        rope_parameters={"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0},
        **COMMON,
    )
    return transformers.AutoModelForCausalLM.from_config(config).eval()


def alibi() -> transformers.PreTrainedModel:
    torch.manual_seed(0)
    config = transformers.BloomConfig(hidden_size=32, n_layer=2, n_head=4, initializer_range=0.3, **COMMON)
    return transformers.AutoModelForCausalLM.from_config(config).eval()


@pytest.mark.parametrize(("make", "says"), [(sliding, "full attention"), (dynamic, "rotary"), (alibi, "trial")])
def test_models_that_slots_would_decode_wrongly_are_found(make, says, model_dir):
    model = make()
    assert says in slots_obstacle(model)
    assert choose_decode(engine_config(model_dir("qwen2"), "auto"), model) == "continuous"
    with pytest.raises(ConfigError, match=says):
        choose_decode(engine_config(model_dir("qwen2"), "slots"), model)


@pytest.mark.parametrize("kind", ["qwen2", "llama", "gpt2"])
def test_models_with_plain_attention_have_no_obstacle(kind):
    assert slots_obstacle(random_model(kind, 0)) == ""


def test_a_model_that_is_not_there(tmp_path):
    with pytest.raises(ConfigError, match="nowhere"):
        load_model(engine_config(tmp_path / "nowhere", "auto"))
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "no such thing"}))
    with pytest.raises(ConfigError, match=str(tmp_path)):
        load_model(engine_config(tmp_path, "auto"))


def test_a_model_without_some_of_its_weights_is_refused(tmp_path):
    model = random_model("llama", 0)
    state = {name: tensor for name, tensor in model.state_dict().items() if "layers.1.mlp.up" not in name}
    model.save_pretrained(tmp_path, state_dict=state)
    with pytest.raises(ConfigError, match=r"layers\.1\.mlp\.up"):
        load_model(engine_config(tmp_path, "auto"))


async def test_a_start_that_fails_raises_and_close_works(tmp_path):
    engine = HfEngine(engine_config(tmp_path / "nowhere", "auto"), seed=0)
    with pytest.raises(ConfigError):
        await engine.start()
    await engine.close()


async def test_close_after_a_cancelled_start_leaves_no_thread(model_dir):
    engine = HfEngine(engine_config(model_dir("qwen2"), "continuous"), seed=0)
    task = asyncio.create_task(engine.start())
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await engine.close()
    assert engine._decoder is not None
    assert engine._decoder._manager is None


def test_devices():
    assert pick_device("cpu").type == "cpu"
    assert pick_device("auto").type == ("cuda" if torch.cuda.is_available() else "cpu")
    for name in ("cuda:99", "toaster"):
        with pytest.raises(ConfigError, match=name):
            pick_device(name)


def test_stop_tokens_and_context(model_dir):
    model = random_model("qwen2", 0)
    assert stop_tokens(model.generation_config, model.config) == {2}
    model.generation_config.eos_token_id = [2, 5]
    assert stop_tokens(model.generation_config, model.config) == {2, 5}
    model.generation_config.eos_token_id = None
    assert stop_tokens(model.generation_config, model.config) == {2}
    model.config.eos_token_id = None
    assert stop_tokens(model.generation_config, model.config) == stop_tokens(None, model.config) == frozenset()
    assert context_length(engine_config(model_dir("qwen2"), "auto", context=100), model) == 100
    assert context_length(engine_config(model_dir("qwen2"), "auto", context=1000), model) == 256
