"""Versions that are an adapter at a real vLLM and a real SGLang, which a run with `publish: adapter` starts."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import numpy as np
import pytest
import pytest_asyncio
import torch

from streamrl.config import RunConfig
from streamrl.engine import Request
from streamrl.errors import WeightsError
from streamrl.producers import tiny
from streamrl.producers.group.server import ServerEngine
from streamrl.servers.kinds import make_dialect
from streamrl.servers.process import ManagedServer, ServerSettings
from streamrl.weight_sync.adapter import adapted, merge, names_of
from streamrl.weight_sync.manifest import Adapter
from streamrl.weight_sync.tensors import Version
from tests.engines.conformance_kit import BF16, Heard, prompt, run_config

pytestmark = [
    pytest.mark.engines,
    pytest.mark.slow,
    pytest.mark.timeout(400),
    pytest.mark.asyncio(loop_scope="module"),
]
RANK, ALPHA = 4, 8.0
TARGETS = ["gate_proj", "k_proj", "q_proj", "up_proj", "v_proj"]
ABOUT = Adapter(base="model", rank=RANK, alpha=ALPHA, targets=TARGETS)
BASE = tiny.random_weights(0)
LONG = 15000


def adapter(number: int) -> Version:
    generator = torch.Generator().manual_seed(number)
    tensors = {}
    for name, weight in BASE.items():
        module = name.removesuffix(".weight")
        if module.endswith(tuple(TARGETS)):
            names = names_of(module, dora=False)
            tensors[names.low] = (0.1 * torch.randn(RANK, weight.shape[1], generator=generator)).bfloat16()
            tensors[names.high] = (0.1 * torch.randn(weight.shape[0], RANK, generator=generator)).bfloat16()
    return Version((1, number), number, tensors, adapter=ABOUT)


def judge(version: Version) -> object:
    """The base with the adapter merged in, in float32."""
    weights = {name: tensor.float() for name, tensor in BASE.items()}
    for module, names in adapted(ABOUT, version.tensors).items():
        low, high = version.tensors[names.low], version.tensors[names.high]
        weights[f"{module}.weight"] = merge(BASE[f"{module}.weight"], low, high, scale=ABOUT.scale)
    return tiny.build(weights)


@pytest_asyncio.fixture(scope="module", loop_scope="module", params=["vllm", "sglang"])
async def engine(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[ServerEngine]:
    folder = tmp_path_factory.mktemp(request.param)
    settings = run_config(request.param, folder, flags={}).model_dump()
    settings["learner"]["lora"] |= {"rank": RANK, "alpha": ALPHA, "publish": "adapter"}
    config = RunConfig.model_validate(settings)
    dialect = make_dialect(config)
    server = ManagedServer(dialect, ServerSettings.of_engine(config), folder, "rollout.0.server0", seed=3)
    started = ServerEngine(dialect, config, server=server, adapters=folder / "adapters")
    try:
        await started.start()
        yield started
    finally:
        await started.close()


async def test_responses_are_sampled_by_the_adapter_that_they_began_with(engine: ServerEngine):
    versions = {number: adapter(number) for number in range(1, 7)}
    models = {number: judge(version) for number, version in versions.items()}
    await engine.apply(versions[1])
    heard = Heard()
    long = asyncio.create_task(engine.generate(Request("long", prompt_of(1), LONG), heard))
    await heard.at_least(8)
    for number in range(2, 7):
        await engine.apply(versions[number])
        assert engine.load().version == number
        done = await engine.generate(Request(f"r{number}", prompt_of(1), 24))
        assert done.runs == [(0, number)]
        assert tiny.worst_error(models, prompt(1), done) < BF16
        assert tiny.worst_error({number: models[number - 1]}, prompt(1), done) > 2 * BF16
    assert engine._controls is not None
    assert len(engine._controls.adapters) == 2  # the newest, and that of the long response
    assert await engine.abort("long") == 1
    response = await long
    assert (response.runs, response.finish) == ([(0, 1)], "abort")
    assert tiny.worst_error(models, prompt(1), response) < BF16


async def test_an_adapter_that_the_server_cannot_take_is_refused_with_a_way_out(engine: ServerEngine):
    good = adapter(9)
    large = Adapter(base="model", rank=100, alpha=ALPHA, targets=TARGETS)
    tensors = {
        name: torch.zeros([100 if size == RANK else size for size in tensor.shape]).bfloat16()
        for name, tensor in good.tensors.items()
    }
    with pytest.raises(WeightsError) as caught:
        await engine.apply(Version((1, 9), 9, tensors, adapter=large))
    assert "merged" in caught.value.hint
    await engine.apply(adapter(10))
    assert (await engine.generate(Request("after", prompt_of(2), 8))).runs == [(0, 10)]


def prompt_of(seed: int) -> np.ndarray:
    return np.asarray(prompt(seed), np.int32)
