"""The reference policy on real servers: what they say of a response is what a plain forward pass says."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoTokenizer

from streamrl.config import ModelConfig, RunConfig
from streamrl.errors import ConfigError, DataError
from streamrl.learner.batch import TrainSample
from streamrl.learner.ranks import Ranks
from streamrl.learner.reference_servers import ServerReference
from tests.engines import tiny
from tests.engines.conformance_kit import KEY, Bench

pytestmark = [
    pytest.mark.engines,
    pytest.mark.slow,
    pytest.mark.timeout(600),
    pytest.mark.asyncio(loop_scope="session"),
    pytest.mark.parametrize("running", ["vllm", "sglang"], indirect=True),
]

CLOSE = 0.03  # of log-probabilities that a server computes in bfloat16, against float32
SPARE = {"vllm": 1, "sglang": 7}
"""Places of a server's context that it does not give to a prompt."""


@pytest.fixture
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


def batch(longest: int) -> list[TrainSample]:
    """Prompts that are shared and not, responses of one token and of nothing, and one as long as the context."""
    random = np.random.default_rng(0)

    def ids(count: int) -> list[int]:
        return [int(token) for token in random.integers(tiny.FIRST_PLAIN, tiny.VOCABULARY, count)]

    shared = ids(20)
    lengths = (1, 2, 17, 64, 0)
    last = tiny.VOCABULARY - 1  # SGLang calls it by another name
    return [
        sample(3, [last], [8, last, last, 9]),
        *(sample(0, shared, ids(count)) for count in lengths),
        sample(1, ids(1), ids(30)),
        sample(2, ids(longest // 2), ids(longest - longest // 2)),
    ]


def run_of(bench: Bench, context: int) -> RunConfig:
    key = bench.folder / "key"
    key.write_text(KEY)
    key.chmod(0o600)
    return RunConfig.model_validate(
        {
            "model": {"path": bench.config.model.path, "context": context},
            "data": {"max_prompt_tokens": 64},
            "sampling": {"max_new_tokens": 64},
            "learner": {"reference": {"kind": "remote", "url": [bench.url], "api_key_file": str(key)}},
        }
    )


@torch.no_grad()
def forward(bench: Bench, one: TrainSample) -> np.ndarray:
    """Log-probabilities of a response by one plain pass of transformers."""
    ids = torch.tensor([[*one.prompt.tolist(), *one.tokens.tolist()]])
    logits = bench.models[bench.number](input_ids=ids).logits[0, len(one.prompt) - 1 : -1]
    return torch.log_softmax(logits, -1).gather(1, ids[0, len(one.prompt) :, None])[:, 0].numpy()


async def test_a_batch_is_scored_as_by_a_forward_pass(bench: Bench, ranks: Ranks):
    """Twice: the second time the server may have it in its cache."""
    longest = tiny.CONTEXT - SPARE[bench.kind]
    samples = batch(longest)
    wanted = [forward(bench, one) for one in samples]

    def compare() -> None:
        reference = ServerReference(run_of(bench, longest), ranks, tiny.VOCABULARY)
        for _ in range(2):
            for found, expected in zip(reference.compute_ref_log_prob(samples), wanted, strict=True):
                assert found.shape == expected.shape
                assert np.abs(found - expected).max(initial=0.0) < CLOSE

    await asyncio.to_thread(compare)


def retokenized(bench: Bench, folder: Path) -> ModelConfig:
    """The model with one more token, in the place of nothing that it knows."""
    tokenizer = AutoTokenizer.from_pretrained(bench.config.model.path)
    tokenizer.add_tokens(["<think>"])
    tokenizer.save_pretrained(folder)
    return bench.config.model.model_copy(update={"path": str(folder), "context": 1024})


async def test_what_a_server_cannot_score_is_refused(bench: Bench, ranks: Ranks, tmp_path: Path):
    def refused() -> None:
        with pytest.raises(ConfigError, match=r"too few for model\.context"):
            ServerReference(run_of(bench, tiny.CONTEXT), ranks, tiny.VOCABULARY)
        if bench.kind == "vllm":
            reference = ServerReference(run_of(bench, 1024), ranks, tiny.VOCABULARY)
            with pytest.raises(DataError, match="group 7"):
                reference.compute_ref_log_prob([sample(7, [8], [tiny.VOCABULARY + 1000])])
            with pytest.raises(ConfigError, match="knows fewer tokens than the policy"):
                ServerReference(run_of(bench, 1024), ranks, tiny.VOCABULARY + 1000)
        config = run_of(bench, 1024)
        with pytest.raises(ConfigError, match="another tokenizer"):
            ServerReference(config.model_copy(update={"model": retokenized(bench, tmp_path)}), ranks, tiny.VOCABULARY)

    await asyncio.to_thread(refused)
