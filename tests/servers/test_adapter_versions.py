"""Versions that are an adapter, at a server that loads them beside its weights: names, files, who samples with what."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import load_file
from toy import Toy
from toy_kit import ask, bodies, control_on, version

from streamrl.errors import WeightsError
from streamrl.weight_sync.adapter import names_of
from streamrl.weight_sync.manifest import Adapter
from streamrl.weight_sync.tensors import Version

pytestmark = pytest.mark.usefixtures("short_pauses")
ABOUT = Adapter(base="model", rank=2, alpha=4.0, targets=["q_proj"])
NAMES = names_of("model.layers.0.self_attn.q_proj", dora=False)


def adapter(number):
    values = torch.full((2, 8), float(number))
    return Version((1, number), number, {NAMES.lora_a: values, NAMES.lora_b: values.T.contiguous()}, adapter=ABOUT)


async def test_each_request_keeps_the_adapter_that_it_began_with(tmp_path):
    toy = Toy(free=False)
    async with control_on(toy, tmp_path / "adapters") as controlled:
        await controlled.control.apply(adapter(3))
        old = ask(controlled)
        await toy.started(1)
        await toy.step(2)
        await controlled.control.apply(adapter(4))
        new = ask(controlled, "b")
        await toy.started(2)
        await toy.step(6)
        assert (await old).runs == [(0, 3)]
        assert (await new).runs == [(0, 4)]
        assert (controlled.control.pair, controlled.control.step) == ((1, 4), 4)
        loaded = [body["name"] for body in bodies(toy, "/adapters")]
        assert [body["adapter"] for body in bodies(toy, "/generate")] == loaded
        assert [name.rpartition("-")[2] for name in loaded] == ["3", "4"]
        assert not bodies(toy, "/pause")
        assert not bodies(toy, "/update")


async def test_the_oldest_adapters_are_unloaded_and_all_at_the_end(tmp_path):
    toy = Toy()
    async with control_on(toy, tmp_path / "adapters", attached=True) as controlled:
        for number in range(1, 15):
            await controlled.control.apply(adapter(number))
        names = [body["name"] for body in bodies(toy, "/adapters") if "name" in body]
        dropped = [body["drop"] for body in bodies(toy, "/adapters") if "drop" in body]
        assert dropped == names[:2], "four times as many are kept as may be in use"
        assert {path.name for path in (tmp_path / "adapters").iterdir()} == set(names[2:])
    assert [body["drop"] for body in bodies(toy, "/adapters") if "drop" in body] == names
    assert not (tmp_path / "adapters").exists()


async def test_what_the_server_reads_is_what_peft_writes(tmp_path):
    toy = Toy()
    async with control_on(toy, tmp_path / "adapters") as controlled:
        await controlled.control.apply(adapter(5))
        (folder,) = (tmp_path / "adapters").iterdir()
        held = load_file(folder / "adapter_model.safetensors")
        assert {name: tensor[0, 0].item() for name, tensor in held.items()} == {NAMES.lora_a: 5.0, NAMES.lora_b: 5.0}
        said = json.loads((folder / "adapter_config.json").read_bytes())
        assert (said["r"], said["lora_alpha"], said["target_modules"]) == (2, 4.0, ["q_proj"])
        assert said["peft_type"] == "LORA"


@pytest.mark.parametrize("fault", [400, 404, 500])
async def test_a_refused_adapter_leaves_the_one_before(tmp_path, fault):
    toy = Toy()
    async with control_on(toy, tmp_path / "adapters") as controlled:
        control = controlled.control
        await control.apply(adapter(1))
        before = control.adapter
        toy.faults["/adapters"] = [fault]
        with pytest.raises(WeightsError, match="refused") as caught:
            await control.apply(adapter(2))
        assert "merged" in caught.value.hint
        assert (control.adapter, control.pair) == (before, (1, 1))
        await control.apply(adapter(2))
        assert control.pair == (1, 2)


async def test_whole_weights_after_an_adapter_are_sampled_alone(tmp_path):
    toy = Toy()
    async with control_on(toy, tmp_path / "adapters") as controlled:
        await controlled.control.apply(adapter(1))
        await controlled.control.apply(version(2))
        assert (await ask(controlled)).runs == [(0, 2)]
        assert bodies(toy, "/generate")[-1]["adapter"] is None
