"""Steps of one rank, micro-batch by micro-batch, for the tests of both kinds of steps."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tiny_policy import make_batch
from weights_kit import full_tensors

from streamrl.learner.algorithms.advantages import KNOWN_EARLY
from streamrl.learner.batch import TrainSample, sizes
from streamrl.learner.checkpoint import Checkpoints
from streamrl.learner.groups import group_data
from streamrl.learner.policy import Actor
from streamrl.learner.rank_group import RankWorker
from streamrl.learner.step import Models, StepStats


def rewarded(seed: int, groups: int = 6, size: int = 4, *, near: Actor | None = None) -> list[TrainSample]:
    """Groups with made-up rewards of 0 and 1, ages of 0 to 3 steps, and the advantages of their recipe where known.

    Args:
        seed: of everything.
        groups: so many.
        size: responses of each.
        near: log-probs are those of this policy, up to a little noise; None: made up.
    """
    random = np.random.default_rng(seed)
    batch = make_batch(seed, groups, size)
    lengths = [len(sample.tokens) for sample in batch]
    known = near.compute_log_prob(batch).logprobs if near is not None else [sample.logprobs for sample in batch]
    return [
        replace(
            sample,
            logprobs=(logprobs + 0.1 * random.normal(size=len(logprobs))).astype(np.float32),
            steps=random.integers(7, 11, len(sample.tokens)),
            reward=float(random.integers(0, 2)),
            group_mean=float(np.mean(lengths[place - place % size :][:size])),
        )
        for place, (sample, logprobs) in enumerate(zip(batch, known, strict=True))
    ]


def estimated(batch: Sequence[TrainSample], actor: Actor) -> list[TrainSample]:
    """With the advantages that a group alone gives, as they come from the ledger."""
    if not actor.recipe.estimator.needs <= KNOWN_EARLY:
        return [replace(sample, advantages=np.zeros(len(sample.tokens), dtype=np.float32)) for sample in batch]
    done = []
    for group_id in dict.fromkeys(sample.group_id for sample in batch):
        group = [sample for sample in batch if sample.group_id == group_id]
        for sample, array in zip(group, actor.recipe.estimator(group_data(group)), strict=True):
            done.append(replace(sample, advantages=array.astype(np.float32)))
    return done


def worker_of(actor: Actor, collected: bool, **models: Any) -> RankWorker:
    """A worker with this actor that streams or collects, whatever its recipe says."""
    config, unused = actor.config, Path("unused")
    worker = RankWorker(config, actor.ranks, Models(actor=actor, **models), Checkpoints(unused))
    worker._streams = not collected
    return worker


def step(worker: RankWorker, batch: Sequence[TrainSample], cuts: Sequence[int] = (), *, at: int = 10) -> StepStats:
    """One step with the groups of a batch in micro-batches that end before the groups numbered `cuts`."""
    worker.step = at
    group_ids = list(dict.fromkeys(sample.group_id for sample in batch))
    for start, end in zip([0, *cuts], [*cuts, len(group_ids)], strict=True):
        part = group_ids[start:end]
        assert worker.train(part, [sample for sample in batch if sample.group_id in part])
    return worker.apply(*sizes(batch))


def weights(actor: Actor) -> dict[str, torch.Tensor]:
    """All weights."""
    return full_tensors(actor)
