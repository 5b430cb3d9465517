"""What a version takes from the learner: the copy of the weights between two steps, and the publishing beside the next.

Steps are those of the real policy, one rank. Every round has a step without and a step with a version: the copy is
taken, then a thread publishes it while the step computes. `copy` is what the learner always loses; `all` is that and
what the step lost to the publishing thread, which is the machine's affair: with a core to spare it is next to nothing.
"""

from __future__ import annotations

import random
import shutil
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import transformers
from random_model import write_model
from spread import ratios, spread

from streamrl.config import RunConfig
from streamrl.learner.batch import TrainSample
from streamrl.learner.policy import Actor
from streamrl.learner.ranks import Ranks
from streamrl.learner.weight_copy import Copies
from streamrl.weight_sync.publisher import Publisher

GROUP = 8
LARGE = 25_000_000
DEMO = {
    "vocab_size": 128,
    "hidden_size": 128,
    "intermediate_size": 512,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "tie_word_embeddings": True,
    "eos_token_id": None,
}


def measure(folder: Path, largest: int, rounds: int) -> dict[str, Any]:
    """The demo's model and steps, and a larger model with the fewest tokens that anybody would give a step."""
    ranks = Ranks(rank=0, world=1, device=torch.device("cpu"), deadline=300)
    found = {}
    try:
        transformers.AutoModelForCausalLM.from_config(transformers.Qwen2Config(**DEMO)).save_pretrained(folder / "demo")
        found["demo: 1M parameters, 32 groups of 8"] = steps(ranks, folder, "demo", demo_batch(), rounds)
        parameters = min(LARGE, largest // 4)
        write_model(folder / "large", parameters, torch.float32)
        batch = batch_of([(16, 64)] * 4)
        title = f"large: {parameters / 1e6:.3g}M parameters, 4 groups of 8 with 64 tokens"
        found[title] = steps(ranks, folder, "large", batch, rounds)
    finally:
        dist.destroy_process_group()
    return found


def demo_batch() -> list[TrainSample]:
    """Thirty-two groups of the lengths of the sort task."""
    source = random.Random(11)
    counts = [min(40, max(2, round(source.lognormvariate(1.95, 0.75)))) for _ in range(32)]
    return batch_of([(count + 1, count + 1) for count in counts])


def batch_of(groups: list[tuple[int, int]]) -> list[TrainSample]:
    """Groups with these lengths of prompt and response."""
    source = np.random.default_rng(0)

    def ids(count: int) -> Any:
        return source.integers(3, 120, count).astype(np.int32)

    batch = []
    for group_id, (before, after) in enumerate(groups):
        prompt = ids(before)
        for number in range(GROUP):
            logprobs = np.full(after, -3, dtype=np.float32)
            reward = 1.0 if number % 2 else -1.0
            advantages = np.full(after, reward, dtype=np.float32)
            steps = np.zeros(after, dtype=np.int64)
            batch.append(TrainSample(group_id, prompt, ids(after), logprobs, steps, reward, advantages))
    return batch


def steps(ranks: Ranks, folder: Path, model: str, batch: list[TrainSample], rounds: int) -> dict[str, Any]:
    config = RunConfig.model_validate(
        {
            "name": "bench",
            "model": {"path": str(folder / model), "context": 96, "attention": "eager"},
            "sampling": {"max_new_tokens": 64},
            "learner": {"threads": 1, "matmul_precision": "medium", "tokens_per_microbatch": 2048},
        }
    )
    actor = Actor(config, ranks)
    copies = Copies(actor.parameters, torch.float32)
    publisher = Publisher(config.weights, config.name, folder)
    taken, plain, publishing = [], [], []
    beside = []
    with ThreadPoolExecutor(1) as thread:
        for number in range(rounds + 1):
            alone = timed(lambda: actor.update_policy(batch))
            snapshot = copies.take()
            publish = thread.submit(publish_one, publisher, number + 1, snapshot.tensors)
            with_version = timed(lambda: actor.update_policy(batch))
            published = publish.result()
            if number:
                taken.append(snapshot.seconds)
                plain.append(alone)
                beside.append(with_version + snapshot.seconds)
                publishing.append(published)
    shutil.rmtree(publisher.root)
    shutil.rmtree(folder / model)
    return {
        "step_seconds": spread(plain),
        "copy_milliseconds": spread([1000 * one for one in taken]),
        "publish_milliseconds": spread([1000 * one for one in publishing]),
        "copy_per_cent_of_step": spread([100 * a / b for a, b in zip(taken, plain, strict=True)]),
        "all_per_cent_of_step": spread([100 * (one - 1) for one in ratios(beside, plain)["runs"]]),
    }


def publish_one(publisher: Publisher, version: int, tensors: Any) -> float:
    return timed(lambda: publisher.publish(epoch=1, version=version, step=version, tensors=tensors))


def timed(call: Callable[[], Any]) -> float:
    begin = time.perf_counter()
    call()
    return time.perf_counter() - begin
