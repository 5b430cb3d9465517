"""Weights that must not be taken change nothing."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from streamrl.errors import WeightsError
from tests.engines import tiny
from tests.engines.conformance_kit import INTERVAL, Bench, prompt, write_version

pytestmark = [
    pytest.mark.engines,
    pytest.mark.slow,
    pytest.mark.timeout(600),
    pytest.mark.asyncio(loop_scope="session"),
]

Weights = dict[str, torch.Tensor]
SERVERS = pytest.mark.parametrize("running", ["vllm", "sglang"], indirect=True)
UP = "model.layers.1.mlp.up_proj.weight"


def unknown(weights: Weights) -> None:
    weights["model.layers.1.mlp.sideways_proj.weight"] = weights[UP].clone()


def missing(weights: Weights) -> None:
    del weights[UP]


def too_large(weights: Weights) -> None:
    weights[UP] = torch.cat([weights[UP], weights[UP]])


def too_small(weights: Weights) -> None:
    weights[UP] = weights[UP][:100].contiguous()


@pytest.mark.parametrize("spoil", [unknown, missing, too_large, too_small], ids=lambda spoil: spoil.__name__)
async def test_weights_that_do_not_fit_change_nothing(bench: Bench, spoil: Callable[[Weights], None], tmp_path: Path):
    before, tokens = bench.number, prompt(1)
    task, heard = bench.begin(tokens, 200)
    await heard.at_least(INTERVAL)
    weights = tiny.random_weights(99)
    spoil(weights)
    with pytest.raises(WeightsError):
        await bench.engine.apply(write_version(tmp_path, max(bench.models) + 1, weights))
    done = await task
    assert (done.finish, bench.judge(tokens, done)) == ("length", [(0, 200, before)])
    assert bench.judge(tokens, await bench.generate(tokens, 16)) == [(0, 16, before)]
    after = await bench.apply()
    assert bench.judge(tokens, await bench.generate(tokens, 16)) == [(0, 16, after)]


@SERVERS
@pytest.mark.parametrize("damage", ["cut", "gone", "no safetensors"])
async def test_a_corrupt_shard_changes_nothing(bench: Bench, damage: str, tmp_path: Path):
    before, tokens = bench.number, prompt(2)
    version = write_version(tmp_path, max(bench.models) + 1, tiny.random_weights(99))
    assert version.folder is not None
    shard = version.folder / version.files[1]
    whole = shard.read_bytes()
    shard.unlink()  # a new file: this process has the old one mapped
    if damage != "gone":
        shard.write_bytes(whole[:-10] if damage == "cut" else b"\xff" * len(whole))
    with pytest.raises(WeightsError):
        await bench.engine.apply(version)
    assert bench.judge(tokens, await bench.generate(tokens, 16)) == [(0, 16, before)]
    after = await bench.apply()
    assert bench.judge(tokens, await bench.generate(tokens, 16)) == [(0, 16, after)]


@pytest.mark.parametrize("running", ["hf"], indirect=True)
async def test_an_older_version_is_refused_and_the_same_again_does_nothing(bench: Bench, tmp_path: Path):
    await bench.engine.apply(write_version(tmp_path / "same", bench.number, bench.weights[bench.number]))
    with pytest.raises(WeightsError):
        await bench.engine.apply(write_version(tmp_path / "old", bench.number - 1, bench.weights[bench.number - 1]))
    tokens = prompt(3)
    assert bench.judge(tokens, await bench.generate(tokens, 16)) == [(0, 16, bench.number)]
