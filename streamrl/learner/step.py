"""One step on one rank, made of the verbs of actor, critic and reference; all functions are collective.

```
streaming   stream            each micro-batch is differentiated as it comes in
            update_streamed   one update
collected   collect           each micro-batch is kept, with proximal, reference, values, entropy (no gradient)
            update_collected  advantages -> normalised over the step -> passes x mini-batches updates
```
`Recipe.streams` says which of the two a run takes. Mini-batches are drawn by (seed, step, pass), the same on all ranks.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TypeVar

import numpy as np
import torch

from streamrl.config import RunConfig
from streamrl.learner.algorithms.advantages import normalise, value_targets
from streamrl.learner.algorithms.kl import KlController, penalties
from streamrl.learner.algorithms.losses import ValueSums
from streamrl.learner.algorithms.recipe import Recipe
from streamrl.learner.algorithms.tokens import TokenSums
from streamrl.learner.batch import TrainSample
from streamrl.learner.critic import Critic, make_critic
from streamrl.learner.groups import group_data
from streamrl.learner.optimizer import UpdateStats
from streamrl.learner.policy import Actor
from streamrl.learner.ranks import Ranks
from streamrl.learner.reference import Reference, make_reference
from streamrl.learner.tree import FloatArray
from streamrl.wire import Float32Array

logger = logging.getLogger(__name__)
_T = TypeVar("_T")


@dataclass(kw_only=True, slots=True)
class Models:
    actor: Actor
    critic: Critic | None = None
    reference: Reference | None = None
    kl: KlController = field(init=False)

    def __post_init__(self) -> None:
        self.kl = KlController(self.actor.config.learner.kl)

    @property
    def recipe(self) -> Recipe:
        return self.actor.recipe

    @property
    def kl_coefficient(self) -> float:
        """Present factor of the KL term; 0 where there is none."""
        return self.kl.coefficient if self.recipe.kl.where != "none" else 0.0

    @property
    def movable(self) -> list[Actor | Critic | Reference]:
        return [model for model in (self.actor, self.critic, self.reference) if model is not None]

    def discard(self) -> None:
        self.actor.discard()
        if self.critic is not None:
            self.critic.discard()


def make_models(config: RunConfig, ranks: Ranks) -> Models:
    actor = Actor(config, ranks)
    critic = make_critic(config, ranks, actor) if config.learner.critic.kind == "model" else None
    base = config.learner.reference.kind == "base"
    reference: Reference | None = actor if base else make_reference(config, ranks, actor)
    return Models(actor=actor, critic=critic, reference=reference)


@dataclass(frozen=True, kw_only=True, slots=True)
class StepStats:
    """The same on all ranks. Means are over the updates that were applied."""

    updates: int  # of the actor that were applied
    skipped_updates: int  # of actor and critic, whose gradient was not finite
    skipped: bool  # nothing of the step is in the weights
    diverged: bool  # actor or critic had updates and none could be applied, or the step could not be computed
    loss: float
    grad_norm: float  # before clipping
    lr: float
    kl_coefficient: float
    trained: TokenSums  # sums over all trained tokens; a token counts in each of its updates
    critic: tuple[UpdateStats[ValueSums], ...]  # updates that were applied

    @classmethod
    def of(
        cls,
        updates: Sequence[UpdateStats[TokenSums]],
        *,
        kl_coefficient: float,
        critic: Sequence[UpdateStats[ValueSums]] = (),
        failed: bool = False,
    ) -> StepStats:
        applied = [stats for stats in updates if not stats.skipped]
        learnt = tuple(stats for stats in critic if not stats.skipped)
        count = max(1, len(applied))
        return cls(
            updates=len(applied),
            skipped_updates=len(updates) - len(applied) + len(critic) - len(learnt),
            skipped=failed or not (applied or learnt),
            diverged=failed or (bool(updates) and not applied) or (bool(critic) and not learnt),
            loss=sum(stats.loss for stats in applied) / count,
            grad_norm=sum(stats.grad_norm for stats in applied) / count,
            lr=sum(stats.lr for stats in applied) / count,
            kl_coefficient=kl_coefficient,
            trained=sum((stats.trained for stats in applied), TokenSums()),
            critic=learnt,
        )


# ---- streaming


def stream(models: Models, batch: Sequence[TrainSample], step: int) -> None:
    """Add the gradient of this rank's share of a micro-batch; theta is proximal in every pass, so u = 1."""
    batch = _with_reference(models, batch)
    models.actor.accumulate(batch, step=step, kl_coefficient=models.kl_coefficient)


def update_streamed(models: Models, *, tokens: int, responses: int) -> StepStats:
    """`tokens` and `responses` are those of all ranks, also of groups that are not computed."""
    size = models.recipe.normaliser(tokens=tokens, responses=responses)
    return StepStats.of([models.actor.apply_update(size)], kl_coefficient=models.kl_coefficient)


# ---- collected


def collect(models: Models, batch: Sequence[TrainSample]) -> list[TrainSample]:
    """This rank's share of a micro-batch with what `Recipe.computes` names, computed without gradient."""
    live = [not models.recipe.skips_zero or sample.has_advantage for sample in batch]
    computed = iter(_compute(models, [sample for sample, alive in zip(batch, live, strict=True) if alive]))
    return [next(computed) if alive else sample for sample, alive in zip(batch, live, strict=True)]


def update_collected(models: Models, group_ids: Sequence[int], samples: Sequence[TrainSample], step: int) -> StepStats:
    """All updates of a step with the groups of all ranks, of which `samples` are this rank's share.

    When advantages cannot be computed on some rank, none is applied: `skipped`. `step` is that before the update.
    """
    recipe, coefficient = models.recipe, models.kl_coefficient
    # The ranks agree before `_normalised`, which is collective.
    arrays = _on_all(models.actor.ranks, partial(_advantages, models, samples))
    estimated = None if arrays is None else _on_all(models.actor.ranks, partial(_normalised, models, samples, arrays))
    if estimated is None:
        return StepStats.of([], kl_coefficient=coefficient, failed=True)
    policy_updates: list[UpdateStats[TokenSums]] = []
    critic_updates: list[UpdateStats[ValueSums]] = []
    for chosen in _mini_batches(recipe, group_ids, step):
        batch = [sample for sample in estimated if sample.group_id in chosen]
        if recipe.critic is None or step >= recipe.critic.warmup_steps:
            policy_updates.append(models.actor.update_policy(batch, step=step, kl_coefficient=coefficient))
        if models.critic is not None and recipe.critic is not None:
            critic_updates += [models.critic.update_critic(batch) for _ in range(recipe.critic.updates_per_step)]
    return StepStats.of(policy_updates, kl_coefficient=coefficient, critic=critic_updates)


def _compute(models: Models, batch: list[TrainSample]) -> list[TrainSample]:
    wanted = models.recipe.computes
    if wanted & {"proximal", "entropy"}:
        found = models.actor.compute_log_prob(batch, calculate_entropy="entropy" in wanted)
        spread: Sequence[Float32Array | None] = found.entropy or [None] * len(batch)
        batch = [
            replace(sample, proximal=logprobs if "proximal" in wanted else None, entropy=entropy)
            for sample, logprobs, entropy in zip(batch, found.logprobs, spread, strict=True)
        ]
    if "values" in wanted and models.critic is not None:
        values = models.critic.compute_values(batch)
        batch = [replace(sample, values=value) for sample, value in zip(batch, values, strict=True)]
    return _with_reference(models, batch)


def _with_reference(models: Models, batch: Sequence[TrainSample]) -> list[TrainSample]:
    if models.reference is None:
        return list(batch)
    found = models.reference.compute_ref_log_prob(batch)
    return [replace(sample, reference=logprobs) for sample, logprobs in zip(batch, found, strict=True)]


def _on_all(ranks: Ranks, compute: Callable[[], list[_T]]) -> list[_T] | None:
    """What `compute` returns; None on all ranks when it raised a ValueError on one."""
    done = None
    try:
        done = compute()
    except ValueError as error:
        logger.error("advantages not computed", extra={"error": str(error)})  # noqa: TRY400
    return done if ranks.all_min(int(done is not None)) == [1] else None


def _normalised(models: Models, samples: Sequence[TrainSample], arrays: list[FloatArray]) -> list[TrainSample]:
    """The samples with their advantages, and the returns of a critic. Collective."""
    recipe, critic = models.recipe, models.recipe.critic
    advantages = normalise(arrays, recipe.estimator.normalise, partial(_all_sum, models.actor.ranks))
    returns: Sequence[FloatArray | None] = [None] * len(samples)
    if critic is not None:
        data = group_data(samples, _penalties(models, samples))  # of all groups: returns need no baseline
        returns = value_targets(data, gamma=critic.gamma, lam=critic.lam)
    return [
        replace(
            sample,
            advantages=(advantage * (not (recipe.mask_truncated and sample.truncated))).astype(np.float32),
            returns=None if target is None else target.astype(np.float32),
        )
        for sample, advantage, target in zip(samples, advantages, returns, strict=True)
    ]


def _advantages(models: Models, samples: Sequence[TrainSample]) -> list[FloatArray]:
    """Advantages of each sample by its group, before they are normalised over the step."""
    recipe = models.recipe
    if recipe.early:
        return [sample.advantages.astype(np.float64) for sample in samples]
    groups: dict[int, list[int]] = {}
    for index, sample in enumerate(samples):
        groups.setdefault(sample.group_id, []).append(index)
    arrays: list[FloatArray] = [np.zeros(0)] * len(samples)
    for members in groups.values():
        group = [samples[index] for index in members]
        data = group_data(group, _penalties(models, group), texts=recipe.texts)
        for index, array in zip(members, recipe.estimator(data), strict=True):
            arrays[index] = array
    return arrays


def _penalties(models: Models, group: Sequence[TrainSample]) -> list[FloatArray] | None:
    kl = models.recipe.kl
    if kl.where != "reward":
        return None
    proximal = [sample.proximal for sample in group if sample.proximal is not None]
    reference = [sample.reference for sample in group if sample.reference is not None]
    return penalties(proximal, reference, kl.estimator, models.kl_coefficient)


def _mini_batches(recipe: Recipe, group_ids: Sequence[int], step: int) -> Iterator[set[int]]:
    for number in range(recipe.passes):
        order = np.random.default_rng([recipe.seed, step, number]).permutation(np.asarray(group_ids))
        for part in np.array_split(order, recipe.mini_batches):
            if part.size:
                yield set(part.tolist())


def _all_sum(ranks: Ranks, values: FloatArray) -> FloatArray:
    total = ranks.all_sum(torch.from_numpy(np.ascontiguousarray(values)).to(ranks.device))
    return np.asarray(total.cpu().numpy())
