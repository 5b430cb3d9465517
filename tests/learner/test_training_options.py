"""Options that change how a step is computed, on a whole actor: the same weights, and what else they promise."""

import functools
import logging

import numpy as np
import pytest
import torch
from test_actor import assert_bits, assert_same, gradients, weights
from tiny_policy import make_batch, run_config, untried
from transformers import AutoModelForCausalLM
from weights_kit import save

from streamrl.learner import model as model_module
from streamrl.learner import sharding
from streamrl.learner.export import export_model
from streamrl.learner.policy import Actor


@pytest.fixture
def make(one_rank, model_of):
    def actor(kind="Qwen2", *, small=1 << 26, dtype="float32", **learner):
        return Actor(run_config(model_of(kind), dtype=dtype, **learner), one_rank, small=small)

    return actor


@pytest.mark.parametrize("small", [0, 1 << 26])
def test_recomputed_activations_change_no_bit(make, small):
    plainly, recomputing = (make(small=small, checkpoint_activations=option) for option in (False, True))
    for seed in range(2):
        for actor in (plainly, recomputing):
            actor.update_policy(make_batch(seed))
    assert_bits(recomputing.shard_state(), plainly.shard_state())


@pytest.mark.slow
def test_compiled_layers_train_the_same(make, monkeypatch, caplog):
    """Traced and differentiated under FSDP as for a real compiler (test_layers.py has one), which runs operations."""
    monkeypatch.setattr(
        model_module, "compile_layers", functools.partial(model_module.compile_layers, backend="aot_eager")
    )
    monkeypatch.setattr(sharding, "checked", untried)  # each layout of rows that is tried would be traced
    plainly, compiled = make("Llama", small=0), make("Llama", small=0, compile=True)
    with caplog.at_level(logging.WARNING, "streamrl"):
        for actor in (plainly, compiled):
            actor.accumulate(make_batch(0))
    assert not [record for record in caplog.records if record.name == "streamrl.learner.model"]
    assert_same(gradients(compiled), gradients(plainly))


def test_the_average_is_exported_beside_the_model(make, tmp_path):
    averaging, plainly = make(ema=0.5), make()
    start = weights(averaging)
    for actor in (averaging, plainly):
        actor.update_policy(make_batch(0))
    middle = weights(averaging)
    export_model(averaging.config, tmp_path, save(tmp_path / "checkpoints", averaging))
    model, average = (AutoModelForCausalLM.from_pretrained(tmp_path / name) for name in ("model", "model-ema"))
    assert_same(dict(model.named_parameters()), middle, tolerance=0)
    expected = {name: (start[name] + middle[name]) / 2 for name in start}
    assert_same(dict(average.named_parameters()), expected, tolerance=1e-6)
    export_model(plainly.config, tmp_path / "other", save(tmp_path / "other" / "checkpoints", plainly))
    assert sorted(path.name for path in (tmp_path / "other").iterdir()) == ["checkpoints", "model"]


def test_an_output_layer_in_float32_trains(make):
    """What it computes is judged by test_layers.py; here that it is the one that a sharded bfloat16 model uses."""
    batch = make_batch(0)
    exact, rough = (make("Llama", dtype="bfloat16", head_float32=option) for option in (True, False))
    fine, coarse = (np.concatenate(actor.compute_log_prob(batch).logprobs) for actor in (exact, rough))
    assert 1e-4 < np.abs(fine - coarse).max() < 0.3
    before = weights(exact)
    for actor in (exact, rough):
        assert not actor.update_policy(batch).skipped
    ours, theirs = (
        torch.cat([(weights(actor)[name] - before[name]).flatten() for name in before]) for actor in (exact, rough)
    )
    assert torch.cosine_similarity(ours, theirs, dim=0) > 0.9


@pytest.mark.parametrize("offload", [["parameters"], ["optimizer"], ["parameters", "optimizer"]])
def test_on_a_cpu_offload_has_nowhere_to_go_and_changes_nothing(make, offload):
    plainly, offloading = make(), make(offload=offload)
    for actor in (plainly, offloading):
        actor.update_policy(make_batch(0))
    assert_bits(offloading.shard_state(), plainly.shard_state())


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("offload", [["parameters"], ["optimizer"], ["parameters", "optimizer"]])
def test_on_a_gpu_offload_lowers_what_lies_on_the_device_and_changes_nothing(model_of, offload, tmp_path):
    from streamrl.learner.ranks import Ranks

    ranks = Ranks(rank=0, world=1, device=torch.device("cuda:0"), deadline=60)
    try:
        actors, held = [], []
        for options in ({}, {"offload": offload}):
            before = torch.cuda.memory_allocated()
            actors.append(Actor(run_config(model_of("Llama"), **options), ranks, small=0))
            actors[-1].update_policy(make_batch(0))
            actors[-1].to_host()
            actors[-1].to_device()
            held.append(torch.cuda.memory_allocated() - before)
        assert held[1] < held[0]
        assert_same(weights(actors[1]), weights(actors[0]))
    finally:
        ranks.close()


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_the_precision_of_matrices_is_what_is_configured(one_rank, model_of, caplog, attention):
    before = torch.get_float32_matmul_precision()
    config = run_config(model_of("Qwen2"), matmul_precision="medium")
    config = config.model_copy(update={"model": config.model.model_copy(update={"attention": attention})})
    try:
        with caplog.at_level(logging.WARNING, "streamrl"):
            Actor(config, one_rank)
        assert torch.get_float32_matmul_precision() == "medium"
        assert ("model.attention to eager" in caplog.text) == (attention == "sdpa")
    finally:
        torch.set_float32_matmul_precision(before)
