"""What streamrl costs between an engine server and the queue; each figure is a ratio in one run, on one server.

    python benchmarks/engines.py [--json FILE] [--kinds vllm,sglang] [--rounds 5] [--seconds 20]

rollout  tokens per second of a real server when a real rollout worker drives it (lease, generate, emit, a real Redis),
         next to a bare load generator: the same prompts, concurrency, lengths and requests, answers read and thrown
         away. Both are measured while all places of the server are taken, by the server's own count of tokens.
pause    how long a server stands still for a version, next to the update itself
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import tempfile
from pathlib import Path
from typing import Any

import engines_pause
import engines_rollout
from facts import write_json
from spread import table

from streamrl.errors import ConfigError
from streamrl.servers.environments import find_environment

PARTS = ("rollout", "pause")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, metavar="FILE")
    parser.add_argument("--kinds", default="vllm,sglang", help="engines; one without an environment is left out")
    parser.add_argument("--only", default=",".join(PARTS), help="parts to measure")
    parser.add_argument("--rounds", type=int, default=5, help="alternating runs")
    parser.add_argument("--seconds", type=float, default=20.0, help="of each run")
    parser.add_argument("--settle", type=float, default=6.0, help="seconds of each run that are not counted")
    parser.add_argument("--width", type=int, default=64, help="requests in flight")
    parser.add_argument("--tokens", type=int, default=256, help="of a response")
    parser.add_argument("--size", type=float, default=0.1, help="gigabytes of weights (pause)")
    arguments = parser.parse_args()
    logging.disable(logging.ERROR)
    results: dict[str, Any] = {name: getattr(arguments, name) for name in ("rounds", "seconds", "width", "tokens")}
    for kind in arguments.kinds.split(","):
        try:
            find_environment(None, kind)
        except ConfigError as error:
            print(f"{kind} is left out: {error.message}")
            continue
        results[kind] = asyncio.run(measure(kind, arguments))
        table(kind, results[kind])
    if arguments.json:
        write_json(arguments.json, results)


async def measure(kind: str, arguments: argparse.Namespace) -> dict[str, Any]:
    found: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for part in arguments.only.split(","):
            place = folder / part
            place.mkdir()
            if part == "rollout":
                load = engines_rollout.Load(arguments.width, arguments.tokens, arguments.seconds, arguments.settle)
                found[part] = await engines_rollout.measure(kind, place, load, arguments.rounds)
            else:
                found[part] = await engines_pause.measure(kind, place, int(arguments.size * 1e9), arguments.rounds)
    return found


if __name__ == "__main__":
    main()
