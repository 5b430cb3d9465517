"""Loading a model, and which models can be decoded."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers
from engine_kit import COMMON, KINDS, engine_config, plain, random_model, request

from streamrl.errors import ConfigError
from streamrl.producers.engines.hf import HfEngine
from streamrl.producers.engines.model import (
    affordable_slots,
    cache_bytes_per_token,
    check_decodable,
    context_length,
    load_model,
    stop_tokens,
)


async def test_eager_attention_is_exact_too(start):
    engine = await start(attention="eager")
    text = [5, 6, 7, 8, 9]
    done = await asyncio.gather(*(engine.generate(request(str(k), text[: k + 1], 20)) for k in range(5)))
    for k, completion in enumerate(done):
        expected = plain(random_model("qwen2", 0), text[: k + 1], completion)
        np.testing.assert_allclose(completion.logprobs, expected, atol=1e-5)


async def test_bfloat16(start):
    engine = await start(dtype="bfloat16")
    completion = await engine.generate(request("a", [5, 6, 7], 30))
    expected = plain(random_model("qwen2", 0).bfloat16(), [5, 6, 7], completion)
    np.testing.assert_allclose(completion.logprobs, expected, atol=0.1)


def test_as_many_slots_as_the_memory_has_room_for(model_dir, caplog):
    model, path = random_model("qwen2", 0), model_dir("qwen2")
    # 2 layers x keys and values x 2 heads x 8 x 4 bytes; times 8 slots x 200 tokens = 400 KiB
    assert cache_bytes_per_token(model) == 256
    assert affordable_slots(engine_config(path, kv_cache="400KiB"), model) == 8
    assert not caplog.records
    assert affordable_slots(engine_config(path, kv_cache="399KiB"), model) == 7
    assert "engine.kv_cache has no room" in caplog.text
    assert affordable_slots(engine_config(path, kv_cache="50KiB"), model) == 1
    with pytest.raises(ConfigError, match="one response of 200 tokens needs 51,200 bytes"):
        affordable_slots(engine_config(path, kv_cache="49KiB"), model)


async def test_an_engine_that_lacks_memory_serves_more_requests_than_it_has_slots(start):
    engine = await start(kv_cache="100KiB")
    assert engine.load().capacity == 2
    done = await asyncio.gather(*(engine.generate(request(str(k), [5, 6, 7], 20)) for k in range(8)))
    for completion in done:
        np.testing.assert_allclose(
            completion.logprobs, plain(random_model("qwen2", 0), [5, 6, 7], completion), atol=1e-5
        )


def longrope() -> transformers.PreTrainedModel:
    torch.manual_seed(0)
    factors = {"short_factor": [1.0] * 4, "long_factor": [4.0] * 4}
    config = transformers.Phi3Config(
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        intermediate_size=48,
        max_position_embeddings=400,
        original_max_position_embeddings=100,
        rope_parameters={"rope_type": "longrope", "rope_theta": 10000.0, **factors},
        **COMMON,
    )
    return transformers.AutoModelForCausalLM.from_config(config).eval()


def alibi() -> transformers.PreTrainedModel:
    torch.manual_seed(0)
    config = transformers.BloomConfig(hidden_size=32, n_layer=2, n_head=4, initializer_range=0.3, **COMMON)
    return transformers.AutoModelForCausalLM.from_config(config).eval()


def dynamic_by_kind() -> transformers.PreTrainedModel:
    model = random_model("gemma3", 0)
    limited = {"rope_type": "dynamic", "factor": 2.0, "original_max_position_embeddings": 64}
    model.config.rope_parameters["full_attention"] |= limited
    return model


def linear() -> transformers.PreTrainedModel:
    config = transformers.Qwen3NextConfig(
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        intermediate_size=48,
        linear_num_value_heads=2,
        linear_num_key_heads=2,
        linear_key_head_dim=8,
        linear_value_head_dim=8,
        num_experts=2,
        num_experts_per_tok=1,
        moe_intermediate_size=16,
        shared_expert_intermediate_size=16,
        layer_types=["linear_attention", "full_attention"],
        **COMMON,
    )
    return transformers.AutoModelForCausalLM.from_config(config).eval()


def mamba() -> transformers.PreTrainedModel:
    config = transformers.MambaConfig(hidden_size=16, state_size=4, num_hidden_layers=1, **COMMON)
    return transformers.AutoModelForCausalLM.from_config(config).eval()


def recurrent() -> transformers.PreTrainedModel:
    config = transformers.RwkvConfig(hidden_size=16, attention_hidden_size=16, num_hidden_layers=2, **COMMON)
    return transformers.AutoModelForCausalLM.from_config(config).eval()


def convolution() -> transformers.PreTrainedModel:
    config = transformers.Lfm2Config(
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        intermediate_size=48,
        layer_types=["conv", "full_attention"],
        **COMMON,
    )
    return transformers.AutoModelForCausalLM.from_config(config).eval()


def other_window() -> transformers.PreTrainedModel:
    """A model whose own mask is not the one that its configuration tells."""
    model = random_model("llama", 0)
    model.config.sliding_window = 4
    return model


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (linear, "has layers of kind linear_attention"),
        (convolution, "has layers of kind conv"),
        (mamba, "has layers of kind linear_attention"),
        (recurrent, "a trial differs"),
        (longrope, "above 100 tokens, and model.context is 200"),
        (dynamic_by_kind, "above 64 tokens, and model.context is 200"),
        (alibi, "a trial"),
        (other_window, "a trial differs"),
    ],
)
def test_models_that_would_be_decoded_wrongly_are_refused(make, says):
    with pytest.raises(
        ConfigError, match=f"model 'their/model' cannot be sampled by engine.kind hf: .*{says}"
    ) as error:
        check_decodable(engine_config(Path("their/model")), make())
    assert error.value.hint == "set engine.kind to vllm or sglang"


def test_rotary_positions_that_change_beyond_the_context_are_no_obstacle():
    check_decodable(engine_config(Path("their/model"), context=100), longrope())


async def test_the_engine_refuses_such_a_model_at_its_start(tmp_path):
    mamba().save_pretrained(tmp_path)
    for attention, says, hint in (
        ("sdpa", "does not support an attention implementation", "engine.attention to eager, or engine.kind to vllm"),
        ("eager", "has layers of kind linear_attention", "engine.kind to vllm or sglang"),
    ):
        engine = HfEngine(engine_config(tmp_path, attention=attention), seed=0)
        with pytest.raises(ConfigError, match=says) as error:
            await engine.start()
        assert hint in error.value.hint
        await engine.close()


@KINDS
def test_a_model_that_is_decoded_rightly_is_left_as_it_was(kind):
    model = random_model(kind, 0)
    before = model.config.to_dict()
    check_decodable(engine_config(Path(kind)), model)
    assert model.config.to_dict() == before


def test_a_model_that_is_not_there(tmp_path):
    with pytest.raises(ConfigError, match="nowhere"):
        load_model(engine_config(tmp_path / "nowhere"))
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "no such thing"}))
    with pytest.raises(ConfigError, match=str(tmp_path)):
        load_model(engine_config(tmp_path))


def test_a_model_without_some_of_its_weights_is_refused(tmp_path):
    model = random_model("llama", 0)
    state = {name: tensor for name, tensor in model.state_dict().items() if "layers.1.mlp.up" not in name}
    model.save_pretrained(tmp_path, state_dict=state)
    with pytest.raises(ConfigError, match=r"layers\.1\.mlp\.up"):
        load_model(engine_config(tmp_path))


async def test_a_start_that_fails_raises_and_close_works(tmp_path):
    engine = HfEngine(engine_config(tmp_path / "nowhere"), seed=0)
    with pytest.raises(ConfigError):
        await engine.start()
    await engine.close()


async def test_close_after_a_cancelled_start_leaves_no_thread(model_dir):
    engine = HfEngine(engine_config(model_dir("qwen2")), seed=0)
    task = asyncio.create_task(engine.start())
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await engine.close()
    assert engine._decoder is not None
    assert not engine._decoder._thread.is_alive()


def test_stop_tokens_and_context(model_dir):
    model = random_model("qwen2", 0)
    assert stop_tokens(model.generation_config, model.config) == {2}
    model.generation_config.eos_token_id = [2, 5]
    assert stop_tokens(model.generation_config, model.config) == {2, 5}
    model.generation_config.eos_token_id = None
    assert stop_tokens(model.generation_config, model.config) == {2}
    model.config.eos_token_id = None
    assert stop_tokens(model.generation_config, model.config) == stop_tokens(None, model.config) == frozenset()
    assert context_length(engine_config(model_dir("qwen2"), context=100), model) == 100
    assert context_length(engine_config(model_dir("qwen2"), context=1000), model) == 256
