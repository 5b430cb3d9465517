"""Samples per second on prompts with a picture, next to trl's `GRPOTrainer` with the same model and data, in turns.

    make crosscheck && python benchmarks/images_race.py [--rounds 5] [--steps 10] [--json FILE]

The task is the first turn of `examples/look`: a picture and a question, answered by one letter. trl shows later
pictures only as answers of tools, and this model calls none. Both sides have as many groups a step as the demo, both
cores, and no held-out prompts; trl runs with the fastest of some sizes of micro-batches. `two_turns` is the demo,
with two replies and two pictures a sample.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from facts import write_json
from race import DEADLINE, TRL_PYTHON, read_run
from spread import ratios, spread, table

from streamrl.images.encoded import data_url
from streamrl.runfile import load

ROOT = Path(__file__).parents[1]
EXAMPLE = ROOT / "examples" / "look"
CONFIG = load(EXAMPLE / "run.yaml").config
GROUPS, SIZE = CONFIG.learner.groups_per_step, CONFIG.sampling.group_size
TRL = {"precision": "highest", "attention": "sdpa", "lr": 4e-4, "warmup_steps": 2, "threads": 2, "max_new_tokens": 4}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, metavar="FILE")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=10)
    arguments = parser.parse_args()
    if not TRL_PYTHON.exists():
        raise SystemExit(f"no {TRL_PYTHON}: `make crosscheck` makes it")
    subprocess.run([sys.executable, str(EXAMPLE / "prepare.py")], check=True)
    rows = max((32, 64, 128), key=lambda size: trl(0, 2, size))
    speeds: dict[str, list[float]] = {"streamrl": [], "trl": [], "two_turns": []}
    with tempfile.TemporaryDirectory(prefix="race-") as folder:
        one_turn = one_turn_of(Path(folder))
        for seed in range(arguments.rounds):
            speeds["streamrl"].append(ours(seed, arguments.steps, *one_turn))
            speeds["trl"].append(trl(seed, arguments.steps, rows))
            speeds["two_turns"].append(ours(seed, arguments.steps))
    results = {
        **{f"{side}_samples_per_second": spread(values) for side, values in speeds.items()},
        "speedup_vs_trl": ratios(speeds["streamrl"], speeds["trl"]),
        "trl_rows": rows,
    }
    table("images", {key: value for key, value in results.items() if isinstance(value, dict)})
    if arguments.json:
        write_json(arguments.json, results)


def one_turn_of(folder: Path) -> list[str]:
    """Settings with which prompts have the first picture and question of each line, and no episode is played."""
    sys.path.insert(0, str(EXAMPLE))
    import look_task

    written = folder / "train.jsonl"
    with written.open("w") as file:
        for line in (EXAMPLE / "cache" / "train.jsonl").read_text().splitlines():
            row: dict[str, Any] = json.loads(line)
            content = [{"type": "image"}, {"type": "text", "text": row["questions"][0]}]
            url = data_url(look_task.png(row["pictures"][0]))
            prompt = {"messages": [{"role": "user", "content": content}], "images": [url], "answer": row["answer"][0]}
            file.write(json.dumps(prompt) + "\n")
    return [f"data.train={written}", "data.held_out=null", "episode.run=null"]


def ours(seed: int, steps: int, *more: str) -> float:
    """From the first sampled tokens to the end of the last step."""
    with tempfile.TemporaryDirectory(prefix="race-") as folder:
        run_dir = Path(folder) / "run"
        words = ["up", str(EXAMPLE / "run.yaml"), "--run", str(run_dir), "--screen", "plain"]
        sets = [f"seed={seed}", f"learner.steps={steps}", "learner.stop_at_accuracy=null"]
        sets += ["evaluation.every=0", "evaluation.final_prompts=0", *more]
        command = [sys.executable, "-m", "streamrl", *words, *(word for one in sets for word in ("--set", one))]
        done = subprocess.run(command, capture_output=True, text=True, timeout=DEADLINE, check=False)
        if done.returncode:
            raise SystemExit(f"{' '.join(command)} ended with {done.returncode}:\n{done.stderr[-3000:]}")
        found = read_run(run_dir)
        return float(GROUPS * SIZE * found["steps"] / found["seconds"])


def trl(seed: int, steps: int, rows: int) -> float:
    """One run in its own environment; samples per second of its steps."""
    options = {"example": str(EXAMPLE), "seed": seed, "steps": steps, "rows": rows, **TRL}
    options |= {"groups": GROUPS, "size": SIZE}
    command = [str(TRL_PYTHON), str(Path(__file__).parent / "images_trl.py"), json.dumps(options)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=DEADLINE, check=False)
    if done.returncode:
        raise SystemExit(f"images_trl.py ended with {done.returncode}:\n{done.stderr[-3000:]}")
    found = json.loads(done.stdout.splitlines()[-1])
    return float(GROUPS * SIZE * found["steps"] / found["ends"][-1])


if __name__ == "__main__":
    main()
