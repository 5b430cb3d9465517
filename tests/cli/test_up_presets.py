"""Whole small runs of every preset, and of ReMax, whose baseline is a greedy response of the engine."""

from __future__ import annotations

from pathlib import Path

import orjson
import pytest

from streamrl.config.presets import PRESETS
from streamrl.learner.lineage import read_record, record_file

from .run_kit import cli, data_of, process

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]
LONGEST = 300
"""Seconds for a whole run on busy cores."""


def up(tiny: Path, folder: Path, *settings: str) -> list[dict]:
    """A run of three steps; returns what the learner logged of them."""
    flags = [part for setting in ("learner.steps=3", *settings) for part in ("--set", setting)]
    done = process("up", str(tiny / "run.yaml"), "--screen", "plain", *flags, cwd=folder, seconds=LONGEST)
    assert done.returncode == 0, done.stdout + done.stderr
    audited = data_of(cli("audit", "--json", cwd=folder).stdout, "streamrl.audit/1")
    # Groups with equal rewards leave their step where the preset says so.
    assert (audited["trained"] + audited["dropped"], audited["lost"], audited["twice"]) == (12, 0, 0)
    metrics = (folder / "runs" / "tiny" / "metrics" / "learner.0.jsonl").read_bytes().splitlines()
    return [line for line in map(orjson.loads, metrics) if "grad_norm" in line]


@pytest.mark.parametrize("name", PRESETS)
def test_each_preset_trains(tiny: Path, tmp_path: Path, name: str):
    steps = up(tiny, tmp_path, f"learner.preset={name}")
    assert [line["step"] for line in steps] == [1, 2, 3]
    assert not any(line["skipped"] for line in steps)
    said = cli("config", "show", "--run", str(tmp_path / "runs" / "tiny"), "--origin").stdout
    assert f"preset {name}" in said


def test_remax_has_a_greedy_response_for_every_prompt(tiny: Path, tmp_path: Path):
    steps = up(tiny, tmp_path, "learner.advantage.use=remax", "sampling.greedy_baseline=true")
    size = orjson.loads((tmp_path / "runs" / "tiny" / "run.json").read_bytes())["config"]["sampling"]["group_size"]
    assert all(sum(line["lengths_trained"].values()) == 4 * size for line in steps)
    file = record_file(1)
    frames = list(read_record(tmp_path / "runs" / "tiny", [(file, (tmp_path / "runs" / "tiny" / file).stat().st_size)]))
    assert len(frames) == 12
    assert all(len(frame["rewards"]) == size for frame in frames)
