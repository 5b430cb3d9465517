"""Reward functions that come with trl, unchanged, through `adapter: trl`."""

import json
import os
import subprocess
from pathlib import Path

import pytest

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]


def test_functions_of_trl_score_the_same_through_the_adapter(trl_python):
    script = Path(__file__).parent / "rewards_side.py"
    environ = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    done = subprocess.run([trl_python, script], env=environ, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["adapted"] == found["direct"]
    assert found["direct"] == [[1.0, 0.0, 0.0], [0.0, -0.5, -1.0], pytest.approx([-0.4, -6 / 7, 0.0])]
