"""Generation speed of the Hugging Face engine on the sort task's model and lengths.

The model has random weights and no end-of-sequence token; every response has the length of the right answer. Figures
are completion tokens per second of wall and of CPU time, through the whole engine (asyncio, futures, threads).

    python benchmarks/engine.py --json engine.json
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import math
import random
import statistics
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import orjson
import torch
import transformers
from facts import machine_facts

from streamrl.config import RunConfig
from streamrl.engine import Request
from streamrl.producers.engines.hf import HfEngine
from streamrl.weight_sync.tensors import Version

GROUP = 8
VOCABULARY = 128


def lengths(seed: int) -> Iterator[int]:
    """Digits of sort prompts: log-normal around 7, 2 to 40."""
    source = random.Random(seed)
    while True:
        count = round(source.lognormvariate(math.log(7), 0.75))
        if 2 <= count <= 40:
            yield count


def save_model(folder: Path) -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    config = transformers.Qwen2Config(
        hidden_size=128,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        intermediate_size=512,
        vocab_size=VOCABULARY,
        tie_word_embeddings=True,
        max_position_embeddings=128,
    )
    model = transformers.AutoModelForCausalLM.from_config(config)
    model.config.eos_token_id = model.generation_config.eos_token_id = None
    model.save_pretrained(folder)
    return {name: value.detach().clone() for name, value in model.named_parameters()}


async def measure(
    engine: HfEngine, weights: dict[str, torch.Tensor], slots: int, samples: int, swap_every: float
) -> dict[str, float]:
    """Keep twice as many requests in flight as there are slots, whole groups at a time."""
    digits = lengths(11)
    source = random.Random(12)
    names = itertools.count()
    room = asyncio.Semaphore(max(1, 2 * slots // GROUP))
    tokens = 0

    async def group() -> None:
        nonlocal tokens
        count = next(digits)
        prompt = np.asarray([source.randrange(3, VOCABULARY) for _ in range(count + 1)], dtype=np.int32)
        requests = [Request(str(next(names)), prompt, count + 1) for _ in range(GROUP)]
        done = await asyncio.gather(*map(engine.generate, requests))
        tokens += sum(len(one.tokens) for one in done)
        room.release()

    async def swaps() -> None:
        for version in itertools.count(engine.load().version + 1):
            await asyncio.sleep(swap_every)
            start = time.perf_counter()
            await engine.apply(Version((1, version), version, weights))
            took.append(time.perf_counter() - start)

    took: list[float] = []
    wall, cpu, busy = time.perf_counter(), time.process_time(), engine.load().busy_seconds
    swapping = asyncio.create_task(swaps())
    async with asyncio.TaskGroup() as tasks:
        for _ in range(samples // GROUP):
            await room.acquire()
            tasks.create_task(group())
    wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
    swapping.cancel()
    return {
        "completion_tokens_per_second": round(tokens / wall),
        "completion_tokens_per_cpu_second": round(tokens / cpu),
        "samples_per_second": round(samples / wall),
        "busy_fraction": round((engine.load().busy_seconds - busy) / wall, 3),
        "swap_milliseconds_median": round(1000 * statistics.median(took), 2) if took else math.nan,
    }


async def run(
    folder: Path,
    weights: dict[str, torch.Tensor],
    attention: str,
    slots: int,
    args: argparse.Namespace,
) -> dict[str, Any]:
    config = RunConfig.model_validate(
        {
            "model": {"path": str(folder), "context": 96},
            "sampling": {"max_new_tokens": 42},
            "engine": {"slots": slots, "attention": attention, "threads": args.threads},
        }
    )
    engine = HfEngine(config, seed=0)
    await engine.start()
    try:
        await measure(engine, weights, slots, max(256, args.samples // 8), 1e9)
        results = [await measure(engine, weights, slots, args.samples, 0.25) for _ in range(args.repeat)]
    finally:
        await engine.close()
    best = max(results, key=lambda one: one["completion_tokens_per_cpu_second"])
    line = {"attention": attention, "slots": slots, **best}
    print(orjson.dumps(line).decode(), flush=True)
    return line


async def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="file for the figures")
    parser.add_argument("--samples", type=int, default=2048)
    parser.add_argument("--repeat", type=int, default=2, help="the best of so many runs counts")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--only", help="attention,slots of a single case")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    cases = [("sdpa", slots) for slots in (32, 64, 128, 256)] + [("eager", 128)]
    if args.only:
        attention, slots = args.only.split(",")
        cases = [(attention, int(slots))]
    with tempfile.TemporaryDirectory() as folder:
        weights = save_model(Path(folder))
        lines = [await run(Path(folder), weights, *case, args) for case in cases]
    if args.json:
        result = {"machine": machine_facts(), "threads": args.threads, "samples": args.samples, "cases": lines}
        args.json.write_bytes(orjson.dumps(result, option=orjson.OPT_INDENT_2))


if __name__ == "__main__":
    asyncio.run(main())
