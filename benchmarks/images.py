"""What an image costs, next to text of as many tokens: the bytes of a sample, the engine, the learner.

    python examples/look/prepare.py && python benchmarks/images.py [--json FILE] [--rounds N]

The model is that of `examples/look` (0.34M parameters), the engine transformers in this process. Both sides have the
same lengths: two pictures of 6 tokens each. `new` pictures come for the first time and are processed, `known` ones were
before. Rounds alternate, and ratios are of medians.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import statistics
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from facts import write_json

from streamrl import wire
from streamrl.config import RunConfig
from streamrl.engine import Request, RequestImage
from streamrl.images.encoded import EncodedImage, accept
from streamrl.learner.batch import TrainSample
from streamrl.learner.policy import Actor
from streamrl.learner.ranks import Ranks
from streamrl.producers.engines.hf import HfEngine
from streamrl.producers.tokenizer import Tokenizer

sys.path.insert(0, str(Path(__file__).parents[1] / "examples" / "look"))
import look_task

MODEL = Path(__file__).parents[1] / "examples" / "look" / "cache" / "model"
CONFIG = RunConfig.model_validate(
    {
        "name": "images",
        "model": {"path": str(MODEL), "context": 64},
        "sampling": {"max_new_tokens": 4},
        "engine": {"slots": 64, "threads": 1},
        "learner": {"threads": 1, "tokens_per_microbatch": 2048},
    }
)
COUNT = 256
SHOWN = 2


class Pictures:
    def __init__(self) -> None:
        self._source = random.Random(0)

    def next(self) -> list[list[EncodedImage]]:
        letters = "".join(look_task.COLOURS)
        drawn = iter(lambda: "".join(self._source.choices(letters, k=look_task.SQUARES)), "")
        return [[accept(look_task.png(next(drawn)), CONFIG.images) for _ in range(SHOWN)] for _ in range(COUNT)]


def prompt_of(tokenizer: Tokenizer, images: list[EncodedImage]) -> np.ndarray[Any, Any]:
    assert tokenizer.vision is not None
    content = [*({"type": "image"} for _ in images), {"type": "text", "text": "1"}]
    text = tokenizer.chat_text([{"role": "user", "content": content}])
    expanded = tokenizer.vision.expand(text, [(image.width, image.height) for image in images])
    return np.asarray(tokenizer.plain_ids(expanded), dtype=np.int32)


def request(tokenizer: Tokenizer, images: list[EncodedImage], *, shows: bool) -> Request:
    ids, vision = prompt_of(tokenizer, images), tokenizer.vision
    assert vision is not None
    if not shows:
        return Request("text", np.where(ids == vision.token_id, 5, ids).astype(np.int32), 4)
    spans = vision.spans(ids, [(image.width, image.height) for image in images])
    seen = (
        RequestImage(i.sha256, i.data, begin, n, vision.token_id) for i, (begin, n) in zip(images, spans, strict=True)
    )
    return Request("images", ids, 4, images=tuple(seen), forbidden=vision.forbidden)


async def engine_seconds(tokenizer: Tokenizer, rounds: int) -> tuple[dict[str, float], float]:
    engine, pictures = HfEngine(CONFIG, seed=0), Pictures()
    await engine.start()
    found: dict[str, list[float]] = {"text": [], "new": [], "known": []}
    asked = 0
    try:
        for _ in range(rounds):
            images = pictures.next()
            for kind, seconds in found.items():
                requests = [request(tokenizer, each, shows=kind != "text") for each in images]
                begun = time.perf_counter()
                await asyncio.gather(*map(engine.generate, requests))
                seconds.append(time.perf_counter() - begun)
            asked += len({image.sha256 for each in images for image in each})
        processed = engine.figures()["images_processed"] - 1  # one is that of the trial at the start
    finally:
        await engine.close()
    return {kind: statistics.median(seconds) for kind, seconds in found.items()}, processed / asked


def learner_seconds(tokenizer: Tokenizer, rounds: int) -> dict[str, float]:
    ranks, pictures = Ranks(rank=0, world=1, device=torch.device("cpu"), deadline=60), Pictures()
    actor, found = Actor(CONFIG, ranks), {"text": [0.0], "new": [0.0], "known": [0.0]}
    for _ in range(rounds):
        images = pictures.next()
        for kind, seconds in found.items():
            batch = [sample(tokenizer, each, shows=kind != "text") for each in images]
            begun = time.perf_counter()
            actor.update_policy(batch)
            seconds.append(time.perf_counter() - begun)
    ranks.close()
    return {kind: statistics.median(seconds[1:]) for kind, seconds in found.items()}


def sample(tokenizer: Tokenizer, images: list[EncodedImage], *, shows: bool) -> TrainSample:
    asked = request(tokenizer, images, shows=shows)
    ones, steps = np.ones(3, dtype=np.float32), np.zeros(3, dtype=np.int64)
    plain = TrainSample(0, asked.tokens, np.asarray([5, 6, 2], dtype=np.int32), -ones, steps, 0.0, ones)
    names = tuple(image.sha256 for image in images)
    return replace(plain, images=names, blobs={image.sha256: image.data for image in images}) if shows else plain


def sample_bytes(tokenizer: Tokenizer) -> dict[str, int]:
    """Of one encoded prompt with its images and without."""
    images = Pictures().next()[0]
    ids = wire.pack_int32(prompt_of(tokenizer, images))
    names, blobs = [image.sha256 for image in images], [image.data for image in images]
    shown = wire.Prompt(v=wire.SCHEMA, tokens=ids, images=names, blobs=blobs, processor="0" * 16)
    return {"text": len(wire.encode(wire.Prompt(tokens=ids))), "images": len(wire.encode(shown))}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, metavar="FILE")
    parser.add_argument("--rounds", type=int, default=5)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    tokenizer = Tokenizer.load(CONFIG.model)
    engine, processed = asyncio.run(engine_seconds(tokenizer, arguments.rounds))
    learner = learner_seconds(tokenizer, arguments.rounds)
    results: dict[str, Any] = {"bytes_of_prompt": sample_bytes(tokenizer), "processed_per_image": processed}
    for name, seconds in (("engine", engine), ("learner", learner)):
        results[name] = {"seconds": seconds} | {kind: seconds[kind] / seconds["text"] for kind in ("new", "known")}
        print(f"{name}: {COUNT} samples of {SHOWN} images take {results[name]['new']:.2f} times text of as many tokens,"
              f" {results[name]['known']:.2f} when the images are known")  # fmt: skip
    print(f"prompt: {results['bytes_of_prompt']} bytes; images processed {processed:.3f} times each")
    if arguments.json is not None:
        write_json(arguments.json, results)


if __name__ == "__main__":
    main()
