"""Adapters on two real processes against one: the same adapter, the same versions, and a rank without rows of A."""

import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import lora_process
import orjson
import pytest
import torch
from safetensors.torch import load_file
from tiny_policy import without_key_biases

from streamrl.learner.ranks import RENDEZVOUS
from streamrl.weight_sync.manifest import read_manifest
from streamrl.weight_sync.tensors import map_version

SCRIPT = Path(__file__).parent / "lora_process.py"
KINDS = [f"{name}-{units}" for name in lora_process.KINDS for units in ("whole", "layers")]


@pytest.fixture(scope="module")
def runs(tmp_path_factory, model_of, one_rank):
    model = model_of("Qwen2")
    one, two = (tmp_path_factory.mktemp(name) for name in ("one", "two"))
    common = os.environ | {"OMP_NUM_THREADS": "1", "WORLD_SIZE": "2", RENDEZVOUS: f"file://{two / 'rendezvous'}"}
    processes = [
        subprocess.Popen(
            [sys.executable, SCRIPT, model, two],
            env=common | {"RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in (0, 1)
    ]
    lora_process.play(model, one, one_rank)
    outputs = [process.communicate(timeout=110)[0] for process in processes]
    assert [process.returncode for process in processes] == [0, 0], outputs
    found = [
        orjson.loads((folder / f"found-{rank}.json").read_bytes()) for folder, rank in ((one, 0), (two, 0), (two, 1))
    ]
    return SimpleNamespace(one=one, two=two, found=found)


def assert_close(ours, theirs):
    ours, theirs = without_key_biases(ours), without_key_biases(theirs)
    assert ours.keys() == theirs.keys()
    for name in ours:
        torch.testing.assert_close(ours[name], theirs[name], rtol=1e-5, atol=1e-5, msg=name)


@pytest.mark.parametrize("kind", KINDS)
def test_the_same_merged_weights_as_one_rank(runs, kind):
    assert_close(*(load_file(folder / kind / "merged.safetensors") for folder in (runs.two, runs.one)))
    assert_close(*(load_file(folder / kind / "export" / "model.safetensors") for folder in (runs.two, runs.one)))


@pytest.mark.parametrize("kind", KINDS)
def test_the_same_version_as_one_rank(runs, kind):
    held = []
    for folder in (runs.two, runs.one):
        version = folder / kind / "weights" / "v-1-1"
        manifest = read_manifest(version)
        assert manifest.kind == ("adapter" if kind.startswith("thin") else "full")
        held.append(dict(map_version(version, manifest).tensors))
    assert_close(*held)
    if not kind.startswith("thin"):
        assert_close(held[0], load_file(runs.two / kind / "merged.safetensors"))


@pytest.mark.parametrize("kind", KINDS)
def test_the_same_statistics_and_half_of_the_adapter_each(runs, kind):
    one, first, second = (found[kind] for found in runs.found)
    assert first["records"] == second["records"]
    for ours, theirs in zip(first["records"], one["records"], strict=True):
        for key in ("loss", "norm", "tokens"):
            assert ours[key] == pytest.approx(theirs[key], rel=1e-4, abs=1e-6), key
    for name, shape in one["parameters"].items():
        halves = first["parameters"][name], second["parameters"][name]
        assert halves[0][0] == -(-shape[0] // 2)
        assert halves[0][0] + halves[1][0] == shape[0]


@pytest.mark.parametrize("kind", KINDS)
def test_without_its_adapter_a_rank_computes_what_the_base_does(runs, kind):
    assert all(found[kind]["base_unchanged"] for found in runs.found)


@pytest.mark.parametrize("kind", KINDS)
def test_a_rank_that_still_writes_leaves_a_version_out_and_holds_nobody_up(runs, kind):
    """The rank takes part in the collective that the snapshot of the other rank needs, because that one would hang."""
    assert [found[kind]["left_out"] for found in runs.found] == [False, False, True]
    assert [found[kind]["refused"] for found in runs.found] == [[], [], [[1, 2]]]
