"""Critic and frozen reference on two real processes under FSDP against one."""

import pytest
import torch
import value_process
from safetensors.torch import load_file
from tiny_policy import without_key_biases
from world_kit import one_and_two

pytestmark = pytest.mark.timeout(400)


@pytest.fixture(scope="module")
def runs(tmp_path_factory, model_of, one_rank):
    return one_and_two(value_process, model_of("Qwen2"), one_rank, tmp_path_factory, 360)


@pytest.mark.parametrize("units", ["whole", "layers"])
@pytest.mark.parametrize("what", ["values", "reference", "norms"])
def test_two_ranks_compute_what_one_computes(runs, units, what):
    key = f"{units}.{what}"
    assert runs.two[0][key] == runs.two[1][key]
    assert runs.two[0][key] == pytest.approx(runs.one[key], rel=1e-5, abs=1e-5)


@pytest.mark.parametrize("units", ["whole", "layers"])
def test_two_ranks_learn_what_one_learns(runs, units):
    ours, theirs = (
        without_key_biases(load_file(runs.folders[world] / f"{units}-critic-0.safetensors")) for world in ("two", "one")
    )
    assert ours.keys() == theirs.keys()
    assert "value_head.weight" in ours
    for name in ours:
        torch.testing.assert_close(ours[name], theirs[name], rtol=1e-5, atol=1e-5, msg=name)


def test_a_critic_goes_on_from_its_state_on_both_ranks(runs):
    assert all(found[f"{units}.continued"] for found in (runs.one, *runs.two) for units in ("whole", "layers"))


def test_what_one_rank_refuses_no_rank_computes(runs):
    first, second = (found["refused"] for found in runs.two)
    assert "another rank refused" in first
    assert "not in the vocabulary" in second
