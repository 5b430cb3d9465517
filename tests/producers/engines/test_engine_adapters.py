"""The Hugging Face engine under versions that are an adapter: merged into its first weights, exactly, always anew."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest
import torch
from engine_kit import gated, held, named, random_model, replay, request, versions
from peft import LoraConfig, PeftModel, get_peft_model

from streamrl.errors import WeightsError
from streamrl.weight_sync.adapter import names_of, write_adapter
from streamrl.weight_sync.manifest import Adapter
from streamrl.weight_sync.tensors import Version

PROMPT = [3, 7, 5]
TARGETS = ["q_proj", "down_proj"]


def about(**changes):
    return Adapter(**{"base": "model", "rank": 2, "alpha": 3.0, "targets": TARGETS, "dora": False, **changes})


def adapter(number, *, dora=False, scale=0.3):
    generator = torch.Generator().manual_seed(number)
    tensors = {}
    for name, weight in named(random_model("qwen2", 0)).items():
        module = name.removesuffix(".weight")
        if not module.endswith(tuple(TARGETS)) or module == name:
            continue
        names = names_of(module, dora=dora)
        tensors[names.low] = scale * torch.randn(2, weight.shape[1], generator=generator)
        tensors[names.high] = scale * torch.randn(weight.shape[0], 2, generator=generator)
        if names.magnitude is not None:
            tensors[names.magnitude] = weight.norm(dim=1) * (1 + scale * torch.rand(len(weight), generator=generator))
    return Version((1, number), number, tensors, adapter=about(dora=dora))


def merged(version, folder):
    """By peft alone."""
    write_adapter(folder / str(version.number), version.adapter, version.tensors)
    return PeftModel.from_pretrained(random_model("qwen2", 0), folder / str(version.number)).merge_and_unload().eval()


@pytest.mark.parametrize("dora", [False, True])
async def test_spans_are_exact_when_the_adapter_changes_in_mid_response(start, tmp_path, dora):
    engine = await start()
    found = {number: adapter(number, dora=dora) for number in (1, 2)}
    await engine.apply(found[1])
    async with gated(engine) as gate:
        task = asyncio.create_task(engine.generate(request("a", PROMPT, 12)))
        await gate.passed(5)
        await gate.during(engine.apply(found[2]))
    done = await task
    assert set(versions(done)) == {1, 2}
    models = {number: merged(version, tmp_path) for number, version in found.items()}
    np.testing.assert_allclose(done.logprobs, replay(models, PROMPT, done), atol=1e-4)


async def test_nothing_adds_up_over_many_versions(start):
    engine, fresh = await start(), await start()
    for number in range(1, 40):
        await engine.apply(adapter(number))
    await fresh.apply(adapter(39))
    ours, theirs = named(engine._model), named(fresh._model)
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)
    zero = adapter(40)
    await engine.apply(
        Version((1, 40), 40, {name: torch.zeros_like(tensor) for name, tensor in zero.tensors.items()}, adapter=about())
    )
    base = named(random_model("qwen2", 0))
    assert all(torch.equal(named(engine._model)[name], base[name]) for name in base)


@pytest.mark.parametrize(
    ("change", "match"),
    [
        (lambda tensors: tensors.popitem(), "no whole LoRA adapter"),
        (lambda tensors: tensors.update({"odd": torch.zeros(1)}), "odd"),
        (lambda tensors: tensors.update({name: torch.zeros(3, 3) for name in list(tensors)[:1]}), "model wants"),
        (
            lambda tensors: tensors.update(
                {name.replace("q_proj", "nothing"): tensors.pop(name) for name in list(tensors)}
            ),
            "not a linear layer",
        ),
    ],
)
async def test_an_adapter_that_does_not_fit_is_refused_and_the_old_one_stays(start, change, match):
    engine = await start()
    await engine.apply(adapter(1))
    before = {name: tensor.clone() for name, tensor in named(engine._model).items()}
    broken = adapter(2)
    tensors = dict(broken.tensors)
    change(tensors)
    with pytest.raises(WeightsError, match=match):
        await engine.apply(Version((1, 2), 2, tensors, adapter=broken.adapter))
    assert all(torch.equal(tensor, before[name]) for name, tensor in named(engine._model).items())
    assert engine.load().version == 1


async def test_other_modules_than_before_and_other_weights_than_the_first_are_refused(start):
    engine = await start()
    await engine.apply(adapter(1))
    fewer = adapter(2)
    tensors = {name: tensor for name, tensor in fewer.tensors.items() if "q_proj" in name}
    with pytest.raises(WeightsError, match="other modules"):
        await engine.apply(Version((1, 2), 2, tensors, adapter=fewer.adapter))
    await engine.apply(held((1, 3), named(random_model("qwen2", 5))))
    with pytest.raises(WeightsError, match="whole weights before"):
        await engine.apply(adapter(4))


def test_our_names_are_pefts(tmp_path):
    model = get_peft_model(
        random_model("qwen2", 0), LoraConfig(r=2, lora_alpha=3, target_modules=TARGETS, use_dora=True)
    )
    model.save_pretrained(tmp_path)
    from safetensors import safe_open

    with safe_open(tmp_path / "adapter_model.safetensors", framework="pt") as file:
        assert set(file.keys()) == set(adapter(1, dora=True).tensors)
