"""LoRA adapters on a real SGLang server: loaded, swapped for the next version, unloaded, and under new weights."""

from __future__ import annotations

import asyncio

import numpy as np
import orjson
import pytest
import torch
from safetensors.torch import save_file

from tests.engines.sglang_kit import (
    Answer,
    config,
    heard_at_least,
    plain,
    request,
    save_model,
    serve,
    tiny,
    version,
    weights,
)

pytestmark = [pytest.mark.engines, pytest.mark.slow, pytest.mark.timeout(600)]

PROMPT = [5, 9, 33, 70, 12, 8, 101, 64, 77, 20]
BF16 = 0.02
RANK, ALPHA = 4, 8
MATRICES = ("q_proj", "k_proj", "v_proj", "down_proj")  # SGLang cannot load an adapter of a part of a fused matrix
FLAGS = {
    "enable-lora": True,
    "max-lora-rank": 8,
    "lora-target-modules": "all",
    "lora-backend": "torch_native",
    "max-loras-per-batch": 3,
}


@pytest.fixture(scope="module")
def live(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    save_model(tiny(0), folder)
    settings = config(folder, flags=FLAGS)
    with serve(settings, folder, tmp_path_factory.mktemp("log") / "server.log") as live:
        yield live


def adapted(seed, folder, base):
    """Write an adapter and return the model that it makes of `base`."""
    folder.mkdir()
    model = tiny(base)
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for name, module in model.named_modules():
        if name.endswith(MATRICES):
            a = (torch.randn(RANK, module.in_features, generator=generator) * 0.1).to(torch.bfloat16)
            b = (torch.randn(module.out_features, RANK, generator=generator) * 0.1).to(torch.bfloat16)
            tensors[f"base_model.model.{name}.lora_A.weight"] = a
            tensors[f"base_model.model.{name}.lora_B.weight"] = b
            module.weight.data = (module.weight.float() + ALPHA / RANK * (b.float() @ a.float())).to(torch.bfloat16)
    save_file(tensors, folder / "adapter_model.safetensors")
    settings = {
        "peft_type": "LORA",
        "r": RANK,
        "lora_alpha": ALPHA,
        "target_modules": list(MATRICES),
        "bias": "none",
        "task_type": "CAUSAL_LM",
    }
    (folder / "adapter_config.json").write_bytes(orjson.dumps(settings))
    return model


def error(model, done):
    return np.abs(done.logprobs - plain(model, PROMPT, done.tokens.tolist())).max()


async def test_adapters_are_swapped_while_others_generate(live, tmp_path):
    bare = await live.generate(request("bare", PROMPT))
    assert error(tiny(0), bare) < BF16
    first, second = adapted(1, tmp_path / "v1", 0), adapted(2, tmp_path / "v2", 0)
    await live.call(live.dialect.load_adapter("pol@1", tmp_path / "v1"))
    one = await live.generate(request("one", PROMPT, adapter="pol@1"))
    assert error(first, one) < BF16
    assert error(tiny(0), one) > 5 * BF16
    heard: list[int] = []
    running = asyncio.create_task(live.generate(request("running", PROMPT, 300, adapter="pol@1"), 0, heard))
    await heard_at_least(heard, 4)
    await live.call(live.dialect.load_adapter("pol@2", tmp_path / "v2"))
    two, plainly = await asyncio.gather(
        live.generate(request("two", PROMPT, adapter="pol@2")), live.generate(request("none", PROMPT))
    )
    assert error(second, two) < BF16
    assert error(tiny(0), plainly) < BF16
    assert not running.done()
    assert error(first, await running) < BF16
    await live.call(live.dialect.unload_adapter("pol@1"))
    again = await live.generate(request("again", PROMPT, adapter="pol@2"))
    assert error(second, again) < BF16
    with pytest.raises(Answer):
        await live.call(live.dialect.load_adapter("pol@2", tmp_path / "v2"))
    await live.call(live.dialect.unload_adapter("pol@2"))


async def test_new_weights_reach_the_matrices_below_the_adapters(live, tmp_path):
    await live.apply(version(1, weights(tiny(1)), tmp_path / "weights"))
    bare = await live.generate(request("bare-new", PROMPT), 1)
    assert bare.runs == [(0, 1)]
    assert error(tiny(1), bare) < BF16
    model = adapted(3, tmp_path / "v3", 1)
    await live.call(live.dialect.load_adapter("pol@3", tmp_path / "v3"))
    assert error(model, await live.generate(request("three", PROMPT, adapter="pol@3"), 1)) < BF16
    lacking = {name: value for name, value in weights(tiny(0)).items() if "layers.1.mlp.up" not in name}
    with pytest.raises(Answer, match="missing"):
        await live.apply(version(2, lacking, tmp_path / "lacking"))
    assert error(tiny(1), await live.generate(request("still-new", PROMPT), 1)) < BF16
    await live.call(live.dialect.unload_adapter("pol@3"))


async def test_an_adapter_that_does_not_fit_is_refused_and_the_server_goes_on(live, tmp_path):
    adapted(4, tmp_path / "v4", 0)
    (tmp_path / "v4" / "adapter_model.safetensors").unlink()
    with pytest.raises(Answer):
        await live.call(live.dialect.load_adapter("pol@4", tmp_path / "v4"))
    assert (await live.generate(request("then", PROMPT, 5), 1)).finish == "length"
