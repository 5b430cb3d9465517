"""Versions that are an adapter at real servers, which were started for a run with `publish: adapter`."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest
import pytest_asyncio
import torch

from streamrl.errors import WeightsError
from streamrl.servers.launch import adapters_in_flight
from streamrl.weight_sync.adapter import adapted, merge, names_of
from streamrl.weight_sync.manifest import Adapter
from streamrl.weight_sync.tensors import Version
from tests.engines import tiny
from tests.engines.conformance_kit import BF16, INTERVAL, LORA, Bench, HeardServer, prompt, run_config

pytestmark = [
    pytest.mark.engines,
    pytest.mark.slow,
    pytest.mark.timeout(600),
    pytest.mark.asyncio(loop_scope="session"),
    pytest.mark.parametrize("running", ["vllm", "sglang"], indirect=True),
]
RANK = LORA["rank"]
TARGETS = ["gate_proj", "k_proj", "q_proj", "up_proj", "v_proj"]
ABOUT = Adapter(base="model", rank=RANK, alpha=LORA["alpha"], targets=TARGETS)


def adapter(number: int) -> Version:
    generator = torch.Generator().manual_seed(number)
    tensors = {}
    for name, weight in tiny.random_weights(0).items():
        module = name.removesuffix(".weight")
        if module.endswith(tuple(TARGETS)):
            names = names_of(module, dora=False)
            tensors[names.lora_a] = (0.1 * torch.randn(RANK, weight.shape[1], generator=generator)).bfloat16()
            tensors[names.lora_b] = (0.1 * torch.randn(weight.shape[0], RANK, generator=generator)).bfloat16()
    return Version((1, number), number, tensors, adapter=ABOUT)


def judge(base: dict[str, torch.Tensor], version: Version) -> object:
    """The base with the adapter merged in, in float32."""
    weights = {name: tensor.float() for name, tensor in base.items()}
    for module, names in adapted(ABOUT, version.tensors).items():
        lora_a, lora_b = version.tensors[names.lora_a], version.tensors[names.lora_b]
        weights[f"{module}.weight"] = merge(base[f"{module}.weight"], lora_a, lora_b, scale=ABOUT.scale)
    return tiny.build(weights)


@pytest_asyncio.fixture(loop_scope="session")
async def adapting(bench: Bench) -> AsyncIterator[Bench]:
    """A second life of the role at the server, for which the weights in force are those of `model.path`."""
    config = run_config(bench.kind, bench.folder, lora=LORA, url=[bench.url])
    async with HeardServer(config, bench.folder, "engine.0", seed=1) as server:
        yield Bench(bench.kind, config, bench.folder, server)


async def test_responses_are_sampled_by_the_adapter_that_they_began_with(bench: Bench, adapting: Bench):
    server, tokens, versions = adapting.server, prompt(1), {number: adapter(number) for number in range(1, 7)}
    adapting.models = {number: judge(bench.weights[bench.number], version) for number, version in versions.items()}
    last = 1
    await server.apply(versions[last])
    at_once = adapters_in_flight(adapting.config.max_staleness)
    for first in range(1, 6, at_once - 1):
        begun = adapting.begin(tokens)
        await begun[1].at_least(2 * INTERVAL)
        for _ in range(min(at_once - 1, 6 - last)):
            last += 1
            await server.apply(versions[last])
            assert (server.control.pair[1], server.control.step) == (last, last)
            done = await adapting.generate(tokens, 24)
            assert adapting.judge(tokens, done) == [(0, 24, last)]
            assert tiny.worst_error({last: adapting.models[last - 1]}, tokens, done) > 2 * BF16
        response = await adapting.end(begun)
        adapting.judge(tokens, response)
        assert response.runs == [(0, first)]
    assert len(server.control._adapters) == 6, "they stay for long: a request may wait at the server"


async def test_an_adapter_that_the_server_cannot_take_is_refused_with_a_way_out(adapting: Bench):
    good = adapter(9)
    large = Adapter(base="model", rank=100, alpha=LORA["alpha"], targets=TARGETS)
    tensors = {
        name: torch.zeros([100 if size == RANK else size for size in tensor.shape]).bfloat16()
        for name, tensor in good.tensors.items()
    }
    with pytest.raises(WeightsError) as caught:
        await adapting.server.apply(Version((1, 9), 9, tensors, adapter=large))
    assert "merged" in caught.value.hint
    await adapting.server.apply(adapter(10))
    assert (await adapting.generate(prompt(2), 8)).runs == [(0, 10)]
