"""The staleness experiment runs, goes on where it was, and reports; with sizes that say nothing."""

import json
import subprocess
import sys
from pathlib import Path

import orjson
import pytest

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"
TINY = ["--steps", "2", "--every", "1", "--groups", "2", "--size", "2", "--prompts", "4", "--final-prompts", "8"]


def run(folder, *arguments):
    command = [sys.executable, BENCHMARKS / "staleness.py", *TINY, "--seeds", "0", *arguments]
    command += ["--results", folder / "cells.jsonl", "--json", folder / "found.json", "--docs", folder / "docs"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=250, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return orjson.loads((folder / "found.json").read_bytes())


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_a_grid_is_run_once_and_reported(tmp_path):
    first = run(tmp_path, "--algorithms", "on_policy,high_staleness", "--staleness", "0,16", "--jobs", "2")
    assert first["ran"] == 3  # on_policy is the cell of staleness 0 alone
    assert not first["failed"]
    lines = [json.loads(line) for line in (tmp_path / "cells.jsonl").read_text().splitlines()]
    assert {(line["algorithm"], line["staleness"]) for line in lines} == {
        ("on_policy", 0),
        ("high_staleness", 0),
        ("high_staleness", 16),
    }
    for line in lines:
        assert [step for step, _ in line["accuracy"]] == [0, 1, 2]
        # the second step is one version behind, unless it must be on-policy
        assert line["series"]["age"] == [0.0, float(line["staleness"] > 0)]
        assert 0 <= line["final"] <= 1
    again = run(tmp_path, "--algorithms", "on_policy,high_staleness", "--staleness", "0,16")
    assert again["ran"] == 0
    assert again["rows"] == first["rows"]
    part = run(tmp_path, "--algorithms", "high_staleness,naive", "--staleness", "16", "--dry", "--report")
    assert [row["algorithm"] for row in part["rows"]] == ["high_staleness"]
    assert (tmp_path / "docs" / "staleness.png").read_bytes().startswith(b"\x89PNG")


def test_the_tables_of_a_report(monkeypatch):
    monkeypatch.syspath_prepend(BENCHMARKS)
    import staleness_report as report

    line = {"algorithm": "on_policy", "rule": "own", "lr": 1e-4, "steps": 3, "settings": [], "staleness": 0, "seed": 0}
    fresh = line | {"final": 0.96, "accuracy": [[0, 0.4], [1, 0.91], [2, 0.89], [3, 0.95]]}
    old = fresh | {"algorithm": "high_staleness", "staleness": 16, "final": 0.9, "accuracy": [[0, 0.4], [3, 0.89]]}
    text = report.tables([fresh, old])
    assert "| `on_policy` | 0 | 0.960 | 0.950 | 1 | 0.890 |" in text
    assert "| `high_staleness` | 0 | 0.900 | 0.890 | - | - |" in text
    assert "93.8%" in text
    assert "not reached" in text
