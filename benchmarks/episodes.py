"""Episodes: what waiting for tools costs, what waiting episodes weigh, and a race with trl's `environment_factory`.

    make crosscheck && python benchmarks/episodes.py [--only sleep,memory,race] [--json FILE]

sleep   tokens per second of the Hugging Face engine with episodes of two turns on the model of examples/tools. The tool
        answers at once, or sleeps between 0.2 and 2 s at random, by turns. The goal is a ratio of at least 0.9.
memory  resident memory of a process with 1,000 episodes that all wait for their tool; the goal is below 500 MB, the
        engine and its libraries included.
race    samples per second of `streamrl up examples/tools/run.yaml` next to trl's `GRPOTrainer` with the same class as
        `environment_factory`: the same model, prompts and groups, on both cores, and no held-out prompts, which trl
        has not either. The goal is a ratio of at least 3.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from facts import write_json
from race import DEADLINE, TRL_PYTHON, read_run
from spread import ratios, spread, table

from streamrl.config import RunConfig
from streamrl.producers.engines.hf import HfEngine
from streamrl.producers.episodes import Chat, Episode, Task
from streamrl.producers.episodes.sampler import EpisodeSampler
from streamrl.producers.sampler import SampleOrder
from streamrl.producers.tokenizer import Tokenizer
from streamrl.runfile import load
from streamrl.wire import Prompt, pack_int32

ROOT = Path(__file__).parents[1]
EXAMPLE = ROOT / "examples" / "tools"
AT_ONCE, WAITING = 640, 1000
TRL = {"precision": "highest", "attention": "sdpa", "lr": 4e-4, "warmup_steps": 2, "threads": 2, "max_new_tokens": 30}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, metavar="FILE")
    parser.add_argument("--only", default="sleep,memory,race")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=12.0, help="of each measurement of `sleep`")
    parser.add_argument("--steps", type=int, default=10, help="of each run of `race`")
    parser.add_argument("--memory-alone", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.memory_alone:
        print(json.dumps(asyncio.run(memory())))
        return
    subprocess.run([sys.executable, str(EXAMPLE / "prepare.py")], check=True)
    parts: dict[str, Callable[[], dict[str, Any]]] = {
        "sleep": lambda: asyncio.run(sleep(arguments.rounds, arguments.seconds)),
        "memory": memory_alone,
        "race": lambda: race(arguments.rounds, arguments.steps),
    }
    results = {}
    for name in arguments.only.split(","):
        results[name] = parts[name]()
        table(name, {key: value for key, value in results[name].items() if isinstance(value, dict)})
    if arguments.json:
        write_json(arguments.json, results)


class Waiting(Episode):
    """Two turns; between them somebody answers, after `pause()` seconds."""

    def __init__(self, pause: Callable[[], float]) -> None:
        self._pause = pause
        self.waiting = 0

    async def run(self, task: Task, chat: Chat) -> float:
        """One episode."""
        reply = await chat(task.messages)
        self.waiting += 1
        await asyncio.sleep(self._pause())
        self.waiting -= 1
        await chat([*task.messages, reply.message, {"role": "user", "content": "ab+1"}])
        return 1.0


def config_of(**episode: Any) -> RunConfig:
    config = load(EXAMPLE / "run.yaml").config
    changed = config.episode.model_copy(update={"deadline": 120.0, **episode})
    return config.model_copy(update={"episode": changed})


def order_of(tokenizer: Tokenizer, number: int) -> SampleOrder:
    messages = [{"role": "user", "content": "ab+1"}]
    (ids,) = tokenizer.encode([tokenizer.chat_text(messages)], special=False)
    return SampleOrder(Prompt(tokens=pack_int32(ids), messages=messages), id=f"bench-{number}")


async def sleep(rounds: int, seconds: float) -> dict[str, Any]:
    """Tokens per second with and without sleeping, by turns."""
    config = config_of(concurrent=AT_ONCE)
    tokenizer, engine = Tokenizer.load(config.model), HfEngine(config, 0)
    await engine.start()
    source = random.Random(0)
    pauses: dict[str, Callable[[], float]] = {"at_once": lambda: 0.0, "sleeping": lambda: source.uniform(0.2, 2.0)}
    speeds: dict[str, list[float]] = {name: [] for name in pauses}
    try:
        for _ in range(rounds):
            for name, pause in pauses.items():
                speeds[name].append(await tokens_per_second(config, engine, tokenizer, Waiting(pause), seconds))
    finally:
        await engine.close()
    return {
        **{f"{name}_tokens_per_second": spread(values) for name, values in speeds.items()},
        "sleeping_to_at_once": ratios(speeds["sleeping"], speeds["at_once"]),
    }


async def tokens_per_second(
    config: RunConfig, engine: HfEngine, tokenizer: Tokenizer, episode: Episode, seconds: float
) -> float:
    """Of a constant number of episodes, after three seconds in which they spread."""
    async with EpisodeSampler(config, engine, tokenizer, episode) as sampler:

        async def again(number: int) -> None:
            while True:
                await sampler.sample(order_of(tokenizer, number))

        tasks = [asyncio.ensure_future(again(number)) for number in range(AT_ONCE)]
        try:
            await asyncio.wait(tasks, timeout=3.0, return_when=asyncio.FIRST_EXCEPTION)
            before, begin = engine.load().tokens_sampled, time.perf_counter()
            await asyncio.wait(tasks, timeout=seconds, return_when=asyncio.FIRST_EXCEPTION)
            tokens, took = engine.load().tokens_sampled - before, time.perf_counter() - begin
            for task in tasks:
                if task.done():
                    task.result()
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
    return tokens / took


def memory_alone() -> dict[str, Any]:
    """In a process of its own, which has done nothing else."""
    command = [sys.executable, __file__, "--memory-alone"]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=DEADLINE)
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    print("memory", found)
    return found


async def memory() -> dict[str, Any]:
    """Resident memory before the episodes, and with all of them waiting, in MB."""
    config = config_of(concurrent=WAITING)
    tokenizer, engine = Tokenizer.load(config.model), HfEngine(config, 0)
    await engine.start()
    episode = Waiting(lambda: 3600.0)
    try:
        async with EpisodeSampler(config, engine, tokenizer, episode) as sampler:
            before = resident()
            tasks = [asyncio.ensure_future(sampler.sample(order_of(tokenizer, number))) for number in range(WAITING)]
            while episode.waiting < WAITING:
                await asyncio.wait(tasks, timeout=0.1, return_when=asyncio.FIRST_EXCEPTION)
                if failed := [task for task in tasks if task.done()]:
                    failed[0].result()
            after = resident()
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
    finally:
        await engine.close()
    return {"episodes": WAITING, "before_mb": before, "resident_mb": after, "goal_mb": 500}


def resident() -> float:
    fields = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return round(int(fields["VmRSS"].split()[0]) * 1024 / 1e6, 1)


def race(rounds: int, steps: int) -> dict[str, Any]:
    """Samples per second of both, by turns; trl with the fastest of some sizes of micro-batches."""
    if not TRL_PYTHON.exists():
        raise SystemExit(f"no {TRL_PYTHON}: `make crosscheck` makes it")
    rows = max((32, 64, 128), key=lambda size: trl(0, 2, size))
    speeds: dict[str, list[float]] = {"streamrl": [], "trl": []}
    for seed in range(rounds):
        speeds["streamrl"].append(ours(seed, steps))
        speeds["trl"].append(trl(seed, steps, rows))
    return {
        **{f"{side}_samples_per_second": spread(values) for side, values in speeds.items()},
        "speedup_vs_trl": ratios(speeds["streamrl"], speeds["trl"]),
        "trl_rows": rows,
    }


def ours(seed: int, steps: int) -> float:
    """From the first sampled tokens to the end of the last step, as `make demo-tools` runs it."""
    with tempfile.TemporaryDirectory(prefix="race-") as folder:
        run_dir = Path(folder) / "run"
        words = ["up", str(EXAMPLE / "run.yaml"), "--run", str(run_dir), "--screen", "plain"]
        sets = [f"seed={seed}", f"learner.steps={steps}", "learner.stop_at_accuracy=null"]
        sets += ["evaluation.every=0", "evaluation.final_prompts=0"]
        command = [sys.executable, "-m", "streamrl", *words, *(word for one in sets for word in ("--set", one))]
        done = subprocess.run(command, capture_output=True, text=True, timeout=DEADLINE, check=False)
        if done.returncode:
            raise SystemExit(f"{' '.join(command)} ended with {done.returncode}:\n{done.stderr[-3000:]}")
        found = read_run(run_dir)
        return samples_of_a_step() * found["steps"] / found["seconds"]


def samples_of_a_step() -> int:
    config = config_of()
    return config.learner.groups_per_step * config.sampling.group_size


def trl(seed: int, steps: int, rows: int) -> float:
    """One run in its own environment; samples per second of its steps."""
    config = config_of()
    options = {"example": str(EXAMPLE), "seed": seed, "steps": steps, "rows": rows, **TRL}
    options |= {"groups": config.learner.groups_per_step, "size": config.sampling.group_size}
    command = [str(TRL_PYTHON), str(Path(__file__).parent / "episodes_trl.py"), json.dumps(options)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=DEADLINE, check=False)
    if done.returncode:
        raise SystemExit(f"episodes_trl.py ended with {done.returncode}:\n{done.stderr[-3000:]}")
    found = json.loads(done.stdout.splitlines()[-1])
    speed: float = samples_of_a_step() * found["steps"] / found["ends"][-1]
    return speed


if __name__ == "__main__":
    main()
