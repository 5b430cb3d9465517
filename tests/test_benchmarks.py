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


@pytest.mark.slow
def test_weights_of_the_learner(tmp_path):
    found = run("weights.py", "--sizes", "0.002", "--rounds", "1", "--only", "learner", path=tmp_path / "l.json")
    assert len(found["learner"]) == 2
    assert all(figures["copy_per_cent_of_step"]["median"] > 0 for figures in found["learner"].values())


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_rewards(tmp_path):
    found = run("rewards.py", "--rounds", "1", "--groups", "12", "--only", "rule,http", path=tmp_path / "r.json")
    assert found["rule"]["worker_to_ledger"]["median"] > 0
    assert found["rule"]["worker_to_ledger_by_cpu"]["median"] > 0
    assert found["http"]["worker_to_generator"]["median"] > 0


@pytest.mark.slow
@pytest.mark.engines
@pytest.mark.timeout(300)
def test_engines(tmp_path):
    sizes = ["--rounds", "1", "--seconds", "1", "--settle", "0", "--width", "8", "--tokens", "16", "--size", "0.002"]
    found = run("engines.py", "--kinds", "sglang", *sizes, path=tmp_path / "e.json")
    assert found["sglang"]["rollout"]["ratio_to_bare"]["median"] > 0
    assert found["sglang"]["pause"]["ratio_still_to_update"]["median"] >= 1


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
