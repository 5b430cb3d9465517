"""Two real processes under FSDP against one: the same weights, half of every parameter each, and no silent hang."""

from pathlib import Path
from types import SimpleNamespace

import pytest
import rank_process
import torch
from safetensors.torch import load_file
from tiny_policy import run_config, without_key_biases
from transformers import AutoModelForCausalLM
from world_kit import one_and_two, start

from streamrl.errors import ConfigError
from streamrl.learner.ranks import Ranks, choose_device
from streamrl.weight_sync.manifest import read_manifest
from streamrl.weight_sync.tensors import map_version

SCRIPT = Path(__file__).parent / "rank_process.py"


LONELY = """
import sys, torch
from streamrl.learner.ranks import Ranks
try:
    Ranks(rank=0, world=2, device=torch.device("cpu"), deadline=1, rendezvous=sys.argv[1])
except Exception as error:
    print(type(error).__name__, error)
"""


@pytest.fixture(scope="module")
def runs(tmp_path_factory, model_of, one_rank):
    """The results of one rank (in this process), of two ranks, and of a rank that waits for one that never comes."""
    lonely = start(["-c", LONELY, f"file://{tmp_path_factory.mktemp('lonely') / 'rendezvous'}"])
    found = one_and_two(rank_process, model_of("Qwen2"), one_rank, tmp_path_factory, 110)
    output = lonely.communicate(timeout=110)[0]
    assert lonely.returncode == 0, output
    return SimpleNamespace(**vars(found), lonely=output)


def assert_same(ours, theirs):
    ours, theirs = without_key_biases(load_file(ours)), without_key_biases(load_file(theirs))
    assert ours.keys() == theirs.keys()
    for name in ours:
        torch.testing.assert_close(ours[name], theirs[name], rtol=1e-5, atol=1e-5, msg=name)


@pytest.mark.parametrize("units", ["whole", "layers"])
def test_the_same_weights_as_one_rank(runs, units):
    assert_same(runs.folders["two"] / f"{units}-0.safetensors", runs.folders["one"] / f"{units}-0.safetensors")
    assert_same(runs.folders["two"] / f"{units}-0.safetensors", runs.folders["one"] / "whole-0.safetensors")


@pytest.mark.parametrize("units", ["whole", "layers"])
def test_the_same_statistics_as_one_rank_on_both(runs, units):
    first, second = (found[f"{units}.records"] for found in runs.two)
    assert first == second
    assert len(first) == rank_process.STEPS
    for ours, theirs in zip(first, runs.one[f"{units}.records"], strict=True):
        for key in ("loss", "norm", "tokens", "ess"):
            assert ours[key] == pytest.approx(theirs[key], rel=1e-4), key


@pytest.mark.parametrize("units", ["whole", "layers"])
def test_two_ranks_hold_half_each(runs, units):
    shapes = [found[f"{units}.shapes"] for found in runs.two]
    assert shapes[0].keys() == shapes[1].keys()
    held = [0, 0]
    for name, (first, whole, placement) in shapes[0].items():
        second = shapes[1][name][0]
        assert placement == "(Shard(dim=0),)"
        assert first[1:] == second[1:] == whole[1:]
        assert first[0] == -(-whole[0] // 2)
        assert first[0] + second[0] == whole[0]
        for rank, shape in enumerate((first, second)):
            held[rank] += torch.Size(shape).numel()
    # 61 rows of the embedding are no even number: one row more here than there.
    assert abs(held[0] - held[1]) <= 32


@pytest.mark.parametrize("units", ["whole", "layers"])
def test_state_continues_bit_for_bit(runs, units):
    assert [found[f"{units}.continued"] for found in (runs.one, *runs.two)] == [True] * 3


def test_log_probs_of_each_rank_are_of_its_own_samples(runs):
    both = [values for found in runs.two for values in found["whole.logprobs"]]
    for ours, theirs in zip(both, runs.one["whole.logprobs"], strict=True):
        assert ours == pytest.approx(theirs, abs=1e-4)


def test_export_of_two_ranks_is_whole(runs):
    models = [AutoModelForCausalLM.from_pretrained(runs.folders[name] / "export") for name in ("one", "two")]
    one, two = (without_key_biases(dict(model.named_parameters())) for model in models)
    for name in one:
        torch.testing.assert_close(two[name], one[name], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", ["one", "two"])
def test_what_each_rank_writes_is_together_the_whole_model(runs, name):
    folder = runs.folders[name] / "run" / "weights" / "v-1-1"
    manifest = read_manifest(folder)
    assert same_tensors(
        dict(map_version(folder, manifest).tensors), load_file(runs.folders[name] / "published.safetensors")
    )
    world = 1 if name == "one" else 2
    assert {shard.file[:4] for shard in manifest.shards} == {f"r{rank:03}" for rank in range(world)}
    assert max(len(entry.parts) for entry in manifest.tensors) == world


def same_tensors(left, right):
    return left.keys() == right.keys() and all(torch.equal(left[name], right[name]) for name in left)


def test_a_batch_that_one_rank_refuses_stops_both(runs):
    first, second = (found["refused"] for found in runs.two)
    assert "another rank refused" in first
    assert second.startswith("ValueError: group 7")


def test_small_collectives(runs):
    for found in runs.two:
        assert found["broadcast"] == [3, -(1 << 62), 5]
        assert found["broadcast_empty"] == []
        assert found["max"] == [1, 0]
        assert found["min"] == [0, -1]
        assert found["sum"] == [4.0]


def test_a_dead_rank_is_noticed(runs):
    assert (runs.folders["two"] / "left.txt").read_text().startswith(("Unreachable", "DeadlineExceeded"))


def test_a_rank_that_never_comes_ends_the_wait(runs):
    assert "DeadlineExceeded joining the process group of rank 0 of 2" in runs.lonely


def test_ranks_need_a_rendezvous_and_the_configured_number(tmp_path):
    config = run_config(tmp_path, ranks=2, device="cpu").learner
    with pytest.raises(ConfigError, match="rendezvous"):
        Ranks.from_environment(config, {"RANK": "0", "WORLD_SIZE": "2"})
    with pytest.raises(ConfigError, match=r"1 ranks were started, learner\.ranks is 2"):
        Ranks.from_environment(config, {})


def test_one_rank_needs_no_collective(one_rank):
    assert one_rank.broadcast_ints([1, 2]) == [1, 2]
    assert (one_rank.all_max(3), one_rank.all_min(4)) == ([3], [4])


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device here")
def test_an_absent_device_is_a_configuration_error():
    assert choose_device("auto", 0) == torch.device("cpu")
    for name in ("cuda", "cuda:1", "nonsense"):
        with pytest.raises(ConfigError, match=r"learner\.device"):
            choose_device(name, 0)
