"""Real vLLM servers that generate with quantised weights, which change while they do."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
import torch

from streamrl.config import Quantize, RunConfig
from streamrl.engine import Completion
from streamrl.servers.check import connect
from streamrl.weight_sync.quantize import quantise, quantise_all
from streamrl.weight_sync.tensors import Version
from tests.engines import tiny
from tests.engines.conformance_kit import LONG, prompt, run_config, spans, write_version
from tests.engines.server_kit import Live, served

pytestmark = [
    pytest.mark.engines,
    pytest.mark.slow,
    pytest.mark.timeout(600),
    pytest.mark.asyncio(loop_scope="module"),
]

CLOSE = {"int8": 0.06, "fp8_channel": 0.1}
"""To the same arithmetic by transformers in float32. A value may be rounded up and not down: in FP8 by a sixteenth."""
TRAINED = 0.2  # to the learner's model, whose weights and activations have all their bits
MEAN = 0.05


class World:
    """One server, and for each of its versions what the learner has and what 8 bits make of that.

    On a CPU without VNNI the weights of an int8 layer have 7.
    """

    def __init__(self, kind: Quantize, folder: Path, config: RunConfig, live: Live) -> None:
        self.kind, self.folder, self.config, self.live = kind, folder, config, live
        self.trained: dict[int, Any] = {}
        self.quantised: dict[int, dict[int, Any]] = {8: {}, **({7: {}} if kind == "int8" else {})}

    def write(self, number: int, kind: Quantize | None = None) -> Version:
        weights = tiny.random_weights(number)
        self.trained[number] = tiny.build(weights)
        for bits, models in self.quantised.items():
            models[number] = tiny.build(weights)
            for name, layer in models[number].named_modules():
                if name.endswith("_proj"):
                    layer.weight.data = self._rounded(layer.weight.data, bits)
                    layer.register_forward_pre_hook(self._round_input)
        tensors = dict(quantise_all(kind or self.kind, weights.items()))
        return write_version(self.folder / f"written {number} {kind}", number, tensors)

    def _round_input(self, _: Any, inputs: tuple[torch.Tensor, ...]) -> torch.Tensor:
        (tokens,) = inputs
        return self._rounded(tokens.flatten(0, -2)).view_as(tokens)

    def _rounded(self, rows: torch.Tensor, bits: int = 8) -> torch.Tensor:
        values, scales = quantise(self.kind, rows)
        return (values.float() if bits == 8 else (values / 2).round() * 2) * scales

    def check(self, asked: list[int], one: Completion) -> None:
        assert min(tiny.worst_error(models, asked, one) for models in self.quantised.values()) < CLOSE[self.kind]


@pytest_asyncio.fixture(loop_scope="module", scope="module", params=["int8", "fp8_channel"])
async def world(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[World]:
    folder = tmp_path_factory.mktemp(request.param)
    plain = run_config("vllm", folder, kv_cache="256MiB")
    config = plain.model_copy(update={"weights": plain.weights.model_copy(update={"quantize": request.param})})
    async with served(config, folder) as live:
        yield World(request.param, folder, config, live)


async def test_it_can_be_tried_before_it_has_any_weights(world: World) -> None:
    limits = await connect(world.live.client, world.live.dialect, world.config, external=False)
    assert limits.context == tiny.CONTEXT


async def test_versions_change_in_flight_and_each_token_is_of_the_one_that_it_names(world: World) -> None:
    first, second = world.write(1), world.write(2)
    await world.live.apply(first)
    task, heard = await world.live.begin(prompt(0, 40), LONG, 1, name="long")
    await world.live.apply(second)
    await heard.at_least(len(heard.tokens) + 40)
    await world.live.calls(world.live.dialect.abort("long"))
    later = [await world.live.generate(prompt(seed, 40), 40, 2) for seed in (1, 2)]
    done = [(prompt(0, 40), await task), *((prompt(seed, 40), one) for seed, one in enumerate(later, 1))]
    assert [version for _, _, version in spans(done[0][1])] == [1, 2]
    assert all(one.runs == [(0, 2)] for one in later)
    for asked, one in done:
        world.check(asked, one)
        gap = (tiny.judged_logprobs(world.trained, asked, one) - torch.from_numpy(one.logprobs.copy())).abs()
        assert gap.max() < TRAINED
        assert 0.002 < gap.mean() < MEAN  # not the weights as they are trained


async def test_a_version_of_another_kind_is_refused_and_the_server_keeps_its_own(world: World) -> None:
    await world.live.apply(world.write(3))
    other: Quantize = "fp8_channel" if world.kind == "int8" else "int8"
    tensors = dict(quantise_all(world.kind, tiny.random_weights(4).items()))
    del tensors["model.layers.1.mlp.down_proj.weight_scale"]
    bad = {
        "flags of the run": world.write(4, other),
        "unquantised weights": write_version(world.folder / "plain", 4, tiny.random_weights(4)),
        "weight_scale is not covered": write_version(world.folder / "part", 4, tensors),
    }
    for words, version in bad.items():
        assert words in str(await world.live.prefetch(version))
    done = await world.live.generate(prompt(5, 40), 40, 3)
    assert done.runs == [(0, 3)]
    world.check(prompt(5, 40), done)
