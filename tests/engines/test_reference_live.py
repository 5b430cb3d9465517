"""The reference policy on real servers: what they say of a response is what a plain forward pass says."""

from __future__ import annotations

import asyncio
import copy
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent))
import sglang_kit
import vllm_kit

from streamrl.config import RunConfig
from streamrl.errors import ConfigError, DataError
from streamrl.learner.batch import TrainSample
from streamrl.learner.ranks import Ranks
from streamrl.learner.reference_servers import Remote

pytestmark = [pytest.mark.engines, pytest.mark.slow, pytest.mark.timeout(600)]

CLOSE = 0.03  # of log-probabilities that a server computes in bfloat16, against float32


@pytest.fixture(scope="module")
def ranks() -> Iterator[Ranks]:
    ranks = Ranks(rank=0, world=1, device=torch.device("cpu"), deadline=30)
    yield ranks
    ranks.close()


def sample(group_id: int, prompt: list[int], tokens: list[int]) -> TrainSample:
    count = len(tokens)
    return TrainSample(
        group_id,
        np.asarray(prompt, np.int32),
        np.asarray(tokens, np.int32),
        np.full(count, -1, np.float32),
        np.zeros(count, np.int64),
        0.0,
        np.zeros(count, np.float32),
    )


def batch(vocabulary: int, longest: int) -> list[TrainSample]:
    """Prompts that are shared and not, responses of one token and of nothing, and one as long as the context."""
    random = np.random.default_rng(0)

    def ids(count: int) -> list[int]:
        return [int(token) for token in random.integers(3, vocabulary, count)]

    shared = ids(20)
    lengths = (1, 2, 17, 64, 0)
    last = vocabulary - 1  # SGLang calls it by another name
    return [
        sample(3, [last], [4, last, last, 5]),
        *(sample(0, shared, ids(count)) for count in lengths),
        sample(1, ids(1), ids(30)),
        sample(2, ids(longest // 2), ids(longest - longest // 2)),
    ]


def config(model: Path, url: str, context: int) -> RunConfig:
    return RunConfig.model_validate(
        {
            "model": {"path": str(model), "context": context},
            "data": {"max_prompt_tokens": 64},
            "sampling": {"max_new_tokens": 64},
            "learner": {"reference": {"kind": "remote", "url": [url]}},
        }
    )


def compare(run: RunConfig, ranks: Ranks, model: Any, vocabulary: int) -> None:
    """Score a batch twice (the second time the server may have it in its cache), and see what is refused."""
    reference = Remote(run, ranks)
    samples = batch(vocabulary, run.model.context)
    exact = copy.deepcopy(model).float()
    for _ in range(2):
        found = reference.compute_ref_log_prob(samples)
        for values, item in zip(found, samples, strict=True):
            expected = vllm_kit.forward(exact, item.prompt.tolist(), item.tokens.tolist())
            assert values.shape == expected.shape
            assert np.abs(values - expected).max(initial=0.0) < CLOSE
    longer = run.model_copy(update={"model": run.model.model_copy(update={"context": 1 << 20})})
    with pytest.raises(ConfigError, match=r"too few for model\.context"):
        Remote(longer, ranks)


async def test_vllm(tmp_path: Path, ranks: Ranks) -> None:
    model = vllm_kit.random_model(0, tied=True)
    folder = vllm_kit.save_model(model, tmp_path / "model")
    async with vllm_kit.served(folder, tmp_path / "log") as live:
        run = config(folder, live.url, vllm_kit.CONTEXT - 1)
        await asyncio.to_thread(compare, run, ranks, model, vllm_kit.VOCABULARY)

        def refused() -> None:
            with pytest.raises(DataError, match="group 7"):
                Remote(run, ranks).compute_ref_log_prob([sample(7, [5], [vllm_kit.VOCABULARY + 1000])])

        await asyncio.to_thread(refused)


def test_sglang(tmp_path: Path, ranks: Ranks) -> None:
    model = sglang_kit.tiny(0)
    sglang_kit.save_model(model, tmp_path / "model")
    with sglang_kit.serve(sglang_kit.config(tmp_path / "model"), tmp_path / "model", tmp_path / "log") as live:
        compare(config(tmp_path / "model", live.url, sglang_kit.CONTEXT - 7), ranks, model, sglang_kit.VOCABULARY)
