"""How long `streamrl lag` takes in a cold process against a live run: median of 11. Goal: under 400 ms when idle.

    python benchmarks/cli.py [--json FILE]

A run directory with its own Redis and a ledger of some groups is made for it in a temporary directory. Beside the whole
command the bare interpreter and the imports are timed, so that a slow machine can be told from a slow command.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import orjson

from streamrl.queues import embedded, open_ledgers
from streamrl.runfile import load, save

ROUNDS = 11
GROUPS = 64


def main() -> None:
    """Measure, print a table, write JSON when asked."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, metavar="FILE")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        results = asyncio.run(measure(Path(folder)))
    results |= {
        "goal_seconds": 0.4,
        "rounds": ROUNDS,
        "python": platform.python_version(),
        "cpus": os.cpu_count(),
        "load_average": os.getloadavg()[0],
    }
    for name, value in results.items():
        print(f"{name:24} {value}")
    if arguments.json:
        arguments.json.write_bytes(orjson.dumps(results, option=orjson.OPT_INDENT_2))


async def measure(run_dir: Path) -> dict[str, object]:
    """Time the command with a live Redis, and its parts."""
    loaded = load(None, ["name=bench", "learner.groups_per_step=64"], {})
    config = loaded.config
    save(loaded, run_dir / "run.json")
    async with embedded.running(config.redis, run_dir), open_ledgers(config, run_dir) as ledgers:
        for group_id in range(GROUPS):
            await ledgers.train.admit(
                cursor=group_id,
                fingerprint="bench",
                prompt=b"prompt",
                samples=8,
                min_group=2,
                budget=config.budget,
                hard_cap=config.hard_cap,
                max_dead=10,
                version=1,
            )
        lag = [sys.executable, "-m", "streamrl", "lag", "--run", str(run_dir)]
        return {
            "lag_seconds": await asyncio.to_thread(median, lag),
            "lag_json_seconds": await asyncio.to_thread(median, [*lag, "--json"]),
            "python_seconds": await asyncio.to_thread(median, [sys.executable, "-c", "pass"]),
            "import_cli_seconds": await asyncio.to_thread(median, [sys.executable, "-c", "import streamrl.cli"]),
        }


def median(command: list[str]) -> float:
    """Median wall seconds of a command in a process of its own."""
    seconds = []
    for _ in range(ROUNDS):
        started = time.perf_counter()
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        seconds.append(time.perf_counter() - started)
    return round(statistics.median(seconds), 4)


if __name__ == "__main__":
    main()
