"""Versions that are an adapter, at a server that loads them beside its weights: names, files, who samples with what."""

from __future__ import annotations

import asyncio
import json
from contextlib import asynccontextmanager

import pytest
import torch
from safetensors.torch import load_file
from test_server import config, request, version
from toy import Toy, make_dialect, serving

from streamrl import http
from streamrl.errors import WeightsError
from streamrl.producers.group.server import ServerEngine
from streamrl.weight_sync.adapter import names_of
from streamrl.weight_sync.manifest import Adapter
from streamrl.weight_sync.tensors import Version

ABOUT = Adapter(base="model", rank=2, alpha=4.0, targets=["q_proj"])
NAMES = names_of("model.layers.0.self_attn.q_proj", dora=False)


@pytest.fixture(autouse=True)
def short_pauses(monkeypatch):
    monkeypatch.setattr(http, "_FIRST_PAUSE", 0.01)


def adapter(number):
    values = torch.full((2, 8), float(number))
    return Version((1, number), number, {NAMES.low: values, NAMES.high: values.T.contiguous()}, adapter=ABOUT)


@asynccontextmanager
async def engine_on(toy, folder, dialect=None):
    async with serving(toy) as url:
        engine = ServerEngine(dialect or make_dialect(), config(), url=url, adapters=folder)
        try:
            await engine.start()
            toy.free = False
            yield engine
        finally:
            await engine.close()


def bodies(toy, path):
    return [body for where, body in toy.bodies if where == path]


async def test_each_request_keeps_the_adapter_that_it_began_with(tmp_path):
    toy = Toy()
    async with engine_on(toy, tmp_path / "adapters") as engine:
        await engine.apply(adapter(3))
        old = asyncio.create_task(engine.generate(request("a")))
        await toy.started(1)
        await toy.step(2)
        await engine.apply(adapter(4))
        new = asyncio.create_task(engine.generate(request("b")))
        await toy.started(2)
        await toy.step(6)
        assert (await old).runs == [(0, 3)]
        assert (await new).runs == [(0, 4)]
        assert engine.load().version == 4
        used = [body["adapter"] for body in bodies(toy, "/generate")[-2:]]
        loaded = [body["name"] for body in bodies(toy, "/adapters")]
        assert used == loaded
        assert [name.rpartition("-")[2] for name in loaded] == ["3", "4"]
        assert not bodies(toy, "/pause")
        assert not bodies(toy, "/update")


async def test_an_adapter_is_unloaded_when_no_request_uses_it_any_more(tmp_path):
    toy = Toy()
    async with engine_on(toy, tmp_path / "adapters") as engine:
        await engine.apply(adapter(1))
        task = asyncio.create_task(engine.generate(request("a")))
        await toy.started(1)
        for number in (2, 3):
            await engine.apply(adapter(number))
        first, second, third = (body["name"] for body in bodies(toy, "/adapters") if "name" in body)
        assert [body["drop"] for body in bodies(toy, "/adapters") if "drop" in body] == [second]
        assert {path.name for path in (tmp_path / "adapters").iterdir()} == {first, third}
        await toy.step(6)
        await task
        await engine.apply(adapter(4))
        assert {body["drop"] for body in bodies(toy, "/adapters") if "drop" in body} == {first, second, third}
    assert not (tmp_path / "adapters").exists()


async def test_what_the_server_reads_is_what_peft_writes(tmp_path):
    toy = Toy()
    async with engine_on(toy, tmp_path / "adapters") as engine:
        await engine.apply(adapter(5))
        (folder,) = (tmp_path / "adapters").iterdir()
        held = load_file(folder / "adapter_model.safetensors")
        assert {name: tensor[0, 0].item() for name, tensor in held.items()} == {NAMES.low: 5.0, NAMES.high: 5.0}
        said = json.loads((folder / "adapter_config.json").read_bytes())
        assert (said["r"], said["lora_alpha"], said["target_modules"]) == (2, 4.0, ["q_proj"])
        assert said["peft_type"] == "LORA"


@pytest.mark.parametrize(
    ("fault", "says", "hint"),
    [(400, "refused", "merged"), (500, "refused", "merged"), (404, "cannot serve adapters", "engines.md")],
)
async def test_a_refused_adapter_leaves_the_one_before(tmp_path, fault, says, hint):
    toy = Toy()
    async with engine_on(toy, tmp_path / "adapters") as engine:
        await engine.apply(adapter(1))
        toy.faults["/adapters"] = [fault]
        with pytest.raises(WeightsError, match=says) as caught:
            await engine.apply(adapter(2))
        assert hint in caught.value.hint
        assert engine.load().version == 1
        await engine.apply(adapter(2))
        assert engine.load().version == 2


async def test_an_adapter_does_not_fit_weights_that_came_later(tmp_path):
    toy = Toy()
    async with engine_on(toy, tmp_path / "adapters") as engine:
        await engine.apply(version(1))
        with pytest.raises(WeightsError, match="does not hold the weights it belongs to"):
            await engine.apply(adapter(2))


async def test_a_server_that_merges_by_itself_gets_it_like_any_version(tmp_path):
    toy, dialect = Toy(), make_dialect()
    dialect.merges = True
    async with engine_on(toy, tmp_path / "adapters", dialect) as engine:
        await engine.apply(adapter(1))
        assert [body["version"] for body in bodies(toy, "/update")] == [1]
        assert not bodies(toy, "/adapters")
