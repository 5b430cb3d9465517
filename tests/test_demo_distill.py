"""The distillation demo as a user runs it: it reaches what rewards reach, with fewer samples."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.test_demo import ROOT, audit, summary_of

BY_REWARD = 2_560
"""Samples of the fastest of five runs of the sort demo to 0.9 (docs/start/demo.md)."""


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_student_reaches_what_rewards_reach_with_fewer_samples(tmp_path: Path, distill_cache: Path):
    """With the settings of `make demo-distill`, and without a measurement before."""
    asked = subprocess.run(["make", "-n", "demo-distill"], cwd=ROOT, capture_output=True, text=True, check=True)
    assert "examples/distill/run.yaml --fresh --on local --set seed=0 --set learner.ranks=1" in asked.stdout
    assert (distill_cache / "teacher" / "model.safetensors").exists()
    run_dir = tmp_path / "demo"
    command = [sys.executable, "-m", "streamrl", "up", str(ROOT / "examples/distill/run.yaml"), "--run", str(run_dir)]
    options = ["--screen", "plain", "--set", "evaluation.final_prompts=512"]
    subprocess.run([*command, *options], check=True, env={**os.environ, "NO_COLOR": "1"}, timeout=500)
    summary = summary_of(run_dir)
    assert summary["accuracy_before"] <= 0.5
    assert summary["accuracy_after"] >= 0.86, "it ends on 128 prompts, whose standard deviation is 2.7 points"
    assert summary["groups_trained"] == audit(run_dir)["trained"] == summary["steps"] * 64 < BY_REWARD
