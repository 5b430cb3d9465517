"""A worker holds what its algorithm needs, and all of it leaves the devices and comes back."""

import numpy as np
import pytest
from tiny_policy import make_batch, run_config

from streamrl.learner.checkpoint import Checkpoints
from streamrl.learner.critic import Critic
from streamrl.learner.policy import Actor
from streamrl.learner.rank_group import RankWorker
from streamrl.learner.reference import FrozenReference
from streamrl.learner.step import make_models

GAE = {"advantage": {"use": "gae"}}
KL = {"kl": {"where": "loss"}}
CASES = {
    "policy": ({}, type(None), type(None), ["actor"]),
    "critic and frozen": (
        {**GAE, **KL, "critic": {"kind": "model"}, "reference": {"kind": "frozen"}},
        Critic,
        FrozenReference,
        ["actor", "critic"],
    ),
    "base": ({**KL, "lora": {"rank": 2}, "reference": {"kind": "base"}}, type(None), Actor, ["actor", "lora"]),
}


@pytest.fixture
def make(one_rank, model_of, tmp_path):
    def worker(case):
        config = run_config(model_of("Llama"), **CASES[case][0])
        return RankWorker(config, one_rank, make_models(config, one_rank), Checkpoints(tmp_path))

    return worker


@pytest.mark.parametrize("case", CASES)
def test_a_worker_has_what_the_algorithm_needs(make, case):
    _, critic, reference, parts = CASES[case]
    worker = make(case)
    models = worker._models
    assert type(models.critic) is critic
    assert type(models.reference) is reference
    assert sorted(worker.state.parts) == parts


def shards(worker):
    models = (worker._models.actor, worker._models.critic, worker._models.reference)
    modules = [model._module for model in models if hasattr(model, "_module")]
    return [parameter.to_local() for module in modules for parameter in module.parameters()]


@pytest.mark.parametrize("case", CASES)
def test_everything_leaves_the_devices_and_comes_back(make, case):
    stays, leaves = make(case), make(case)
    held, batch = shards(leaves), make_batch(0)
    for worker in (stays, leaves):
        assert worker.train([0, 1, 2, 3], batch, idle=False)
    for _ in range(2):
        leaves.unload()
    assert sum(shard.untyped_storage().nbytes() for shard in held) == 0
    for _ in range(2):
        leaves.reload()
    tokens = sum(len(sample.tokens) for sample in batch)
    assert stays.apply(tokens, len(batch)) == leaves.apply(tokens, len(batch))
    ours, theirs = (worker._models.actor.compute_log_prob(make_batch(1)).logprobs for worker in (stays, leaves))
    assert all(np.array_equal(a, b) for a, b in zip(ours, theirs, strict=True))
