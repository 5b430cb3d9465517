"""Promise 2 over a long run: what Redis uses after a thousand steps is what it used after some hundred."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

BENCHMARK = Path(__file__).parents[2] / "benchmarks" / "memory.py"
KIB, MIB = 1 << 10, 1 << 20


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_thousand_steps_leave_no_memory_behind(tmp_path: Path):
    """The benchmark itself asserts that no group was lost or trained twice; the bounds are asserted here."""
    file = tmp_path / "memory.json"
    command = [sys.executable, str(BENCHMARK), "--steps", "1000", "--json", str(file)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode == 0, done.stderr
    found = json.loads(file.read_text())
    assert found["steps"] >= 1000
    assert found["live_max"] <= found["hard_cap"]
    assert found["held_out_live_max"] <= found["held_out_cap"]
    # Drained, a run leaves its newest manifests and three bits for each group that was dropped; 40 bytes for each
    # group or restart would be 80 KiB from half-way on.
    drained, keys, peak = found["drained_bytes"], found["drained_keys_bytes"], found["peak_bytes"]
    assert keys["100%"] - keys["10%"] < 8 * KIB
    assert drained["100%"] - drained["50%"] < 64 * KIB
    assert set(found["keys"]["100%"]) <= set(found["keys"]["50%"])
    assert peak["100%"] < drained["10%"] + 1.1 * found["payload_bytes_at_hard_cap"] + 2 * MIB
    assert found["weights_max"] <= 200
    assert found["consumers_max"] <= 12
    assert found["dead_max"] < 2 * found["max_dead"]
    assert found["aof"]["rewrites"] >= 1
    assert found["aof"]["max_bytes"] < found["aof"]["written"] / 2
    # The run was one in which there was something to leave behind.
    played = found["played"]
    assert played["killed"] >= 5
    assert played["restarts"] >= 25
    assert played["turns"] >= 500
    assert played["epoch"] >= 3
    assert found["groups"]["dropped"] >= 50
