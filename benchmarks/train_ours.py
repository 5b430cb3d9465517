"""Our sides of the training benchmark, a step per line on stdin: the actor's whole step, and a bare forward/backward.

    python benchmarks/train_ours.py actor|dense FOLDER OPTIONS

actor  `Actor.update_policy`: layout, forward, loss, backward, clipping, AdamW, statistics
dense  the plain Hugging Face model on as many tokens in one dense batch: rows of equal length, no padding, no mask, no
       loss but the sum of log-probabilities, no update
"""

from __future__ import annotations

import json
import logging
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from train_batches import CONTEXT, FIRST, VOCABULARY, Response, make_batch, through_model
from train_lines import Lines

from streamrl.config import RunConfig
from streamrl.learner.batch import TrainSample, pack
from streamrl.learner.policy import Actor
from streamrl.learner.ranks import Ranks


def main(side: str, folder: Path, options: dict[str, Any]) -> None:
    lines = Lines()
    logging.disable(logging.WARNING)
    transformers.logging.disable_progress_bar()
    torch.set_num_threads(options["threads"])
    batch = make_batch(options["kind"], options["groups"], options["size"])
    if side == "dense":
        torch.set_float32_matmul_precision(options["precision"])
        dense(lines, folder, options, batch)
    else:
        actor(lines, folder, options, batch)


def actor(lines: Lines, folder: Path, options: dict[str, Any], batch: list[Response]) -> None:
    config = RunConfig.model_validate(
        {
            "name": "bench",
            "model": {"path": str(folder / "model"), "context": CONTEXT, "attention": options["attention"]},
            "sampling": {"max_new_tokens": CONTEXT // 2, "group_size": options["size"]},
            "learner": {
                "threads": options["threads"],
                "matmul_precision": options["precision"],
                "groups_per_step": options["groups"],
                "tokens_per_microbatch": 2048,
                "lr": 1e-4,
                "betas": [0.9, 0.98],
            },
        }
    )
    samples = [sample_of(response) for response in batch]
    ranks = Ranks(rank=0, world=1, device=torch.device("cpu"), deadline=300)
    trained = Actor(config, ranks)
    trained.update_policy(samples)
    passes = pack(samples, trained.limits)
    lines.ready(computed_tokens=sum(part.input_ids.size for part in passes), passes=len(passes))
    lines.serve(lambda: trained.update_policy(samples))
    ranks.close()


def sample_of(response: Response) -> TrainSample:
    count = len(response.tokens)
    return TrainSample(
        group_id=response.group,
        prompt=np.asarray(response.prompt, dtype=np.int32),
        tokens=np.asarray(response.tokens, dtype=np.int32),
        logprobs=np.full(count, -4.85, dtype=np.float32),  # that of a uniform guess: a model with random weights
        steps=np.zeros(count, dtype=np.int64),
        reward=response.advantage,
        advantages=np.full(count, response.advantage, dtype=np.float32),
    )


def dense(lines: Lines, folder: Path, options: dict[str, Any], batch: list[Response]) -> None:
    tokens = through_model(batch)
    width = round(tokens / len(batch))
    ids = torch.randint(FIRST, VOCABULARY, (round(tokens / width), width))
    model = transformers.AutoModelForCausalLM.from_pretrained(
        folder / "model", attn_implementation=options["attention"]
    )

    def step() -> None:
        logits = model(input_ids=ids, use_cache=False).logits
        logprobs = -torch.nn.functional.cross_entropy(logits.flatten(0, 1), ids.flatten(), reduction="sum")
        logprobs.backward()  # type: ignore[no-untyped-call]
        model.zero_grad()

    step()
    lines.ready(tokens=ids.numel())
    lines.serve(step)


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), json.loads(sys.argv[3]))
