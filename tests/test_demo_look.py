"""The look demo as a user runs it: it learns to answer about pictures, and without them it knows nothing."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.test_demo import ROOT, audit, summary_of


def plain_accuracy(model_dir: Path, rows: list[dict[str, Any]], pictures: list[tuple[str, str]]) -> float:
    """Share of right answers with transformers' own `generate`, where each row is shown these pictures."""
    import torch
    from transformers import AutoImageProcessor, AutoModelForImageTextToText, AutoTokenizer

    sys.path.insert(0, str(ROOT / "examples" / "look"))
    from look_task import SQUARES, draw

    tokenizer = AutoTokenizer.from_pretrained(model_dir)
    processor = AutoImageProcessor.from_pretrained(model_dir, backend="pil")
    model = AutoModelForImageTextToText.from_pretrained(model_dir).eval()
    torch.manual_seed(0)
    mark = f"<|vision_start|>{'<|image_pad|>' * SQUARES}<|vision_end|>"
    chats = [""] * len(rows)
    for turn in range(2):
        chats = [
            f"{chat}<|user|>{mark}{row['questions'][turn]}<|assistant|>" for chat, row in zip(chats, rows, strict=True)
        ]
        ids = tokenizer(chats, return_tensors="pt", add_special_tokens=False, padding=True, padding_side="left")
        shown = [draw(colours) for each in pictures for colours in each[: turn + 1]]
        output = model.generate(
            **ids,
            **processor(shown, return_tensors="pt"),
            mm_token_type_ids=(ids["input_ids"] == model.config.image_token_id).int(),
            max_new_tokens=4,
            do_sample=True,
            temperature=1.0,
            top_k=0,
            top_p=1.0,
        )
        said = [tokenizer.decode(row).replace("<pad>", "") for row in output[:, ids["input_ids"].shape[1] :]]
        chats = [chat + text for chat, text in zip(chats, said, strict=True)]
    return sum(text == f"{row['answer']}<eos>" for text, row in zip(said, rows, strict=True)) / len(rows)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_look_demo_learns_and_its_figures_are_true(tmp_path: Path, look_cache: Path):
    """With the settings of `make demo-look`."""
    asked = subprocess.run(["make", "-n", "demo-look"], cwd=ROOT, capture_output=True, text=True, check=True)
    assert "examples/look/run.yaml --fresh --on local --set seed=0 --set learner.ranks=1" in asked.stdout
    run_dir = tmp_path / "demo"
    command = [sys.executable, "-m", "streamrl", "up", str(ROOT / "examples/look/run.yaml"), "--run", str(run_dir)]
    subprocess.run([*command, "--screen", "plain"], check=True, env={**os.environ, "NO_COLOR": "1"}, timeout=800)
    summary = summary_of(run_dir)
    assert 0.3 <= summary["accuracy_before"] <= 0.42
    assert summary["accuracy_after"] >= 0.9
    assert summary["groups_trained"] == audit(run_dir)["trained"] == summary["steps"] * 16
    rows = [json.loads(line) for line in (look_cache / "held_out.jsonl").read_text().splitlines()][:512]
    pictures = [tuple(row["pictures"]) for row in rows]
    right = plain_accuracy(run_dir / "model", rows, pictures)
    assert abs(right - summary["accuracy_after"]) <= 0.045  # three standard deviations
    chance = plain_accuracy(run_dir / "model", rows, [*pictures[1:], pictures[0]])
    assert chance <= 0.06, "pictures of another line: both colours are right once in 64 times"
