"""trl's side of the race: `GRPOTrainer` on the sort task until its held-out accuracy reaches the goal.

    .crosscheck/bin/python benchmarks/race_trl.py OPTIONS

Everything that is timed is trl's and transformers' own: generation, loss, clipping, AdamW. After each step the clock
stands still while the model answers held-out prompts, so that trl pays nothing for measuring. OPTIONS is JSON: cache
(of the example), seed, goal, prompts (of a measurement), final_prompts, steps, lr, warmup_steps, threads, precision,
attention, rows (of a micro-batch), groups, size, max_new_tokens. One line of JSON comes out.
"""

from __future__ import annotations

import json
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import transformers
import trl
from datasets import Dataset
from train_lines import Lines
from trl_setup import model_of, prepare, racing


class HeldOut:
    """Sampled accuracy on held-out prompts."""

    def __init__(self, cache: Path, tokenizer: Any, max_new_tokens: int) -> None:
        self._rows = [json.loads(line) for line in (cache / "held_out.jsonl").read_text().splitlines()]
        self._tokenizer, self._limit = tokenizer, max_new_tokens

    def accuracy(self, model: Any, count: int) -> float:
        """Share of right responses to the first `count` prompts, sampled once each."""
        rows = self._rows[:count]
        batch = self._tokenizer([row["prompt"] for row in rows], return_tensors="pt", padding=True, padding_side="left")
        model.eval()
        with torch.no_grad():
            output = model.generate(
                **batch, max_new_tokens=self._limit, do_sample=True, temperature=1.0, top_k=0, top_p=1.0
            )
        model.train()
        width = batch["input_ids"].shape[1]
        return sum(map(self._is_right, rows, output[:, width:].tolist())) / count

    def _is_right(self, row: dict[str, str], ids: list[int]) -> bool:
        end = self._tokenizer.eos_token_id
        return end in ids and self._tokenizer.decode(ids[: ids.index(end)]) == row["answer"]


class Clock(transformers.TrainerCallback):
    """Measures after each step, with the clock stopped, and ends the training at the goal."""

    def __init__(self, held_out: HeldOut, options: dict[str, Any]) -> None:
        self._held_out, self._options = held_out, options
        self._paused = 0.0
        self._began = 0.0
        self.curve: list[tuple[int, float, float]] = []

    def on_train_begin(self, *_: Any, **__: Any) -> None:
        """Start the clock: model and data are loaded."""
        self._began = time.perf_counter()

    def on_step_end(self, _: Any, state: Any, control: Any, *, model: Any, **__: Any) -> None:
        """Measure; the seconds of the measurement do not count."""
        now = time.perf_counter()
        accuracy = self._held_out.accuracy(model, self._options["prompts"])
        self.curve.append((state.global_step, now - self._began - self._paused, accuracy))
        self._paused += time.perf_counter() - now
        if accuracy >= self._options["goal"]:  # never False: that would take back the trainer's own end
            control.should_training_stop = True


def reward(completion_ids: list[list[int]], completions: list[str], answer: list[str], **_: Any) -> list[float]:
    """1 for exactly the answer with a sampled end."""
    return [
        float(ids[-1] == END and text == right)
        for ids, text, right in zip(completion_ids, completions, answer, strict=True)
    ]


END = 2


def main(options: dict[str, Any]) -> None:
    lines = Lines()
    prepare(options)
    cache = Path(options["cache"])
    tokenizer = transformers.AutoTokenizer.from_pretrained(cache / "model")
    data = [json.loads(line) for line in (cache / "train.jsonl").read_text().splitlines()]
    clock = Clock(HeldOut(cache, tokenizer, options["max_new_tokens"]), options)
    with tempfile.TemporaryDirectory() as folder:
        trainer = trl.GRPOTrainer(
            model=model_of(cache / "model", options),
            reward_funcs=reward,
            args=racing(options, folder),
            train_dataset=Dataset.from_list(data),
            processing_class=tokenizer,
            callbacks=[clock],
        )
        trainer.train()
    _, seconds, accuracy = clock.curve[-1]
    lines.ready(
        trl=trl.__version__,
        reached=accuracy >= options["goal"],
        seconds=seconds,
        steps=len(clock.curve),
        curve=clock.curve,
        accuracy_after=HeldOut(cache, tokenizer, options["max_new_tokens"]).accuracy(
            trainer.model, options["final_prompts"]
        ),
    )


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
