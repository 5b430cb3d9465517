"""Seconds until the sort task is learnt: `streamrl up` next to trl's synchronous `GRPOTrainer`, in turns.

    make crosscheck && python benchmarks/race.py [--seeds 0,1,2,3,4] [--json FILE] [--picture FILE]

Both start from the same model, with the same prompts, 32 groups of 8 a step and the same rule for the reward, on both
cores. A run ends when the sampled accuracy on held-out prompts reaches 0.9.

streamrl  the recipe of examples/sort/run.yaml as `make demo` runs it. The clock starts 50 ms before the first
          sampled tokens are counted and stops with the learner, so it counts the evaluation rounds and the time until
          the learner hears of 0.9.
trl       `GRPOTrainer` with the settings that a short trial finds fastest. The clock starts with the first step and
          stands still while it is measured, after every step.

`steps` are updates until the run ended; `late` is how many versions streamrl had published beyond the one that was
measured at 0.9. `accuracy_after` is measured on 1,024 held-out prompts. `speedup_vs_trl` is the ratio of seconds within
each pair of runs. Goals: streamrl's median at most 5 s, no run above 7 s, speed-up 3.3.
"""

from __future__ import annotations

import argparse
import itertools
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from facts import write_json
from spread import ratios, spread, table

from streamrl.monitor.tail import Tail
from streamrl.producers.meter import TICK_SECONDS
from streamrl.runtime.summary import SUMMARY_FILE, read_learner, read_rollouts

ROOT = Path(__file__).parents[1]
EXAMPLE = ROOT / "examples" / "sort"
TRL_PYTHON = ROOT / ".crosscheck" / "bin" / "python"
GOAL = 0.9
LR, WARMUP = 2e-4, 2
"""trl's; on-policy, the task is learnt fastest with them (docs/start/demo.md)."""
TRIED = [
    {"precision": precision, "attention": attention, "rows": rows}
    for (precision, attention), rows in itertools.product((("highest", "sdpa"), ("medium", "eager")), (64, 128, 256))
]
QUICK = {**TRIED[0], "rows": 32, "groups": 4, "threads": 1, "prompts": 16, "final_prompts": 64}
DEADLINE = 900.0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, metavar="FILE")
    parser.add_argument("--picture", type=Path, metavar="FILE", help="accuracy against seconds, as PNG")
    parser.add_argument("--seeds", default="0,1,2,3,4")
    parser.add_argument("--steps", type=int, default=40, help="updates after which a run is given up")
    parser.add_argument("--quick", action="store_true", help="one seed, two small steps, trl untuned: does it run?")
    arguments = parser.parse_args()
    if not TRL_PYTHON.exists():
        raise SystemExit(f"no {TRL_PYTHON}: `make crosscheck` makes it")
    subprocess.run([sys.executable, str(EXAMPLE / "prepare.py")], check=True)
    seeds = [int(seed) for seed in arguments.seeds.split(",")][: 1 if arguments.quick else None]
    steps = 2 if arguments.quick else arguments.steps
    settings = QUICK if arguments.quick else fastest()
    print(f"trl runs with {settings}")
    pairs: list[dict[str, Any]] = []
    for seed in seeds:
        pair = {"seed": seed, "streamrl": ours(seed, steps, settings), "trl": trl(settings, seed=seed, steps=steps)}
        pairs.append(pair)
        for side in ("streamrl", "trl"):
            print(f"seed {seed}  {side:9} {said(pair[side])}", flush=True)
    results = {"goal": GOAL, "trl_settings": settings, **summary(pairs), "pairs": pairs}
    table("race", {key: value for key, value in results.items() if isinstance(value, dict) and "median" in value})
    if arguments.json:
        write_json(arguments.json, results)
    if arguments.picture:
        draw(arguments.picture, pairs)


def said(found: dict[str, Any]) -> str:
    """One line about a run."""
    end = "reached" if found["reached"] else "did not reach"
    after = f"{found['accuracy_after']:.3f} on 1,024 prompts"
    return f"{found['seconds']:6.2f} s  {found['steps']:3} steps  {end} {GOAL}, {after}"


def summary(pairs: list[dict[str, Any]]) -> dict[str, Any]:
    """Medians and spread over the seeds; runs that did not reach the goal count with the time until they were ended."""
    seconds = {side: [pair[side]["seconds"] for pair in pairs] for side in ("streamrl", "trl")}
    return {
        **{f"{side}_seconds": spread(values) for side, values in seconds.items()},
        **{f"{side}_steps": spread([pair[side]["steps"] for pair in pairs]) for side in seconds},
        "speedup_vs_trl": ratios(seconds["trl"], seconds["streamrl"]),
        "late": spread([pair["streamrl"]["late"] for pair in pairs]),
        "reached": {side: sum(pair[side]["reached"] for pair in pairs) for side in seconds},
    }


def ours(seed: int, steps: int, settings: dict[str, Any], *more: str) -> dict[str, Any]:
    """One run as `make demo` makes it, with `more` settings of the run file."""
    with tempfile.TemporaryDirectory(prefix="race-") as folder:
        run_dir = Path(folder) / "run"
        words = ["up", str(EXAMPLE / "run.yaml"), "--run", str(run_dir), "--screen", "plain"]
        sets = [f"seed={seed}", f"learner.steps={steps}", f"learner.stop_at_accuracy={GOAL}"]
        sets += [f"evaluation.{key}={settings[key]}" for key in ("prompts", "final_prompts") if key in settings]
        sets += more
        command = [sys.executable, "-m", "streamrl", *words, *(word for one in sets for word in ("--set", one))]
        done = subprocess.run(command, capture_output=True, text=True, timeout=DEADLINE, check=False)
        if done.returncode:
            raise SystemExit(f"{' '.join(command)} ended with {done.returncode}:\n{done.stderr[-3000:]}")
        return read_run(run_dir)


def read_run(run_dir: Path) -> dict[str, Any]:
    """Time, steps and curve of a run, from the files that it left."""
    learner = read_learner(run_dir)
    ticks = [at for at, tokens in read_rollouts(run_dir, learner).ticks if tokens]
    began, ended = min(ticks) - TICK_SECONDS, max(end for _, end in learner.spans)
    rounds = [line for line in Tail(run_dir / "metrics" / "feeder.0.jsonl").read() if line.get("kind") == "evaluation"]
    reached = next((line for line in rounds if line["accuracy"] >= GOAL), None)
    last = max(learner.steps.values(), key=lambda line: line["step"])
    found = json.loads((run_dir / SUMMARY_FILE).read_bytes())
    return {
        "reached": reached is not None,
        "seconds": ended - began,
        "steps": last["step"],
        "late": last["version"] - reached["version"] if reached else 0,
        "curve": [(line["version"], line["mono"] - began, line["accuracy"]) for line in rounds],
        **{
            key: found[key]
            for key in ("accuracy_after", "engine_gap", "learner_idle_fraction", "rollout_idle_fraction")
        },
        "overlap": found["share_of_tokens_sampled_during_learner_steps"],
    }


def fastest() -> dict[str, Any]:
    """The settings with which trl takes two steps in the shortest time here."""
    return min(TRIED, key=lambda settings: trl(settings, seed=0, steps=2, prompts=1, final_prompts=1)["seconds"])


def trl(settings: dict[str, Any], *, seed: int, steps: int, **changed: int) -> dict[str, Any]:
    """One run of trl, in its own environment."""
    options = {
        "cache": str(EXAMPLE / "cache"),
        "goal": GOAL,
        "prompts": 128,
        "final_prompts": 1024,
        "lr": LR,
        "warmup_steps": WARMUP,
        "threads": 2,
        "groups": 32,
        "size": 8,
        "max_new_tokens": 42,
    }
    options |= {"seed": seed, "steps": steps, **settings, **changed}
    command = [str(TRL_PYTHON), str(Path(__file__).parent / "race_trl.py"), json.dumps(options)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=DEADLINE, check=False)
    if done.returncode:
        raise SystemExit(f"race_trl.py ended with {done.returncode}:\n{done.stderr[-3000:]}")
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def draw(path: Path, pairs: list[dict[str, Any]]) -> None:
    """Accuracy against seconds, a line per run."""
    lines = []
    for side, colour in (("streamrl", "tab:blue"), ("trl", "tab:orange")):
        for number, pair in enumerate(pairs):
            _, seconds, accuracy = zip(*pair[side]["curve"], strict=True)
            lines.append((seconds, accuracy, {"color": colour, "alpha": 0.8, "label": None if number else side}))
    draw_accuracy(path, lines, "seconds since the first sampled token", f"sort task, {len(pairs)} seeds, until {GOAL}")


def draw_accuracy(path: Path, lines: list[tuple[Any, Any, dict[str, Any]]], across: str, title: str) -> None:
    """Draw lines (x, accuracy, how they look) up to the goal; `across` names x."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(figsize=(8, 4.5), layout="constrained")
    for x, accuracy, look in lines:
        axes.plot(x, accuracy, marker=".", **look)
    axes.axhline(GOAL, color="grey", linestyle="--", linewidth=1)
    axes.set(xlabel=across, ylabel="held-out accuracy, sampled", ylim=(0, 1))
    axes.set_title(title)
    axes.legend(loc="lower right")
    axes.grid(alpha=0.3)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)
    plt.close(figure)


if __name__ == "__main__":
    main()
