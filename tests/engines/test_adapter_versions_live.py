"""Versions that are an adapter at real servers, which were started for a run with `publish: adapter`."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest
import pytest_asyncio
import torch
from streamrl.producers.group.server import ServerEngine

from streamrl.errors import WeightsError
from streamrl.servers.kinds import make_dialect
from streamrl.weight_sync.adapter import adapted, merge, names_of
from streamrl.weight_sync.manifest import Adapter
from streamrl.weight_sync.tensors import Version
from tests.engines import tiny
from tests.engines.conformance_kit import BF16, INTERVAL, LORA, Bench, prompt

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
            tensors[names.low] = (0.1 * torch.randn(RANK, weight.shape[1], generator=generator)).bfloat16()
            tensors[names.high] = (0.1 * torch.randn(weight.shape[0], RANK, generator=generator)).bfloat16()
    return Version((1, number), number, tensors, adapter=ABOUT)


def judge(base: dict[str, torch.Tensor], version: Version) -> object:
    """The base with the adapter merged in, in float32."""
    weights = {name: tensor.float() for name, tensor in base.items()}
    for module, names in adapted(ABOUT, version.tensors).items():
        low, high = version.tensors[names.low], version.tensors[names.high]
        weights[f"{module}.weight"] = merge(base[f"{module}.weight"], low, high, scale=ABOUT.scale)
    return tiny.build(weights)


@pytest_asyncio.fixture(loop_scope="session")
async def adapting(bench: Bench) -> AsyncIterator[Bench]:
    """A second engine at the server, for which the weights in force are those of `model.path`."""
    engine = ServerEngine(make_dialect(bench.config), bench.config, url=bench.url, adapters=bench.folder / "adapters")
    await engine.start()
    try:
        yield Bench(bench.kind, bench.config, bench.folder, engine)
    finally:
        await engine.close()


async def test_responses_are_sampled_by_the_adapter_that_they_began_with(bench: Bench, adapting: Bench):
    engine, tokens, versions = adapting.engine, prompt(1), {number: adapter(number) for number in range(1, 7)}
    adapting.models = {number: judge(bench.weights[bench.number], version) for number, version in versions.items()}
    await engine.apply(versions[1])
    begun = adapting.begin(tokens)
    await begun[1].at_least(2 * INTERVAL)
    for number in range(2, 7):
        await engine.apply(versions[number])
        assert engine.load().version == number
        done = await adapting.generate(tokens, 24)
        assert adapting.judge(tokens, done) == [(0, 24, number)]
        assert tiny.worst_error({number: adapting.models[number - 1]}, tokens, done) > 2 * BF16
    assert engine._controls is not None
    assert len(engine._controls._adapters) == 2  # the newest, and that of the long response
    response = await adapting.end(begun)
    assert response.runs == [(0, 1)]
    adapting.judge(tokens, response)


async def test_an_adapter_that_the_server_cannot_take_is_refused_with_a_way_out(adapting: Bench):
    good = adapter(9)
    large = Adapter(base="model", rank=100, alpha=LORA["alpha"], targets=TARGETS)
    tensors = {
        name: torch.zeros([100 if size == RANK else size for size in tensor.shape]).bfloat16()
        for name, tensor in good.tensors.items()
    }
    with pytest.raises(WeightsError) as caught:
        await adapting.engine.apply(Version((1, 9), 9, tensors, adapter=large))
    assert "merged" in caught.value.hint
    await adapting.engine.apply(adapter(10))
    assert (await adapting.generate(prompt(2), 8)).runs == [(0, 10)]
