"""Whole small runs that train an adapter."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import orjson
import pytest
import torch

from streamrl.weight_sync.manifest import versions
from streamrl.weight_sync.tensors import map_version

from .run_kit import cli, data_of, process

pytestmark = [pytest.mark.slow, pytest.mark.timeout(700)]
LONGEST = 300
"""Seconds for a whole run on busy cores."""
SETTINGS = ["learner.lora.rank=4", "learner.lora.alpha=8", "learner.lr=1e-2", "evaluation.final_prompts=0"]


def up(tiny: Path, folder: Path, *settings: str, resume: bool = False) -> Path:
    flags = [*(["--resume"] if resume else []), *sets(*SETTINGS, *settings)]
    done = process("up", str(tiny / "run.yaml"), "--screen", "plain", *flags, cwd=folder, seconds=LONGEST)
    assert done.returncode == 0, done.stdout + done.stderr
    return folder / "runs" / "tiny"


def sets(*settings: str) -> list[str]:
    return [part for setting in settings for part in ("--set", setting)]


def audited(folder: Path) -> tuple[int, int, int]:
    data = data_of(cli("audit", "--json", cwd=folder).stdout, "streamrl.audit/2")
    return data["trained"], data["lost"], data["twice"]


def lines(run: Path, role: str) -> list[dict[str, object]]:
    return [orjson.loads(line) for line in (run / "metrics" / f"{role}.jsonl").read_bytes().splitlines()]


def named(folder: Path) -> dict[str, torch.Tensor]:
    from transformers import AutoModelForCausalLM

    return dict(AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).named_parameters())


def test_a_run_that_trains_an_adapter_goes_on(tiny: Path, tmp_path: Path):
    run = up(tiny, tmp_path, "learner.steps=2")
    first = named(run / "model")
    up(tiny, tmp_path, "learner.steps=4", resume=True)
    assert audited(tmp_path) == (16, 0, 0)
    steps = [line for line in lines(run, "learner.0") if "publish_kind" in line]
    # The behaviour log-probabilities of the engine are the learner's under the adapter.
    assert all(abs(float(line["ratio_mean"]) - 1) < 0.2 for line in steps if "ratio_mean" in line)
    # What the newest version holds is what the learner exports.
    manifest = list(versions(run / "weights").values())[-1]
    held = map_version(run / "weights" / manifest.folder, manifest).tensors
    base, exported = named(tiny / "model"), named(run / "model")
    for name, tensor in held.items():
        np.testing.assert_allclose(tensor.float(), exported[name].detach(), rtol=1e-5, atol=1e-6)
    assert torch.equal(exported["model.embed_tokens.weight"], base["model.embed_tokens.weight"])
    assert any(not torch.equal(tensor, first[name]) for name, tensor in exported.items())
    assert (run / "model" / "adapter" / "adapter_config.json").exists()


def test_versions_with_the_adapter_merged_in(tiny: Path, tmp_path: Path):
    run = up(tiny, tmp_path, "learner.lora.dora=true", "learner.steps=2", "learner.ranks=2", "weights.transport=shm")
    assert audited(tmp_path) == (8, 0, 0)
    assert {line["publish_kind"] for line in lines(run, "learner.0") if "publish_kind" in line} == {"full"}
    assert (run / "model" / "adapter" / "adapter_model.safetensors").exists()
    base, exported = named(tiny / "model"), named(run / "model")
    assert any(not torch.equal(exported[name], base[name]) for name in base)
