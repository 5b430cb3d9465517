"""The benchmarks run, with sizes that say nothing, and write what their tables show."""

import subprocess
import sys
from pathlib import Path

import orjson
import pytest

from tests.needs import missing

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"


@pytest.fixture
def trl():
    if not (BENCHMARKS.parent / ".crosscheck").exists():
        missing("no .crosscheck: `make crosscheck` makes it")


def run(script, *arguments, path):
    command = [sys.executable, BENCHMARKS / script, *arguments, "--json", path]
    done = subprocess.run(command, capture_output=True, text=True, timeout=250, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return orjson.loads(path.read_bytes())


@pytest.mark.benchmarks
@pytest.mark.slow
def test_weights(tmp_path):
    found = run("weights.py", "--sizes", "0.002", "--rounds", "2", "--only", "shm,http,delta", path=tmp_path / "w.json")
    assert found["facts"]["commit"]
    for dtype in ("bfloat16", "float32"):
        figures = found["shm"][f"0.002 GB {dtype}"]
        assert len(figures["ratio_to_plain_copy"]["runs"]) == len(figures["ratio_pause_to_copy"]["runs"]) == 2
    assert found["http"]["0.002 GB"]["ratio_to_bare"]["median"] > 0
    delta = found["delta"]["0.002 GB"]
    assert delta["bit_for_bit"]
    assert delta["per_cent_changed"]["median"] == pytest.approx(1.2, abs=0.1)
    assert delta["per_cent_of_full_bytes"]["greatest"] < 3


@pytest.mark.benchmarks
@pytest.mark.slow
def test_what_a_card_does(tmp_path):
    found = run("gpu.py", "--device", "cpu", "--tiny", path=tmp_path / "g.json")
    assert not [part for part in found.values() if isinstance(part, dict) and "error" in part]
    assert found["layouts"]["greatest_difference"] < 1e-4
    assert found["engine"]["logprob_difference"]["greatest"] < 1e-4


@pytest.mark.benchmarks
@pytest.mark.slow
def test_weights_of_the_learner(tmp_path):
    found = run("weights.py", "--sizes", "0.002", "--rounds", "1", "--only", "learner", path=tmp_path / "l.json")
    assert len(found["learner"]) == 2
    assert all(figures["copy_per_cent_of_step"]["median"] > 0 for figures in found["learner"].values())


@pytest.mark.benchmarks
@pytest.mark.slow
@pytest.mark.timeout(300)
def test_rewards(tmp_path):
    found = run("rewards.py", "--rounds", "1", "--groups", "12", "--only", "rule,http", path=tmp_path / "r.json")
    assert found["rule"]["worker_to_ledger"]["median"] > 0
    assert found["rule"]["worker_to_ledger_by_cpu"]["median"] > 0
    assert found["http"]["worker_to_generator"]["median"] > 0


@pytest.mark.benchmarks
@pytest.mark.slow
@pytest.mark.engines
@pytest.mark.timeout(300)
def test_engines(tmp_path):
    sizes = ["--rounds", "1", "--seconds", "1", "--settle", "0", "--width", "8", "--tokens", "16", "--size", "0.002"]
    found = run("engines.py", "--kinds", "vllm", *sizes, path=tmp_path / "e.json")
    assert found["vllm"]["rollout"]["ratio_to_bare"]["median"] > 0
    assert found["vllm"]["pause"]["ratio_still_to_update"]["median"] >= 1


@pytest.mark.benchmarks
@pytest.mark.slow
@pytest.mark.timeout(400)
def test_train(tmp_path, trl):
    found = run("train.py", "--quick", "--kinds", "sort", "--paths", "onednn", path=tmp_path / "t.json")
    figures = found["sort"]["onednn"]
    assert len(figures["speedup_vs_trl"]["runs"]) == 2
    assert figures["tokens_streamrl_computes"] > 0
    assert figures["tokens_trl_computes"] > figures["tokens"]
    assert found["speedup_vs_trl"] == figures["speedup_vs_trl"]["median"]
    assert found["share_of_dense"] > 0


@pytest.mark.benchmarks
@pytest.mark.slow
@pytest.mark.timeout(400)
def test_race(tmp_path, trl, sort_cache):
    picture = tmp_path / "r.png"
    found = run("race.py", "--quick", "--picture", str(picture), path=tmp_path / "r.json")
    [pair] = found["pairs"]
    assert pair["streamrl"]["steps"] == pair["trl"]["steps"] == 2
    assert 0.2 < pair["trl"]["accuracy_after"] < 0.7
    assert found["speedup_vs_trl"]["median"] > 0
    assert picture.stat().st_size > 10_000


@pytest.mark.benchmarks
@pytest.mark.slow
@pytest.mark.timeout(400)
def test_a_grid_of_staleness_is_run_once_and_reported(tmp_path):
    def run_grid(*arguments):
        sizes = [
            "--steps",
            "2",
            "--every",
            "1",
            "--groups",
            "2",
            "--size",
            "2",
            "--prompts",
            "4",
            "--final-prompts",
            "8",
        ]
        places = ["--results", tmp_path / "cells.jsonl", "--docs", tmp_path / "docs", "--seeds", "0"]
        return run("staleness.py", *sizes, *places, *arguments, path=tmp_path / "found.json")

    first = run_grid("--algorithms", "on_policy,high_staleness", "--staleness", "0,16", "--jobs", "2")
    assert first["ran"] == 3  # on_policy is the cell of staleness 0 alone
    assert not first["failed"]
    lines = [orjson.loads(line) for line in (tmp_path / "cells.jsonl").read_text().splitlines()]
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
    again = run_grid("--algorithms", "on_policy,high_staleness", "--staleness", "0,16")
    assert again["ran"] == 0
    assert again["rows"] == first["rows"]
    part = run_grid("--algorithms", "high_staleness,naive", "--staleness", "16", "--dry", "--report")
    assert [row["algorithm"] for row in part["rows"]] == ["high_staleness"]
    assert (tmp_path / "docs" / "staleness.png").read_bytes().startswith(b"\x89PNG")


def test_the_tables_of_a_report_on_staleness(monkeypatch):
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


@pytest.mark.benchmarks
@pytest.mark.slow
def test_episodes(tmp_path):
    sizes = ("--only", "sleep,memory", "--rounds", "1", "--seconds", "1")
    found = run("episodes.py", *sizes, path=tmp_path / "e.json")
    assert found["sleep"]["sleeping_to_at_once"]["median"] > 0
    assert found["memory"]["resident_mb"] > found["memory"]["before_mb"]


@pytest.mark.benchmarks
@pytest.mark.slow
@pytest.mark.timeout(600)
def test_images_race(tmp_path, trl, look_cache):
    found = run("images_race.py", "--rounds", "1", "--steps", "2", path=tmp_path / "i.json")
    assert found["speedup_vs_trl"]["median"] > 0
    assert found["two_turns_samples_per_second"]["median"] > 0


@pytest.mark.benchmarks
def test_data(tmp_path):
    found = run("data.py", "--lines", "3000", path=tmp_path / "d.json")
    assert found["lines"] == 3000
    assert found["start_seconds"] > 0
