"""Tokens per second of a training step, next to trl's GRPOTrainer and to a bare forward/backward of the same tokens.

    make crosscheck && python benchmarks/train.py [--json FILE] [--rounds 5] [--steps 3] [--threads 1] [--quick]

Three processes hold the same 1M-parameter model (that of the sort task) and the same samples, and take turns:

streamrl  the actor's whole step: layout, forward, loss, backward, clipping, AdamW
trl       the step of `GRPOTrainer.train()` in its own environment, with the micro-batch that suits it best
dense     forward and backward alone, all tokens of the samples in one batch of equal rows

sort: 32 groups of 8 with the lengths of the sort task; equal: the same number with equal lengths. mkl: full precision,
attention by `sdpa`; onednn: `medium` and `eager`, which sends float32 matmuls of a CPU to oneDNN; each on all sides.
Tokens are those of all prompts and responses, however few of them a side has to compute; `per_computed_token` counts
only those that streamrl computes, with padding, and so leaves out what sharing prompts saves. `--threads`: each side.
`speedup_vs_trl` and `share_of_dense` are the lesser of the two paths on the sort task's lengths; goals 3 and 0.85.
`by_cpu_time` says the same of the seconds of all cores, which other work on the machine disturbs less.
"""

from __future__ import annotations

import argparse
import json
import select
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch
from facts import write_json
from safetensors.torch import save_file
from spread import ratios, spread, table
from train_batches import Response, make_batch, through_model, write_model

HERE = Path(__file__).parent
TRL_PYTHON = HERE.parent / ".crosscheck" / "bin" / "python"
PATHS = {"mkl": ("highest", "sdpa"), "onednn": ("medium", "eager")}
KINDS = ("sort", "equal")
TRL_ROWS = (32, 64, 256)
DEADLINE = 180.0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, metavar="FILE")
    parser.add_argument("--rounds", type=int, default=5, help="alternating runs")
    parser.add_argument("--steps", type=int, default=3, help="steps of a side in a round")
    parser.add_argument("--threads", type=int, default=1, help="of each side")
    parser.add_argument("--groups", type=int, default=32)
    parser.add_argument("--size", type=int, default=8, help="responses of a group")
    parser.add_argument("--trl-rows", type=int, help="rows of a micro-batch of trl; left out: the fastest, by a trial")
    parser.add_argument("--kinds", default=",".join(KINDS))
    parser.add_argument("--paths", default=",".join(PATHS))
    parser.add_argument("--quick", action="store_true", help="4 groups, 2 rounds of a step: does it run?")
    arguments = parser.parse_args()
    if not TRL_PYTHON.exists():
        raise SystemExit(f"no {TRL_PYTHON}: `make crosscheck` makes it")
    if arguments.quick:
        arguments.groups, arguments.rounds, arguments.steps = 4, 2, 1
    results: dict[str, Any] = {key: getattr(arguments, key) for key in ("rounds", "steps", "threads", "groups", "size")}
    for kind in arguments.kinds.split(","):
        results[kind] = {path: measure(kind, path, arguments) for path in arguments.paths.split(",")}
        table(kind, results[kind])
    results |= summary(results)
    for key in ("speedup_vs_trl", "speedup_vs_trl_equal_lengths", "share_of_dense"):
        print(f"{key:32} {results[key]}")
    if arguments.json:
        write_json(arguments.json, results)


def summary(results: dict[str, Any]) -> dict[str, float | None]:
    """The least medians over the paths; None for what was not measured."""

    def least(kind: str, figure: str) -> float | None:
        return min((found[figure]["median"] for found in results.get(kind, {}).values()), default=None)

    return {
        "speedup_vs_trl": least("sort", "speedup_vs_trl"),
        "speedup_vs_trl_equal_lengths": least("equal", "speedup_vs_trl"),
        "share_of_dense": least("sort", "share_of_dense"),
        "share_of_dense_equal_lengths": least("equal", "share_of_dense"),
    }


def measure(kind: str, path: str, arguments: argparse.Namespace) -> dict[str, Any]:
    """Let the three sides take turns."""
    precision, attention = PATHS[path]
    options = {"kind": kind, "precision": precision, "attention": attention}
    options |= {key: getattr(arguments, key) for key in ("threads", "groups", "size")}
    batch = make_batch(kind, arguments.groups, arguments.size)
    tokens = through_model(batch)
    with tempfile.TemporaryDirectory() as directory, ExitStack() as sides:
        folder = Path(directory)
        write_model(folder / "model")
        save_file(padded(batch), folder / "padded.safetensors")
        rows = arguments.trl_rows or best_rows(folder, options, len(batch))
        running = {
            "streamrl": sides.enter_context(ours("actor", folder, options)),
            "trl": sides.enter_context(trl(folder, options | {"rows": rows})),
            "dense": sides.enter_context(ours("dense", folder, options)),
        }
        for side in running.values():
            side.step()
        taken: dict[str, list[dict[str, float]]] = {title: [] for title in running}
        for _ in range(arguments.rounds):
            for title, side in running.items():
                steps = [side.step() for _ in range(arguments.steps)]
                taken[title].append({key: sum(one[key] for one in steps) / len(steps) for key in steps[0]})
        computed = running["streamrl"].facts["computed_tokens"]
    seconds = {name: [one["seconds"] for one in runs] for name, runs in taken.items()}
    cpu = {name: [one["cpu_seconds"] for one in runs] for name, runs in taken.items()}
    figures: dict[str, Any] = {
        f"{name}_tokens_per_second": spread([tokens / one for one in runs]) for name, runs in seconds.items()
    }
    return figures | {
        **shares(seconds, computed / tokens),
        "by_cpu_time": shares(cpu, computed / tokens),
        "tokens": tokens,
        "tokens_streamrl_computes": computed,
        "tokens_trl_computes": sum(padded(batch)[key].numel() for key in ("prompt_ids", "completion_ids")),
        "rows_of_a_micro_batch_of_trl": rows,
    }


def shares(seconds: dict[str, list[float]], computed: float) -> dict[str, Any]:
    """Speed next to the others; `computed` is the part of the tokens that streamrl computes, padding included."""
    return {
        "speedup_vs_trl": ratios(seconds["trl"], seconds["streamrl"]),
        "share_of_dense": ratios(seconds["dense"], seconds["streamrl"]),
        "share_of_dense_per_computed_token": ratios([one * computed for one in seconds["dense"]], seconds["streamrl"]),
    }


def best_rows(folder: Path, options: dict[str, Any], count: int) -> int:
    """Rows of a micro-batch with which trl is fastest here, by a trial."""
    candidates = sorted({min(rows, count) for rows in TRL_ROWS})
    if len(candidates) == 1:
        return candidates[0]
    found = {}
    for rows in candidates:
        with trl(folder, options | {"rows": rows}) as side:
            side.step()
            found[rows] = min(side.step()["seconds"] for _ in range(2))
    return min(found, key=lambda rows: found[rows])


def padded(batch: list[Response]) -> dict[str, torch.Tensor]:
    """What `GRPOTrainer` makes of samples: prompts padded on the left, responses on the right, to the longest."""
    before, after = (max(map(len, column)) for column in zip(*[(one.prompt, one.tokens) for one in batch], strict=True))
    return {
        "prompt_ids": torch.tensor([[0] * (before - len(one.prompt)) + one.prompt for one in batch]),
        "prompt_mask": torch.tensor([[0] * (before - len(one.prompt)) + [1] * len(one.prompt) for one in batch]),
        "completion_ids": torch.tensor([one.tokens + [0] * (after - len(one.tokens)) for one in batch]),
        "completion_mask": torch.tensor([[1] * len(one.tokens) + [0] * (after - len(one.tokens)) for one in batch]),
        "advantages": torch.tensor([one.advantage for one in batch]),
        "num_items_in_batch": torch.tensor(sum(len(one.tokens) for one in batch)),
    }


class Side:
    """A trainer in a process of its own that takes a step when it is told to."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process
        self.facts = self._answer()

    def step(self) -> dict[str, float]:
        """Seconds, and seconds of all cores, of one step."""
        assert self._process.stdin is not None
        self._process.stdin.write("\n")
        self._process.stdin.flush()
        return self._answer()

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        if not select.select([self._process.stdout], [], [], DEADLINE)[0]:
            raise SystemExit(f"{self._process.args} gave no answer for {DEADLINE:g} s")
        line = self._process.stdout.readline()
        if not line:
            raise SystemExit(f"{self._process.args} ended with {self._process.wait()}; its errors are above")
        found: dict[str, Any] = json.loads(line)
        return found


@contextmanager
def running(command: list[str]) -> Iterator[Side]:
    """A side, until the end of the block."""
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        try:
            yield Side(process)
        finally:
            process.kill()


def ours(side: str, folder: Path, options: dict[str, Any]) -> Any:
    return running([sys.executable, str(HERE / "train_ours.py"), side, str(folder), json.dumps(options)])


def trl(folder: Path, options: dict[str, Any]) -> Any:
    return running([str(TRL_PYTHON), str(HERE / "train_trl.py"), str(folder), json.dumps(options)])


if __name__ == "__main__":
    main()
