"""Copies of the weights: right values, in memory that is used again only when nobody reads it any more."""

from __future__ import annotations

import torch
from tiny_policy import make_batch, run_config
from weights_kit import full_tensors

from streamrl.learner.policy import Actor
from streamrl.learner.weight_copy import Copies


def test_a_copy_has_every_parameter_in_the_type_of_the_way(one_rank, model_of):
    policy = Actor(run_config(model_of("Qwen2")), one_rank)
    for dtype in (torch.float32, torch.bfloat16):
        snapshot = Copies(policy.parameters, dtype).take()
        expected = full_tensors(policy, dtype)
        found = dict(snapshot.tensors)
        assert found.keys() == expected.keys()
        assert all(torch.equal(found[name], tensor) and found[name].dtype == dtype for name, tensor in expected.items())
        assert snapshot.seconds > 0


def test_training_goes_on_beside_a_copy_and_memory_comes_round(one_rank, model_of):
    policy = Actor(run_config(model_of("Qwen2")), one_rank)
    copies = Copies(policy.parameters, torch.float32, sets=2)
    taken, values = [], []
    for step in range(4):
        taken.append(dict(copies.take().tensors))
        values.append(full_tensors(policy))
        for age in (0, 1):  # this one and the one before are still what they were
            if step >= age:
                found, expected = taken[step - age], values[step - age]
                assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())
        policy.update_policy(make_batch(step))
    places = [{tensor.data_ptr() for tensor in found.values()} for found in taken]
    assert places[0] == places[2] != places[1] == places[3]
    assert not places[0] & places[1]
