"""The tools demo as a user runs it: it learns to use its tool, its audit is clean, transformers agrees with it."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.test_demo import ROOT, audit, summary_of

CALL = re.compile(r'<tool_call>{"name": "look_up", "arguments": {"key": "(\w+)"}}</tool_call>')


def plain_accuracy(model_dir: Path, rows: list[dict[str, Any]]) -> float:
    """Share of right answers over turns with transformers' own `generate`, the tool played by hand."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model_dir)
    model = AutoModelForCausalLM.from_pretrained(model_dir).eval()
    torch.manual_seed(0)

    def said(texts: list[str]) -> list[str]:
        prompts = tokenizer(texts, return_tensors="pt", add_special_tokens=False)  # all of the same length
        output = model.generate(**prompts, max_new_tokens=12, do_sample=True, temperature=1.0, top_k=0, top_p=1.0)
        return [tokenizer.decode(ids).replace("<pad>", "") for ids in output[:, prompts["input_ids"].shape[1] :]]

    asked = [f"<|user|>{row['messages'][0]['content']}<|assistant|>" for row in rows]
    first = said(asked)
    right = sum(text == f"{row['answer']}<eos>" for text, row in zip(first, rows, strict=True))
    going_on, answers = [], []
    for prompt, text, row in zip(asked, first, rows, strict=True):
        call = CALL.fullmatch(text.removesuffix("<eos>"))
        if call is not None and call[1] in row["numbers"]:
            going_on.append(f"{prompt}{text}<|tool|>{row['numbers'][call[1]]}<|assistant|>")
            answers.append(row["answer"])
    return (right + sum(text == f"{answer}<eos>" for text, answer in zip(said(going_on), answers, strict=True))) / len(
        rows
    )


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_tools_demo_learns_and_its_figures_are_true(tmp_path: Path, tools_cache: Path):
    """With the settings of `make demo-tools`, but for the goal, which is a shorter way."""
    asked = subprocess.run(["make", "-n", "demo-tools"], cwd=ROOT, capture_output=True, text=True, check=True)
    assert "examples/tools/run.yaml --fresh --on local --set seed=0 --set learner.ranks=1" in asked.stdout
    run_dir = tmp_path / "demo"
    command = [sys.executable, "-m", "streamrl", "up", str(ROOT / "examples/tools/run.yaml"), "--run", str(run_dir)]
    environ = {**os.environ, "NO_COLOR": "1"}
    goal = ["--set", "learner.stop_at_accuracy=0.7"]
    subprocess.run([*command, *goal, "--screen", "plain"], check=True, env=environ, timeout=800)
    summary = summary_of(run_dir)
    assert 0.28 <= summary["accuracy_before"] <= 0.48
    assert summary["accuracy_after"] >= 0.6, "it ends at 0.7 on 128 prompts, whose standard deviation is 4 points"
    assert summary["samples_spanning_versions"] > 0
    rows = [json.loads(line) for line in (tools_cache / "held_out.jsonl").read_text().splitlines()]
    assert (
        abs(plain_accuracy(run_dir / "model", rows) - summary["accuracy_after"]) <= 0.045
    )  # three standard deviations
    assert summary["groups_trained"] == audit(run_dir)["trained"] == summary["steps"] * 16


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_agent_example_plays_the_same_task_through_the_endpoint(tmp_path: Path, tools_cache: Path):
    """From another directory, and without an environment that is active."""
    command = [sys.executable, "-m", "streamrl", "episode", "test", "--file", str(ROOT / "examples/agent/run.yaml")]
    sets = [f"model.path={tools_cache}/model", f"data.train={tools_cache}/train.jsonl", "sampling.temperature=0.2"]
    words = [word for value in sets for word in ("--set", value)]
    done = subprocess.run([*command, *words, "-n", "4", "--json"], cwd=tmp_path, capture_output=True, check=False)
    assert done.returncode == 0, (done.stdout, done.stderr)
    played = json.loads(done.stdout)["data"]["episodes"]
    called = [each for each in played if len(each["turns"]) == 3]
    assert called, "with this seed, some of them use the tool"
    for each in called:
        assert [turn["parent"] for turn in each["turns"]] == [-1, 0, 1], "one branch, which continues the prompt"
        assert each["turns"][1]["tools"][0]["name"] == "look_up"
        assert each["stop"] == "completed"
