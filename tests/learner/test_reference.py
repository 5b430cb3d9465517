"""The reference policy in this process: the initial policy for ever, or the base under an adapter."""

import numpy as np
import pytest
import torch
from tiny_policy import make_batch, run_config

from streamrl.errors import ConfigError
from streamrl.learner.step import make_models


@pytest.fixture
def make(one_rank, model_of):
    def pair(kind="Qwen2", reference=None, **learner):
        settings = {"kind": "frozen", **(reference or {})}
        temperature, dtype = learner.pop("temperature", 1.0), learner.pop("dtype", "float32")
        config = run_config(model_of(kind), temperature=temperature, dtype=dtype, reference=settings, **learner)
        models = make_models(config, one_rank)
        return models.actor, models.reference

    return pair


def same(ours, theirs):
    return all(np.array_equal(a, b) for a, b in zip(ours, theirs, strict=True))


@pytest.mark.parametrize("kind", ["Qwen2", "Llama", "GPTNeoX"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_frozen_copy_is_the_initial_policy_and_stays_it(make, kind, dtype):
    actor, reference = make(kind, temperature=0.7, dtype=dtype, tokens_per_microbatch=160)
    batch = make_batch(0)
    first = actor.compute_log_prob(batch).logprobs
    assert same(reference.compute_ref_log_prob(batch), first)
    for seed in range(2):
        actor.update_policy(make_batch(seed))
    assert not same(actor.compute_log_prob(batch).logprobs, first)
    assert same(reference.compute_ref_log_prob(batch), first)
    assert reference.compute_ref_log_prob([]) == []


def test_offloading_changes_nothing(make):
    """Storages leave after each use; on a CPU the same code runs without moving anything."""
    _, reference = make()
    batch = make_batch(1)
    before = reference.compute_ref_log_prob(batch)
    for _ in range(2):
        reference.to_host()
    for _ in range(2):
        reference.to_device()
    assert same(reference.compute_ref_log_prob(batch), before)
    reference._offloads = True
    reference.to_host()
    shards = [parameter.to_local() for parameter in reference._module.parameters()]
    assert same(reference.compute_ref_log_prob(batch), before)
    assert sum(shard.untyped_storage().nbytes() for shard in shards) == 0
    reference.to_device()
    assert sum(shard.untyped_storage().nbytes() for shard in shards) == 0


def test_the_base_is_the_policy_without_its_adapter(make):
    actor, reference = make("Llama", reference={"kind": "base"}, lora={"rank": 4})
    batch = make_batch(2)
    first = actor.compute_log_prob(batch).logprobs
    assert same(reference.compute_ref_log_prob(batch), first)
    for seed in range(3):
        actor.update_policy(make_batch(seed))
    trained = actor.compute_log_prob(batch).logprobs
    assert not same(trained, first)
    assert same(reference.compute_ref_log_prob(batch), first)
    assert same(actor.compute_log_prob(batch).logprobs, trained)


def test_another_path_is_another_model(make, model_of):
    _, reference = make("Qwen2", reference={"path": str(model_of("Llama"))})
    batch = make_batch(3)
    llama, _ = make("Llama")
    assert same(reference.compute_ref_log_prob(batch), llama.compute_log_prob(batch).logprobs)


def test_a_reference_that_is_not_there_is_refused(make, tmp_path):
    with pytest.raises(ConfigError, match=r"learner.reference.path .*exists.* cannot be loaded"):
        make("Qwen2", reference={"path": str(tmp_path)})


def test_a_sample_that_does_not_fit_is_an_error(make):
    _, reference = make()
    (sample,) = make_batch(4, groups=1, size=1)
    sample.tokens[0] = 1000
    with pytest.raises(ValueError, match="vocabulary"):
        reference.check_samples([sample])


def test_there_is_none_without_one(one_rank, model_of):
    config = run_config(model_of("Llama"))
    assert make_models(config, one_rank).reference is None
    assert torch.get_float32_matmul_precision() == "highest"
