"""trl's side of the race of episodes: `GRPOTrainer` with an `environment_factory` on the tools task.

    .crosscheck/bin/python benchmarks/episodes_trl.py OPTIONS

Everything that is timed is trl's and transformers' own: generation, the tool, the second turn, loss, AdamW. The clock
starts when the first step begins. OPTIONS is JSON: example (its folder), seed, steps, lr, warmup_steps, threads,
precision, attention, rows (of a micro-batch), groups, size, max_new_tokens (of all turns). One line of JSON comes out.
"""

from __future__ import annotations

import importlib.util
import json
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import transformers
import trl
from datasets import Dataset
from train_lines import Lines
from trl_setup import model_of, prepare, racing

RESPONSES = {
    "defaults": {"role": "assistant"},
    "start_anchor": "<|assistant|>",
    "fields": {
        "tool_calls": {
            "open": "<tool_call>",
            "close_pattern": "</tool_call>",
            "repeats": True,
            "content": "json",
            "transform": {"type": "function", "function": "{content}"},
        },
        "content": {"close_pattern": "<eos>", "content": "text"},
    },
}
"""How the model of the example writes calls of tools, in the words of transformers."""


class Clock(transformers.TrainerCallback):
    """Times of the ends of steps, from the begin of the first."""

    def __init__(self) -> None:
        self._began = 0.0
        self.ends: list[float] = []

    def on_train_begin(self, *_: Any, **__: Any) -> None:
        """Start the clock: model and data are loaded."""
        self._began = time.perf_counter()

    def on_step_end(self, *_: Any, **__: Any) -> None:
        """Note the end of a step."""
        self.ends.append(time.perf_counter() - self._began)


def reward(completions: list[list[dict[str, Any]]], answer: list[str], **_: Any) -> list[float]:
    """1 if the last message is exactly the answer."""
    return [float(messages[-1].get("content") == right) for messages, right in zip(completions, answer, strict=True)]


def environment_of(example: Path) -> Any:
    """The class that both sides use, from its file."""
    spec = importlib.util.spec_from_file_location("my_tools", example / "my_tools.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)

    class ForTrl(module.LookUp):  # type: ignore[name-defined, misc]
        def reset(self, *, numbers: str, **_: Any) -> None:
            """Take the whole row, whose columns are of one type each; trl calls no `async` one."""
            self._numbers = json.loads(numbers)

    return ForTrl


def main(options: dict[str, Any]) -> None:
    lines = Lines()
    prepare(options)
    example, clock = Path(options["example"]), Clock()
    model = example / "cache" / "model"
    tokenizer = transformers.AutoTokenizer.from_pretrained(model)
    tokenizer.response_template = RESPONSES
    data = [json.loads(line) for line in (example / "cache" / "train.jsonl").read_text().splitlines()]
    data = [{**row, "prompt": row.pop("messages"), "numbers": json.dumps(row["numbers"])} for row in data]
    with tempfile.TemporaryDirectory() as folder:
        trainer = trl.GRPOTrainer(
            model=model_of(model, options),
            reward_funcs=reward,
            environment_factory=environment_of(example),
            args=racing(options, folder, max_tool_calling_iterations=2),
            train_dataset=Dataset.from_list(data),
            processing_class=tokenizer,
            callbacks=[clock],
        )
        trainer.train()
    calls = [entry for entry in trainer.state.log_history if "tools/call_frequency" in entry]
    lines.ready(trl=trl.__version__, steps=len(clock.ends), ends=clock.ends, logged=calls[-1:])


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
