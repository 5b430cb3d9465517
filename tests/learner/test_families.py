"""Families of models: the same log-probs in every layout, and on two ranks as on one."""

import os
import subprocess
import sys
from pathlib import Path

import family_process
import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from test_actor import plain, reference_logprobs
from tiny_policy import make_batch, run_config

from streamrl.learner.policy import Actor
from streamrl.learner.ranks import RENDEZVOUS

FAMILIES = ["Qwen2", "Qwen3", "Llama", "Gemma", "Gemma2", "Gemma3Text", "GPTNeoX"]
SCRIPT = Path(family_process.__file__)


@pytest.mark.parametrize("kind", FAMILIES)
def test_packed_equals_unpacked_equals_the_plain_forward_pass(one_rank, model_of, kind):
    batch = make_batch(0, groups=6, size=4)
    expected = [logprobs.detach().numpy() for _, logprobs in reference_logprobs(plain(model_of(kind)), batch)]
    computed = {}
    for rows, share in (("packed", True), ("packed", False), ("buckets", True), ("buckets", False)):
        actor = Actor(run_config(model_of(kind), rows=rows, share_prompts=share), one_rank)
        found = actor.compute_log_prob(batch).logprobs
        for ours, theirs in zip(found, expected, strict=True):
            np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-5)
        computed[rows, share] = actor.accumulate(batch).passes, actor
    gradients = [gradient_of(actor) for _, actor in computed.values()]
    for other in gradients[1:]:
        same(other, gradients[0])


def gradient_of(actor):
    return {name: parameter.grad.full_tensor() for name, parameter in actor.parameters.items()}


def same(ours, theirs):
    """To 1e-5, relative to the largest value of the whole gradient."""
    assert ours.keys() == theirs.keys()
    scale = max(float(tensor.abs().max()) for tensor in theirs.values())
    for name in ours:
        torch.testing.assert_close(ours[name], theirs[name], rtol=1e-5, atol=1e-5 * scale, msg=name)


def start_two(models, out):
    """Two processes over gloo."""
    environment = os.environ | {"OMP_NUM_THREADS": "1", "WORLD_SIZE": "2", RENDEZVOUS: f"file://{out / 'rendezvous'}"}
    command = [sys.executable, str(SCRIPT), str(out), *(f"{kind}={path}" for kind, path in models.items())]
    return [
        subprocess.Popen(
            command, env=environment | {"RANK": str(rank)}, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        for rank in (0, 1)
    ]


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_two_ranks_compute_what_one_rank_computes(tmp_path, model_of, one_rank):
    """All families in one start, which costs more than all of their steps."""
    one, two = tmp_path / "one", tmp_path / "two"
    one.mkdir()
    two.mkdir()
    models = {kind: model_of(kind) for kind in FAMILIES}
    processes = start_two(models, two)
    family_process.play(one_rank, models, one)
    outputs = [process.communicate(timeout=280)[0] for process in processes]
    assert [process.returncode for process in processes] == [0, 0], outputs
    for kind in FAMILIES:
        whole, layers = (load_file(one / f"{kind}-{units}-gradients.safetensors") for units in ("whole", "layers"))
        same(layers, whole)
        same(load_file(two / f"{kind}-whole-gradients.safetensors"), whole)
        same(load_file(two / f"{kind}-layers-gradients.safetensors"), whole)
        for units in ("whole", "layers"):
            expected = load_file(one / f"{kind}-{units}-logprobs-0.safetensors")
            mine = [load_file(two / f"{kind}-{units}-logprobs-{rank}.safetensors") for rank in (0, 1)]
            found = {str(int(index) + 12 * rank): values for rank in (0, 1) for index, values in mine[rank].items()}
            assert found.keys() == expected.keys(), kind
            for index, values in found.items():
                torch.testing.assert_close(values, expected[index], rtol=1e-5, atol=1e-5, msg=f"{kind} {units} {index}")
