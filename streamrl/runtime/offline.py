"""Accuracy of saved weights on held-out prompts, outside of any run: the figures before and after training."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TypeAlias

from streamrl import wire
from streamrl.config import RunConfig
from streamrl.consumers.calls import ScoringFailed
from streamrl.consumers.opening import models_of, open_scorer
from streamrl.consumers.reward import RewardContext, RewardSample
from streamrl.consumers.scoring import PatientScorer
from streamrl.errors import DataError, DeadlineExceeded, StreamrlError, unwrapped
from streamrl.images.store import ImageStore
from streamrl.pass_at_k import at_k
from streamrl.producers.dataset import PromptLimits, load_prompts
from streamrl.producers.engines.hf import HfEngine
from streamrl.producers.episodes.sampler import EpisodeFailed, sampler_of
from streamrl.producers.sampler import SampleOrder, Sampler, seed_of
from streamrl.producers.tokenizer import Tokenizer
from streamrl.sources import series_of

logger = logging.getLogger(__name__)

OnProgress: TypeAlias = Callable[[str, int, int], None]
"""Called with a label, responses done, responses in all."""


def with_model(config: RunConfig, path: str) -> RunConfig:
    tokenizer = config.model.tokenizer or config.model.path
    model = config.model.model_copy(update={"path": path, "tokenizer": tokenizer})
    return config.model_copy(update={"model": model})


async def measure_accuracy(
    config: RunConfig, run_dir: Path, label: str, seed: int, on_progress: OnProgress
) -> dict[str, float]:
    """The share of scored responses above `evaluation.threshold` (`accuracy`), and what `at_k` says of several samples.

    `accuracy/NAME` is that of one source. It is of the first `evaluation.final_prompts` held-out prompts, sampled as
    those of `evaluation` with transformers in this process, whatever engine the run had: its servers have ended or
    belong to others. Runs whose rewards cannot measure it then are refused at their start. A response that fails, or
    whose reward fails, does not count; StreamrlError if none could be scored.
    """
    if not config.data.held_out:
        raise StreamrlError("no held-out prompts to measure on", "set data.held_out")
    tokenizer = await asyncio.to_thread(Tokenizer.load, config.model)
    limits = PromptLimits.of(config)
    sources, paths = config.data.whole(config.data.held_out), config.plugin_paths
    store = ImageStore(config.images)
    data = await asyncio.to_thread(load_prompts, sources, tokenizer, limits, paths, evaluation=True, store=store)
    prompts = [wire.decode(prompt, wire.Prompt) for prompt in data.prompts[: config.evaluation.final_prompts]]
    engine = HfEngine(config, seed)
    await engine.start()
    try:
        with unwrapped():
            async with (
                models_of(config) as models,
                open_scorer(config, RewardContext(config, run_dir, models)) as scorer,
            ):
                patient, progress = PatientScorer(scorer, config.lease), partial(on_progress, label)
                async with sampler_of(config, engine, tokenizer) as sampler:
                    values = await _scores(config, sampler, patient, prompts, on_progress=progress)
    finally:
        await engine.close()
    right = [[value > config.evaluation.threshold for value in scored] for scored in values if scored]
    if not right:
        raise StreamrlError(f"no response of the {label} could be scored", "see the warnings above")
    accuracy = sum(map(sum, right)) / sum(map(len, right))
    counts = ((len(scored), sum(scored)) for scored in right)
    known, by_source = set[str](), dict[str, list[bool]]()
    for prompt, scored in zip(prompts, values, strict=True):
        if prompt.source and scored:
            found = by_source.setdefault(f"accuracy/{series_of(prompt.source, known)}", [])
            found += [value > config.evaluation.threshold for value in scored]
    shares = {name: sum(found) / len(found) for name, found in by_source.items()}
    return {"accuracy": accuracy, **at_k(counts, config.evaluation.samples), **shares}


async def _scores(
    config: RunConfig,
    sampler: Sampler,
    scorer: PatientScorer,
    prompts: Sequence[wire.Prompt],
    *,
    on_progress: Callable[[int, int], None],
) -> list[list[float]]:
    """The scores of each prompt's responses."""
    # Enough to keep every slot busy while finished responses are scored.
    room = asyncio.Semaphore(2 * sampler.capacity(config.engine.slots))
    total = len(prompts) * config.evaluation.samples
    values: list[list[float]] = [[] for _ in prompts]
    done = 0

    async def scored(number: int, prompt: wire.Prompt) -> wire.SampleScore | ScoringFailed:
        name = f"measure-{number}"
        try:
            sample = await sampler.sample(SampleOrder(prompt, name, seed=seed_of(config, name, evaluation=True)))
        except (EpisodeFailed, DataError, DeadlineExceeded) as error:
            return ScoringFailed(error.message)
        (score,) = await scorer.score_group([RewardSample.of(prompt, sample)])
        return score

    async def one(number: int) -> None:
        nonlocal done
        prompt = prompts[number % len(prompts)]
        async with room:
            score = await scored(number, prompt)
            if isinstance(score, ScoringFailed):
                logger.warning("held-out response not scored", extra={"line": prompt.line, "why": score.message})
            else:
                values[number % len(prompts)].append(score.value)
            done += 1
            on_progress(done, total)

    async with asyncio.TaskGroup() as beside:
        telling = beside.create_task(scorer.tell(logger.warning), name="tell what is waited for")
        async with asyncio.TaskGroup() as tasks:
            for number in range(total):
                tasks.create_task(one(number))
        telling.cancel()
    return values
