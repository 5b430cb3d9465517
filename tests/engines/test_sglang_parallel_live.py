"""A real SGLang server that spreads the model over two processes: weights reach both, or neither."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest

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


@pytest.fixture(scope="module")
def live(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    save_model(tiny(0), folder)
    with serve(config(folder, tensor_parallel=2), folder, tmp_path_factory.mktemp("log") / "server.log") as live:
        yield live


async def test_weights_reach_all_ranks_or_none(live, tmp_path):
    def error(seed, done):
        return np.abs(done.logprobs - plain(tiny(seed), PROMPT, done.tokens.tolist())).max()

    assert error(0, await live.generate(request("first", PROMPT), 0)) < BF16
    heard: list[int] = []
    task = asyncio.create_task(live.generate(request("through", PROMPT, 300), 0, heard))
    await heard_at_least(heard, 4)
    await live.apply(version(1, weights(tiny(1)), tmp_path / "v1"))
    assert [number for _, number in (await task).runs] == [0, 1]
    assert error(1, await live.generate(request("second", PROMPT), 1)) < BF16
    unknown = {**weights(tiny(0)), "model.layers.9.mlp.up_proj.weight": weights(tiny(0))["model.norm.weight"]}
    lacking = {name: value for name, value in weights(tiny(0)).items() if "layers.0.mlp.gate" not in name}
    for number, (words, spoiled) in enumerate([("no model.layers.9", unknown), ("missing", lacking)], start=2):
        with pytest.raises(Answer, match=words):
            await live.apply(version(number, spoiled, tmp_path / f"bad{number}"))
        assert error(1, await live.generate(request(f"still{number}", PROMPT), 1)) < BF16
    await live.apply(version(9, weights(tiny(2)), tmp_path / "v9"))
    done = await live.generate(request("last", PROMPT), 9)
    assert done.runs == [(0, 9)]
    assert error(2, done) < BF16
