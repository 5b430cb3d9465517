"""Bytes per token on the wire, and the time to encode and decode. Goal: at most 8.5 bytes per token.

    python benchmarks/wire.py [--json FILE]

One sample with its prompt: 512 prompt tokens, 2,048 sampled tokens with a log-probability each, three versions of the
weights. Text is not counted (a person may switch it off), all the rest is. The sampled tokens as an episode of eight
turns: at most 9 bytes each.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from facts import write_json

from streamrl import wire

PROMPT_TOKENS, SAMPLED_TOKENS = 512, 2048
ROUNDS, CALLS = 11, 2000
GOAL = 8.5
TURNS = 8


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, metavar="FILE")
    arguments = parser.parse_args()
    results = measure()
    for name, value in results.items():
        print(f"{name:28} {value}")
    if arguments.json:
        write_json(arguments.json, results)


def measure() -> dict[str, Any]:
    """Sizes of the encoded messages, and medians of the times in microseconds."""
    random = np.random.default_rng(0)
    prompt = wire.Prompt(
        tokens=wire.pack_int32(random.integers(0, 150_000, PROMPT_TOKENS)),
        answer="42",
        metadata={"source": "bench"},
        line=7,
    )
    sample = wire.Sample(
        tokens=wire.pack_int32(random.integers(0, 150_000, SAMPLED_TOKENS)),
        logprobs=wire.pack_float32(np.log(random.uniform(1e-4, 1, SAMPLED_TOKENS))),
        runs=[(0, 11), (700, 12), (1500, 13)],
        finish="stop",
        engine="rollout.0",
        seconds=12.5,
    )
    turn = wire.Turn(sampled=SAMPLED_TOKENS // TURNS, finish="stop", model_seconds=1.5, cached=512)
    turns = [msgspec.structs.replace(turn, parent=number - 1) for number in range(TURNS)]
    episode = msgspec.structs.replace(sample, v=wire.SCHEMA, turns=turns, stop="completed")
    score = wire.SampleScore(value=1.0, parts={"exact_match": 1.0}, seconds=0.01)
    encoded = {
        kind: wire.encode(message) for kind, message in (("prompt", prompt), ("sample", sample), ("score", score))
    }
    tokens = PROMPT_TOKENS + SAMPLED_TOKENS
    return {
        "bytes_per_token": sum(map(len, encoded.values())) / tokens,
        "goal_bytes_per_token": GOAL,
        "bytes_per_sampled_token": len(encoded["sample"]) / SAMPLED_TOKENS,
        "bytes_per_token_of_eight_turns": len(wire.encode(episode)) / SAMPLED_TOKENS,
        **{f"{kind}_bytes": len(data) for kind, data in encoded.items()},
        "tokens": tokens,
        "encode_microseconds": microseconds(lambda: wire.encode(sample)),
        "decode_microseconds": microseconds(lambda: wire.decode(encoded["sample"], wire.Sample)),
        "decode_and_view_microseconds": microseconds(lambda: views(encoded["sample"])),
    }


def views(data: bytes) -> None:
    """What the learner does with a sample: decode, and look at the arrays."""
    sample = wire.decode(data, wire.Sample)
    assert len(sample.token_ids) == len(sample.token_logprobs) == len(sample.token_versions)


def microseconds(call: Callable[[], Any]) -> float:
    """Median over the rounds of the mean time of one call."""
    rounds = []
    for _ in range(ROUNDS):
        began = time.perf_counter()
        for _ in range(CALLS):
            call()
        rounds.append(1e6 * (time.perf_counter() - began) / CALLS)
    return statistics.median(rounds)


if __name__ == "__main__":
    main()
