"""Critic, value head and frozen reference on two real processes under FSDP against one."""

from pathlib import Path
from types import SimpleNamespace

import orjson
import pytest
import torch
import value_process
from safetensors.torch import load_file
from test_two_ranks import start
from tiny_policy import without_key_biases

from streamrl.learner.ranks import RENDEZVOUS

pytestmark = pytest.mark.timeout(400)
SCRIPT = Path(__file__).parent / "value_process.py"


@pytest.fixture(scope="module")
def runs(tmp_path_factory, model_of, one_rank):
    model = model_of("Qwen2")
    one, two = (tmp_path_factory.mktemp(name) for name in ("one", "two"))
    rendezvous = {"WORLD_SIZE": "2", RENDEZVOUS: f"file://{two / 'rendezvous'}"}
    processes = [start([SCRIPT, model, two], RANK=str(rank), **rendezvous) for rank in (0, 1)]
    value_process.play(model, one, one_rank)
    outputs = [process.communicate(timeout=360)[0] for process in processes]
    assert [process.returncode for process in processes] == [0, 0], outputs
    found = [
        orjson.loads((folder / f"found-{rank}.json").read_bytes()) for folder, rank in ((one, 0), (two, 0), (two, 1))
    ]
    return SimpleNamespace(folders={"one": one, "two": two}, one=found[0], two=found[1:])


@pytest.mark.parametrize("units", ["whole", "layers"])
@pytest.mark.parametrize("what", ["values", "head", "reference", "norms"])
def test_two_ranks_compute_what_one_computes(runs, units, what):
    key = f"{units}.{what}"
    assert runs.two[0][key] == runs.two[1][key]
    assert runs.two[0][key] == pytest.approx(runs.one[key], rel=1e-5, abs=1e-5)


@pytest.mark.parametrize("units", ["whole", "layers"])
@pytest.mark.parametrize("model", ["critic", "headed"])
def test_two_ranks_learn_what_one_learns(runs, units, model):
    ours, theirs = (
        without_key_biases(load_file(runs.folders[world] / f"{units}-{model}-0.safetensors"))
        for world in ("two", "one")
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
