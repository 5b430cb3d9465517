"""The demo as a user runs it: it learns, it overlaps, its audit is clean, and plain transformers agrees with it.

Also with learner and engine on the same devices, and over the death of whoever has the turn.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parent.parent
KEYS = {
    *("accuracy_before", "accuracy_after", "train_seconds", "steps", "samples_per_second"),
    *("completion_tokens_per_second", "learner_idle_fraction", "rollout_idle_fraction", "sources"),
    *("share_of_tokens_sampled_during_learner_steps", "samples_spanning_versions", "staleness_max", "staleness_mean"),
    "engine_gap",
    *("groups_admitted", "groups_trained", "groups_dropped", "groups_dead", "groups_evaluated", "samples_dead"),
}


DRAWS = 3
"""Responses per prompt, so that the three points are three standard deviations of the difference and more."""


def plain_accuracy(model_dir: Path, rows: list[dict[str, str]]) -> float:
    """Share of right answers when sampled with transformers' own `generate`, in batches of equal prompt length."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model_dir)
    model = AutoModelForCausalLM.from_pretrained(model_dir).eval()
    torch.manual_seed(0)
    lengths: dict[int, list[dict[str, str]]] = {}
    for row in rows:
        lengths.setdefault(len(row["prompt"]), []).append(row)
    right = 0
    for batch in lengths.values():
        same = batch * DRAWS
        prompts = tokenizer([row["prompt"] for row in same], return_tensors="pt")
        output = model.generate(**prompts, max_new_tokens=42, do_sample=True, temperature=1.0, top_k=0, top_p=1.0)
        for row, ids in zip(same, output[:, prompts["input_ids"].shape[1] :].tolist(), strict=True):
            ended = tokenizer.eos_token_id in ids
            answer = ids[: ids.index(tokenizer.eos_token_id)] if ended else ids
            right += ended and tokenizer.decode(answer) == row["answer"]
    return right / (DRAWS * len(rows))


@contextlib.contextmanager
def up(run_dir: Path, *overrides: str) -> Iterator[subprocess.Popen[bytes]]:
    """The process that runs it."""
    command = [sys.executable, "-m", "streamrl", "up", str(ROOT / "examples" / "sort" / "run.yaml")]
    options = ["--run", str(run_dir), "--screen", "plain"]
    sets = [word for override in overrides for word in ("--set", override)]
    with subprocess.Popen([*command, *options, *sets], env={**os.environ, "NO_COLOR": "1"}) as process:
        try:
            yield process
        finally:
            process.kill()


def summary_of(run_dir: Path) -> dict[str, float]:
    summary: dict[str, float] = json.loads((run_dir / "summary.json").read_text())
    print(summary)
    return summary


def audit(run_dir: Path) -> dict[str, Any]:
    """Of a run that lost nothing."""
    command = [sys.executable, "-m", "streamrl", "audit", "--json", "--run", str(run_dir)]
    done = subprocess.run(command, capture_output=True, check=False)
    assert done.returncode == 0, done.stdout
    data: dict[str, Any] = json.loads(done.stdout)["data"]
    assert (data["lost"], data["twice"], data["faults"]) == (0, 0, [])
    return data


def check(summary: dict[str, float], run_dir: Path, sort_cache: Path, goal: float) -> None:
    """It learned, training and sampling overlapped, the figures are true, nothing was lost."""
    assert set(summary) == KEYS
    assert 0.35 <= summary["accuracy_before"] <= 0.5
    assert summary["accuracy_after"] >= goal - 0.03, "it ends on 128 prompts, whose standard deviation is 2.7 points"
    assert summary["staleness_max"] >= 1
    assert summary["share_of_tokens_sampled_during_learner_steps"] > 0
    rows = [json.loads(line) for line in (sort_cache / "held_out.jsonl").read_text().splitlines()]
    assert abs(plain_accuracy(run_dir / "model", rows) - summary["accuracy_after"]) <= 0.03
    assert summary["groups_trained"] == audit(run_dir)["trained"] == summary["steps"] * 32
    assert (run_dir / "curve.png").stat().st_size > 10_000


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    "words",
    [
        [],
        pytest.param(["ENGINE=vllm", "RANKS=2"], marks=pytest.mark.engines),
    ],
    ids=["hf", "vllm with two ranks"],
)
def test_the_demo_learns_and_its_figures_are_true(tmp_path: Path, sort_cache: Path, words: list[str]):
    """With the settings of `make demo`, which installs the engine first; on servers it ends half-way."""
    asked = subprocess.run(["make", "-n", "demo", *words], cwd=ROOT, capture_output=True, text=True, check=True)
    said = asked.stdout.replace("\\\n", " ").split()
    overrides = [said[index + 1] for index, word in enumerate(said) if word == "--set"]
    assert f"learner.ranks={2 if 'RANKS=2' in words else 1}" in overrides
    if words and words[0].startswith("ENGINE="):
        kind = words[0].partition("=")[2]
        assert {f"engine.kind={kind}", f"name=demo-{kind}"} < set(overrides)
    goal = 0.6 if words else 0.9
    overrides.append(f"learner.stop_at_accuracy={goal}")
    with up(tmp_path / "demo", *overrides) as process:
        assert process.wait(800) == 0
    summary = summary_of(tmp_path / "demo")
    check(summary, tmp_path / "demo", sort_cache, goal)
    if not words:  # a server has few responses under way when it takes the few versions of half a run
        assert summary["samples_spanning_versions"] > 0


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
    settings = ["rollout.placement=colocated", "learner.ranks=2", "learner.steps=4", "lease.seconds=3"]
    settings += ["evaluation.every=0", "evaluation.final_prompts=0", "learner.stop_at_accuracy=null"]
    settings += ["learner.groups_per_step=16"]
    with up(run_dir, *settings) as process:
        for role, after in (("learner.0", 1), ("rollout.0", 2)):
            deadline = time.monotonic() + 240
            while steps_of(run_dir) < after:
                assert process.poll() is None
                assert time.monotonic() < deadline
                time.sleep(0.02)
            os.kill(pid_of(run_dir, role), signal.SIGKILL)
        assert process.wait(300) == 0
    summary = summary_of(run_dir)
    assert summary["steps"] == 4
    assert summary["share_of_tokens_sampled_during_learner_steps"] < 0.02
    audit(run_dir)
