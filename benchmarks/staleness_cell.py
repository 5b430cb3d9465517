"""One cell of the staleness experiment: the sort task learnt from samples of a policy that is S steps old.

    python benchmarks/staleness_cell.py CELL         a cell as JSON; lines of progress and a result on stdout

Everything is in this process: the decoder of the Hugging Face engine samples, the learner's `RankWorker` (one rank)
trains, and a ring of the last S + 1 weights lies between them. The groups of step k are sampled by the weights of step
max(0, k - S), their log-probabilities are kept as sampled, and their tokens have the age of these weights.
"""

from __future__ import annotations

import json
import logging
import sys
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from staleness_grid import Cell
from train_lines import Lines

from streamrl.config import RunConfig
from streamrl.demo import task
from streamrl.learner.algorithms.advantages import KNOWN_EARLY
from streamrl.learner.batch import TrainSample
from streamrl.learner.checkpoint import Checkpoints
from streamrl.learner.groups import group_data
from streamrl.learner.rank_group import RankWorker
from streamrl.learner.ranks import Ranks
from streamrl.learner.step import StepStats, make_models
from streamrl.producers.engines.model import load_model, stop_tokens
from streamrl.producers.engines.slots import Job, SlotBatch
from streamrl.runfile import load

EXAMPLE = Path(__file__).parents[1] / "examples" / "sort"

Weights = dict[str, torch.Tensor]


def config_of(cell: Cell) -> RunConfig:
    """The run that one would start with the settings of a cell."""
    values = {
        "seed": cell.seed,
        "max_staleness": cell.staleness,
        "learner.lr": cell.lr,
        "learner.steps": cell.steps,
        "learner.groups_per_step": cell.groups,
        "sampling.group_size": cell.size,
        "sampling.min_group": min(2, cell.size),
        "engine.slots": min(256, cell.groups * cell.size),
        "engine.attention": "eager",
        # What the cells share, whatever the demo's own recipe is.
        "learner.loss.use": "ppo",
        "learner.correction.base": "decoupled",
        "learner.warmup_steps": 5,
    }
    rule = [] if cell.rule == "own" else [f"learner.correction.lr_scale={cell.rule}"]
    overrides = [*(f"{name}={value}" for name, value in values.items()), *cell.settings, *rule]
    return load(EXAMPLE / "run.yaml", overrides, {}).config


class Prompts:
    """The prompts of the example with their right answers, as token ids."""

    def __init__(self, path: Path, stop: int) -> None:
        rows = [json.loads(line) for line in path.read_text().splitlines()]
        self.ids = [tuple(task.encode(row["prompt"])) for row in rows]
        self.answers = [[*task.encode(row["answer"]), stop] for row in rows]


class Sampler:
    """The policy that samples, with weights that others give it."""

    def __init__(self, config: RunConfig) -> None:
        model = load_model(config)
        self.stop = stop_tokens(model.generation_config, model.config)
        self._limit = config.sampling.max_new_tokens
        self._parameters = dict(model.named_parameters())
        self._generator = torch.Generator().manual_seed(0)
        self._batch = SlotBatch(
            model,
            slots=config.engine.slots,
            context=config.model.context,
            stop_tokens=self.stop,
            generator=self._generator,
        )

    def sample(self, weights: Weights, prompts: Sequence[tuple[int, ...]], seed: int) -> list[Job]:
        """One response to each prompt, in their order. The same arguments give the same responses."""
        with torch.no_grad():
            for name, parameter in self._parameters.items():
                parameter.copy_(weights[name])
        self._generator.manual_seed(seed)
        jobs = deque(Job(ticket, prompt, self._limit, 1.0) for ticket, prompt in enumerate(prompts))
        ended: list[Job] = []
        while jobs or self._batch.active:
            free = self._batch.slots - self._batch.active
            # Slots are filled when an eighth of them is free, as the engine does it.
            if jobs and 8 * free >= self._batch.slots:
                ended += self._batch.admit([jobs.popleft() for _ in range(min(free, len(jobs)))])
            if self._batch.active:
                ended += self._batch.step()
        return sorted(ended, key=lambda outcome: outcome.ticket)


class Run:
    """A cell in progress."""

    def __init__(self, cell: Cell, ranks: Ranks) -> None:
        config = config_of(cell)
        self._cell = cell
        models = make_models(config, ranks)
        self._actor = models.actor
        self._worker = RankWorker(config, ranks, models, Checkpoints(EXAMPLE / "checkpoints"))
        self._sampler = Sampler(config)
        (stop,) = self._sampler.stop
        self._train = Prompts(EXAMPLE / "cache" / "train.jsonl", stop)
        self._held_out = Prompts(EXAMPLE / "cache" / "held_out.jsonl", stop)
        self._order = np.random.default_rng(cell.seed).permutation(len(self._train.ids))
        self._ring: deque[tuple[int, Weights]] = deque(maxlen=cell.staleness + 1)
        self._keep()

    def __call__(self, tell: Callable[[int, float], None]) -> dict[str, Any]:
        """Train all steps.

        Args:
            tell: hears of each step, and of the accuracy that was measured last.
        """
        cell = self._cell
        curve, learnt = [(0, self._accuracy(cell.prompts, 0))], []
        for step in range(1, cell.steps + 1):
            reward, stats = self._step(step)
            learnt.append((step, reward, stats))
            self._keep()
            if step % cell.every == 0:
                curve.append((step, self._accuracy(cell.prompts, step)))
            tell(step, curve[-1][1])
        return {
            "final": self._accuracy(cell.final_prompts, cell.steps + 1),
            "accuracy": curve,
            "skipped": cell.steps - self._worker.step,
            **_series(learnt, cell.every),
        }

    def _keep(self) -> None:
        """Put a copy of the present weights into the ring; the oldest falls out."""
        weights = {name: parameter.to_local().clone() for name, parameter in self._actor.parameters.items()}
        self._ring.append((self._worker.step, weights))

    def _step(self, step: int) -> tuple[float, StepStats]:
        cell = self._cell
        begin = (step - 1) * cell.groups
        chosen = [int(self._order[place % len(self._order)]) for place in range(begin, begin + cell.groups)]
        age, weights = self._ring[0]
        prompts = [self._train.ids[index] for index in chosen for _ in range(cell.size)]
        outcomes = self._sampler.sample(weights, prompts, _seed(cell.seed, step))
        samples = []
        for place, index in enumerate(chosen):
            group = outcomes[place * cell.size : (place + 1) * cell.size]
            samples += self._group(begin + place, index, group, age)
        self._worker.train(range(begin, begin + cell.groups), samples, idle=False)
        stats = self._worker.apply(sum(len(sample.tokens) for sample in samples), len(samples))
        return float(np.mean([sample.reward for sample in samples])), stats

    def _group(self, group_id: int, index: int, outcomes: Sequence[Job], step: int) -> list[TrainSample]:
        prompt = np.asarray(self._train.ids[index], dtype=np.int32)
        samples = [
            TrainSample(
                group_id=group_id,
                prompt=prompt,
                tokens=np.asarray(outcome.tokens, dtype=np.int32),
                logprobs=np.asarray(outcome.logprobs, dtype=np.float32),
                steps=np.full(len(outcome.tokens), step, dtype=np.int64),
                reward=float(outcome.tokens == self._train.answers[index]),
                advantages=np.zeros(len(outcome.tokens), dtype=np.float32),
            )
            for outcome in outcomes
        ]
        if not self._worker.recipe.estimator.needs <= KNOWN_EARLY:
            return samples
        advantages = self._worker.recipe.estimator(group_data(samples))
        return [
            replace(sample, advantages=array.astype(np.float32))
            for sample, array in zip(samples, advantages, strict=True)
        ]

    def _accuracy(self, count: int, salt: int) -> float:
        """Share of right responses to held-out prompts, sampled once each by the newest weights."""
        prompts = self._held_out.ids[:count]
        outcomes = self._sampler.sample(self._ring[-1][1], prompts, _seed(self._cell.seed, salt, 1))
        return float(np.mean([outcome.tokens == self._held_out.answers[outcome.ticket] for outcome in outcomes]))


def _seed(*parts: int) -> int:
    return int(np.random.SeedSequence(parts).generate_state(1)[0])


def _series(learnt: Sequence[tuple[int, float, StepStats]], every: int) -> dict[str, Any]:
    """Means over the steps between two measurements."""
    series: dict[str, list[float]] = {}
    for start in range(0, len(learnt), every):
        part = learnt[start : start + every]
        values = {
            "reward": [reward for _, reward, _ in part],
            "lr": [stats.lr for *_, stats in part],
            "ess": [stats.trained.ess for *_, stats in part],
            "response_ess": [stats.trained.response_ess for *_, stats in part],
            "masked": [stats.trained.mean("masked") for *_, stats in part],
            "clipped": [stats.trained.mean("clipped") for *_, stats in part],
            "kl": [stats.trained.mean("kl_k3") for *_, stats in part],
            "entropy": [stats.trained.mean("entropy") for *_, stats in part],
            "grad_norm": [stats.grad_norm for *_, stats in part],
            "age": [stats.trained.mean("age") for *_, stats in part],
        }
        for name, numbers in values.items():
            series.setdefault(name, []).append(float(f"{np.mean(numbers):.5g}"))
    return {"series": series}


def main() -> None:
    lines = Lines()
    logging.disable(logging.WARNING)
    transformers.logging.disable_progress_bar()
    torch.set_num_threads(1)
    ranks = Ranks(rank=0, world=1, device=torch.device("cpu"), deadline=300)
    cell = Cell.of(json.loads(sys.argv[1]))
    begin, busy = time.perf_counter(), time.process_time()
    found = Run(cell, ranks)(lambda step, accuracy: lines.ready(step=step, accuracy=accuracy))
    seconds, cpu = time.perf_counter() - begin, time.process_time() - busy
    lines.ready(result=asdict(cell) | found | {"seconds": round(seconds, 1), "cpu_seconds": round(cpu, 1)})
    ranks.close()


if __name__ == "__main__":
    main()
