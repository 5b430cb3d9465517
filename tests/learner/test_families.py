"""Families of models: the same log-probs in every layout; test_two_ranks.py has them on two ranks."""

import numpy as np
import pytest
import torch
from test_actor import plain, reference_logprobs
from tiny_policy import LAYOUTS, lay_out, make_batch, run_config

from streamrl.learner.policy import Actor

FAMILIES = ["Qwen2", "Qwen3", "Llama", "Gemma", "Gemma2", "Gemma3Text", "GPTNeoX"]


@pytest.mark.parametrize("kind", FAMILIES)
def test_packed_equals_unpacked_equals_the_plain_forward_pass(one_rank, model_of, kind):
    batch = make_batch(0, groups=6, size=4)
    expected = [logprobs.detach().numpy() for _, logprobs in reference_logprobs(plain(model_of(kind)), batch)]
    gradients = []
    for layout in LAYOUTS:
        actor = lay_out(Actor(run_config(model_of(kind)), one_rank), layout)
        found = actor.compute_log_prob(batch).logprobs
        for ours, theirs in zip(found, expected, strict=True):
            np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-5)
        actor.accumulate(batch)
        gradients.append(gradient_of(actor))
    for other in gradients[1:]:
        same(other, gradients[0])


@pytest.mark.parametrize("kind", ["Qwen2", "Gemma3Text", "GPTNeoX"])
def test_layouts_agree_in_bfloat16(one_rank, model_of, kind):
    batch = make_batch(0, groups=6, size=4)
    actor = Actor(run_config(model_of(kind), dtype="bfloat16"), one_rank)
    limits, found = actor.limits, []
    assert limits.shared, "the check at the start passes in bfloat16"
    for layout in LAYOUTS:
        actor.limits = limits
        found.append(np.concatenate(lay_out(actor, layout).compute_log_prob(batch).logprobs))
    for other in found[1:]:
        assert np.linalg.norm(other - found[0]) <= 1e-2 * np.linalg.norm(found[0])


def gradient_of(actor):
    return {name: parameter.grad.full_tensor() for name, parameter in actor.parameters.items()}


def same(ours, theirs):
    """To 1e-5, relative to the largest value of the whole gradient."""
    assert ours.keys() == theirs.keys()
    scale = max(float(tensor.abs().max()) for tensor in theirs.values())
    for name in ours:
        torch.testing.assert_close(ours[name], theirs[name], rtol=1e-5, atol=1e-5 * scale, msg=name)
