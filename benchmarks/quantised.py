"""Does the sort task come out the same with quantised rollouts? Accuracy by version: bfloat16 next to int8, in turns.

    python benchmarks/quantised.py [--kinds none,int8,fp8_channel] [--seeds 0,1] [--json FILE] [--picture FILE]

One vLLM server on the CPU generates (`streamrl engines install vllm --cpu`). Everything is as in examples/sort/run.yaml
but for the correction: token-level truncated importance sampling (C = 2), which is the default, for both. A run ends
at 0.9 of the held-out prompts. It is about learning, not about time: on a CPU 8 bits are no faster.

`engine_gap` is the mean |log-probability of the learner - of the engine| of tokens that both computed with the same
version.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from pathlib import Path
from typing import Any

from facts import write_json
from race import EXAMPLE, GOAL, draw_accuracy, ours

OPTIONS = (
    "engine.kind=vllm",
    "engine.dtype=bfloat16",
    "weights.dtype=bfloat16",
    "learner.correction.base=decoupled",
)
COLOURS = {"none": "tab:blue", "int8": "tab:orange", "fp8_channel": "tab:green"}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, metavar="FILE")
    parser.add_argument("--picture", type=Path, metavar="FILE", help="accuracy against versions, as PNG")
    parser.add_argument("--kinds", default="none,int8")
    parser.add_argument("--seeds", default="0")
    parser.add_argument("--steps", type=int, default=40, help="updates after which a run is given up")
    arguments = parser.parse_args()
    subprocess.run([sys.executable, str(EXAMPLE / "prepare.py")], check=True)
    runs: list[dict[str, Any]] = []
    for seed in map(int, arguments.seeds.split(",")):
        for kind in arguments.kinds.split(","):
            quantize = () if kind == "none" else (f"weights.quantize={kind}",)
            run = {"kind": kind, "seed": seed, **ours(seed, arguments.steps, {}, *OPTIONS, *quantize)}
            runs.append(run)
            print({key: value for key, value in run.items() if key != "curve"}, flush=True)
    if arguments.json:
        write_json(arguments.json, {"goal": GOAL, "options": OPTIONS, "runs": runs})
    if arguments.picture:
        draw(arguments.picture, runs)


def draw(path: Path, runs: list[dict[str, Any]]) -> None:
    """Accuracy against versions, a line per run."""
    lines = []
    for run in runs:
        versions, _, accuracy = zip(*run["curve"], strict=True)
        name = "bfloat16" if run["kind"] == "none" else run["kind"]
        label = f"{name}: off the learner by {run['engine_gap']:.4f}"
        lines.append((versions, accuracy, {"color": COLOURS.get(run["kind"]), "label": label}))
    draw_accuracy(path, lines, "version of the weights", f"sort task, rollouts by vLLM on a CPU, until {GOAL}")


if __name__ == "__main__":
    main()
