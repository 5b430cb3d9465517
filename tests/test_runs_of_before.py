"""Runs and checkpoints that earlier code wrote are read, resumed and exported by this code.

`tests/data/run-2026-11-22.tar.xz` was written on that day, before the packages were laid out anew: `case/run.yaml` with
its model, prompts and reward; `case/runs/old`, stopped by SIGTERM after step 11 with groups in flight (critic, frozen
reference, averaged weights, deltas, archive); `case/runs/two`, of which only the checkpoint of two ranks is kept.
"""

from __future__ import annotations

import json
import tarfile
from pathlib import Path
from typing import Any

import pytest

from streamrl.runfile import load, read_saved, save
from tests.cli.run_kit import cli, data_of, process

MADE_IN = b"/tmp/w/old/case"
ARCHIVE = Path(__file__).parent / "data" / "run-2026-11-22.tar.xz"


@pytest.fixture
def case(tmp_path: Path) -> Path:
    """The directory as it was, at another path: the paths within are changed."""
    with tarfile.open(ARCHIVE) as files:
        files.extractall(tmp_path, filter="data")
    folder = tmp_path / "case"
    for file in (*folder.glob("runs/*/run.json"), *folder.glob("runs/*/checkpoints/*/meta.json")):
        file.write_bytes(file.read_bytes().replace(MADE_IN, bytes(folder)))
    return folder


def ok(*arguments: str) -> str:
    done = cli(*arguments)
    assert done.returncode == 0, done
    return done.stdout


def audit(run: str) -> dict[str, Any]:
    """Counters of an audit that found nothing wrong."""
    found = data_of(ok("audit", "--run", run, "--json"), "streamrl.audit/2")
    assert (found["lost"], found["twice"], found["faults"], found["unproved"]) == (0, 0, [], [])
    return found


def test_it_is_looked_at(case: Path) -> None:
    run = str(case / "runs" / "old")
    found = audit(run)
    assert (found["checkpoint"], found["admitted"], found["trained"], found["live"]) == ("1-11", 22, 22, 0)
    assert (found["held_out"]["admitted"], found["evaluated"], found["held_out"]["live"]) == (12, 8, 4)
    trained = data_of(ok("trace", "9", "--run", run, "--json"), "streamrl.trace/1")
    assert trained["state"] == "trained"
    assert trained["record"] == {"gid": 9}  # the metrics of that day do not say its step
    assert [response["score"] for response in trained["responses"]] == [1.0, 0.0, 0.0, 0.0]
    ok("archive", "export", "--run", run, "--out", str(case / "rows.jsonl"))
    rows = [json.loads(line) for line in (case / "rows.jsonl").read_text().splitlines()]
    assert len(rows) == 88  # 22 groups of 4
    assert rows[0]["text"] == "XBatd33"
    assert rows[0]["parts"] == {"spread:spread": 1.0, "length": 0.0, "length/length": 8.0}


@pytest.mark.parametrize("which", ["old", "two"])
def test_its_checkpoint_is_exported(case: Path, which: str) -> None:
    import transformers

    for kind in ((), ("--ema",)):
        out = case / f"out{len(kind)}"
        ok("export", "--run", str(case / "runs" / which), "--out", str(out), *kind)
        assert transformers.AutoModelForCausalLM.from_pretrained(out).config.hidden_size == 16


def test_a_configuration_that_is_refused_now_is_read_as_what_takes_its_place(tmp_path: Path) -> None:
    path = tmp_path / "run.json"
    agent, judge = "episode.agent={command: [a]}", "reward_models.judge={model: m}"
    save(load(None, [agent, judge, "learner.lora.rank=8", "weights.transport=collective"], {}), path)
    saved = json.loads(path.read_bytes())
    config = saved["config"]
    config["reward_models"]["judge"] |= {"sleep": True, "wake_at": 3, "wake_after": 1.0}
    config["episode"]["agent"]["keep"] = "used"
    config["learner"]["lora"]["publish"] = "adapter"
    config["weights"]["delta"]["enabled"] = True
    path.write_text(json.dumps(saved))
    read = read_saved(path).config
    assert not read.reward_models["judge"].sleep
    assert (read.engine.kind, read.learner.lora.publish, read.weights.delta.enabled) == ("hf", "merged", False)
    config["rollout"]["placement"] = "colocated"
    config["engine"]["kind"] = "vllm"
    path.write_text(json.dumps(saved | {"config": config | {"weights": {}}}))
    read = read_saved(path).config
    assert read.reward_models["judge"].sleep
    assert read.learner.lora.publish == "adapter"


@pytest.mark.slow
def test_it_is_resumed(case: Path) -> None:
    run = str(case / "runs" / "old")
    command = ("up", str(case / "run.yaml"), "--resume", "--run", run, "--set", "learner.steps=14", "--screen", "plain")
    done = process(*command, seconds=120)
    assert done.returncode == 0, done
    assert audit(run)["trained"] == 28
    assert data_of(ok("trace", "27", "--run", run, "--json"), "streamrl.trace/1")["record"]["step"] == 14
