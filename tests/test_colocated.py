"""Learner and engine on the same devices: a whole run in turns, also over the death of whoever has the turn."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent


def pid_of(run_dir: Path, role: str) -> int:
    """Process of a role, as the supervisor has written it down."""
    pid = json.loads((run_dir / "supervisor.json").read_text())["roles"][role]["pid"]
    assert isinstance(pid, int)
    return pid


def steps_of(run_dir: Path) -> int:
    """Steps that the learner has recorded."""
    path = run_dir / "metrics" / "learner.0.jsonl"
    return len(path.read_text().splitlines()) if path.exists() else 0


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_run_in_turns_survives_the_death_of_either_side(tmp_path: Path, sort_cache: Path):
    run_dir = tmp_path / "shared"
    settings = ["rollout.placement=colocated", "learner.ranks=2", "learner.steps=6", "lease.seconds=3"]
    settings += ["evaluation.every=0", "evaluation.final_prompts=0", "learner.stop_at_accuracy=null"]
    command = [sys.executable, "-m", "streamrl", "up", str(ROOT / "examples" / "sort" / "run.yaml")]
    command += ["--run", str(run_dir), "--screen", "plain", *(part for one in settings for part in ("--set", one))]
    process = subprocess.Popen(command, env={**os.environ, "NO_COLOR": "1"})
    try:
        for role, after in (("learner.0", 1), ("rollout.0", 2)):
            deadline = time.monotonic() + 240
            while steps_of(run_dir) < after:
                assert process.poll() is None
                assert time.monotonic() < deadline
                time.sleep(0.02)
            os.kill(pid_of(run_dir, role), signal.SIGKILL)
        assert process.wait(300) == 0
    finally:
        process.kill()
        process.wait()
    summary = json.loads((run_dir / "summary.json").read_text())
    assert summary["steps"] == 6
    assert summary["share_of_tokens_sampled_during_learner_steps"] < 0.02
    audit = subprocess.run([sys.executable, "-m", "streamrl", "audit", "--run", str(run_dir)], check=False)
    assert audit.returncode == 0
