"""trl's side of the race on pictures: `GRPOTrainer` with a vision-language model on the first turn of the look task.

    .crosscheck/bin/python benchmarks/images_trl.py OPTIONS

Everything that is timed is trl's and transformers' own: generation, loss, AdamW. The clock starts when the first step
begins. OPTIONS is JSON: example (its folder), seed, steps, lr, warmup_steps, threads, precision, attention, rows (of a
micro-batch), groups, size, max_new_tokens. One line of JSON comes out.
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import transformers
import trl
from datasets import Dataset
from episodes_trl import Clock, reward
from PIL import Image
from train_lines import Lines
from transformers.processing_utils import ProcessorMixin
from trl_setup import prepare, racing


class StillProcessor(transformers.Qwen2VLProcessor):
    """Qwen2-VL's without videos: the processor of these needs torchvision, which is not installed."""

    def __init__(self, image_processor: Any = None, tokenizer: Any = None, chat_template: str | None = None) -> None:
        self.image_token, self.video_token = "<|image_pad|>", "<|video_pad|>"
        self.image_token_id, self.video_token_id = map(
            tokenizer.convert_tokens_to_ids, (self.image_token, self.video_token)
        )
        ProcessorMixin.__init__(self, image_processor, tokenizer, chat_template=chat_template)


def rows_of(example: Path) -> list[dict[str, Any]]:
    """The first picture and question of each line, as `images_race.py` writes them for streamrl."""
    sys.path += [str(example), str(example.parents[1])]
    import look_task

    lines = [json.loads(line) for line in (example / "cache" / "train.jsonl").read_text().splitlines()]
    return [
        {
            "prompt": line["messages"],
            "image": Image.fromarray(look_task.draw(line["pictures"][0])),
            "answer": line["answer"][0],
        }
        for line in lines
    ]


def main(options: dict[str, Any]) -> None:
    lines = Lines()
    prepare(options)
    example, clock = Path(options["example"]), Clock()
    model = example / "cache" / "model"
    tokenizer = transformers.AutoTokenizer.from_pretrained(model)
    images = transformers.AutoImageProcessor.from_pretrained(model, backend="pil")
    loaded = transformers.AutoModelForImageTextToText
    with tempfile.TemporaryDirectory() as folder:
        trainer = trl.GRPOTrainer(
            model=loaded.from_pretrained(model, attn_implementation=options["attention"]),
            reward_funcs=reward,
            args=racing(options, folder),
            train_dataset=Dataset.from_list(rows_of(example)[: options["groups"] * options["steps"]]),
            processing_class=StillProcessor(images, tokenizer, tokenizer.chat_template),
            callbacks=[clock],
        )
        trainer.train()
    lines.ready(trl=trl.__version__, steps=len(clock.ends), ends=clock.ends, logged=trainer.state.log_history[-1:])


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
