"""Both ways through a step on two real processes under FSDP against one: the same weights and figures."""

import pytest
import step_process
import torch
from safetensors.torch import load_file
from tiny_policy import without_key_biases
from world_kit import one_and_two

pytestmark = pytest.mark.timeout(400)


@pytest.fixture(scope="module")
def runs(tmp_path_factory, model_of, one_rank):
    return one_and_two(step_process, model_of("Qwen2"), one_rank, tmp_path_factory, 360)


@pytest.mark.parametrize("name", step_process.RECIPES)
def test_two_ranks_learn_what_one_learns(runs, name):
    number = list(step_process.RECIPES).index(name)
    assert runs.two[0][name] == runs.two[1][name]
    for ours, theirs in zip(runs.two[0][name], runs.one[name], strict=True):
        assert ours == pytest.approx(theirs, rel=1e-4, abs=1e-6)
    ours, theirs = (
        without_key_biases(load_file(runs.folders[world] / f"{number}-0.safetensors")) for world in ("two", "one")
    )
    for key in ours:
        torch.testing.assert_close(ours[key], theirs[key], rtol=1e-5, atol=1e-5, msg=key)


def test_each_recipe_did_something(runs):
    masked = [record[4] for record in runs.one["m2po over the step"]]
    assert min(masked) > 0
    first, second = runs.one["kl in the reward, adaptive"]
    assert second[3] < first[3] == 0.1, "there is no distance yet, so the coefficient falls"
    warm, learning = runs.one["gae with a critic"]
    assert warm[1] == 0, "the policy waits for the critic"
    assert learning[1] > 0
    assert len(warm) == len(learning) == 5 + 2, "one value loss per pass"
