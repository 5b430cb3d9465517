"""How fast versions of the weights travel, what they cost an engine and the learner; each figure is a ratio in one run.

    python benchmarks/weights.py [--json FILE] [--sizes 0.1,1] [--rounds 5] [--only shm,http,delta,learner]

shm      publish + apply into a Hugging Face model, next to a plain copy of the same bytes over the same road;
         how long decoding stands still, next to the copy of the weights alone
http     fetch with its proof, next to a bare sendfile server and a bare client
delta    1.2 % changed values of bfloat16: bytes, next to all bytes; speed of both directions; bit for bit the same
learner  what a version takes from the steps of the learner
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import tempfile
import warnings
from pathlib import Path
from typing import Any

import weights_apply
import weights_delta
import weights_http
import weights_learner
from facts import write_json
from spread import table

PARTS = ("shm", "http", "delta", "learner")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, metavar="FILE")
    parser.add_argument("--sizes", default="0.1,1", help="gigabytes of weights")
    parser.add_argument("--rounds", type=int, default=5, help="alternating runs")
    parser.add_argument("--threads", type=int, default=1, help="of torch; the publisher and the proof have one each")
    parser.add_argument("--only", default=",".join(PARTS), help="parts to measure")
    arguments = parser.parse_args()
    warnings.filterwarnings("ignore", message="The given buffer is not writable")
    logging.disable(logging.WARNING)
    sizes = [int(float(size) * 1e9) for size in arguments.sizes.split(",")]
    results: dict[str, Any] = {"rounds": arguments.rounds, "threads": arguments.threads}
    for part in arguments.only.split(","):
        results[part] = measure(part, sizes, arguments)
        table(part, results[part])
    if arguments.json:
        write_json(arguments.json, results)


def measure(part: str, sizes: list[int], arguments: argparse.Namespace) -> dict[str, Any]:
    rounds, threads = arguments.rounds, arguments.threads
    found: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        if part == "learner":
            return weights_learner.measure(folder, max(sizes), rounds)
        for size in sizes:
            title = f"{size / 1e9:g} GB"
            if part == "shm":
                for dtype in ("bfloat16", "float32"):
                    place = folder / f"{size}-{dtype}"
                    place.mkdir()
                    measuring = weights_apply.measure(place, size, dtype, rounds, threads)
                    found[f"{title} {dtype}"] = asyncio.run(measuring)
            elif part == "http":
                found[title] = asyncio.run(weights_http.measure(folder / str(size), size, rounds))
            elif part == "delta":
                found[title] = weights_delta.measure(folder, size, rounds)
            else:
                raise SystemExit(f"there is no part {part!r}: {', '.join(PARTS)}")
    return found


if __name__ == "__main__":
    main()
