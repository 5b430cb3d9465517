"""trl's side of the training benchmark, in its own environment: `GRPOTrainer.train()`, a step per line on stdin.

    .crosscheck/bin/python benchmarks/train_trl.py FOLDER OPTIONS

Everything is trl's and transformers' own: their loop, loss, metrics, clipping, AdamW. Only the generation is left out:
the samples are given, padded as `GRPOTrainer` pads what it generates. A step is timed from `on_step_begin` to
`on_step_end`: forward, backward, clipping and update. OPTIONS is JSON: threads, precision, attention, rows.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
import transformers
import trl
from datasets import Dataset
from safetensors.torch import load_file
from train_lines import Lines
from trl_setup import model_of, prepare, training

STEPS = 1_000_000


class StepOnOrder(transformers.TrainerCallback):
    """Holds the loop before each step until it is asked for."""

    def __init__(self, lines: Lines) -> None:
        self._lines = lines
        self._timing: Any = None

    def on_train_begin(self, *_: Any, **__: Any) -> None:
        """Say that the loop stands before its first step."""
        self._lines.ready(trl=trl.__version__)

    def on_step_begin(self, *_: Any, **__: Any) -> None:
        """Wait for the order, and start the clock."""
        if not self._lines.wait():
            raise SystemExit
        self._timing = self._lines.timed()
        self._timing.__enter__()

    def on_step_end(self, *_: Any, **__: Any) -> None:
        """Report the time of forward, backward, clipping and update."""
        self._timing.__exit__(None, None, None)


class GivenSamples(trl.GRPOTrainer):
    """A trainer whose samples are given."""

    samples: dict[str, torch.Tensor]

    def _generate_and_score_completions(self, _: Any) -> dict[str, torch.Tensor]:
        return dict(self.samples)


def main(folder: Path, options: dict[str, Any]) -> None:
    lines = Lines()
    prepare(options)
    samples = load_file(folder / "padded.safetensors")
    count = len(samples["prompt_ids"])
    arguments = training(
        options,
        folder / "trl",
        count,
        max_completion_length=samples["completion_ids"].shape[1],
        max_steps=STEPS,
        learning_rate=1e-4,
        lr_scheduler_type="constant",
    )
    trainer = GivenSamples(
        model=model_of(folder / "model", options),
        reward_funcs=lambda completions, **_: [0.0] * len(completions),
        args=arguments,
        train_dataset=Dataset.from_dict({"prompt": ["a"] * count}),
        processing_class=transformers.AutoTokenizer.from_pretrained(folder / "model"),
        callbacks=[StepOnOrder(lines)],
    )
    trainer.samples = samples
    trainer.train()


if __name__ == "__main__":
    main(Path(sys.argv[1]), json.loads(sys.argv[2]))
