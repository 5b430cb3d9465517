"""A step that is collected before it is learnt from: several updates, or advantages that need the whole step.

```
add     passes without gradient, as groups come in: proximal, reference, values, entropy; the samples are kept
apply   advantages -> normalised over the step -> passes x mini-batches updates of the actor (and of the critic)
```
Mini-batches are drawn by (seed, step, pass), the same on all ranks, whatever the order in which groups came.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np
import numpy.typing as npt
import torch

from streamrl.learner.algorithms.advantages import normalise
from streamrl.learner.algorithms.corrections import old_logprobs
from streamrl.learner.algorithms.kl import penalties
from streamrl.learner.algorithms.recipe import Recipe
from streamrl.learner.batch import TrainSample, sizes
from streamrl.learner.groups import group_data
from streamrl.learner.ranks import Ranks
from streamrl.learner.results import CriticStats, StepStats, UpdateStats
from streamrl.learner.streaming import Models
from streamrl.wire import Float32Array

logger = logging.getLogger(__name__)
FloatArray = npt.NDArray[np.float64]


class Collected:
    """The way of a recipe that does not stream.

    Args:
        models: of this rank.
        ranks: the ranks of this learner.
    """

    def __init__(self, models: Models, ranks: Ranks) -> None:
        self._models, self._ranks = models, ranks
        self._recipe: Recipe = models.actor.recipe
        self._gids: list[int] = []
        self._samples: list[TrainSample] = []

    def add(self, gids: Sequence[int], samples: Sequence[TrainSample], step: int) -> None:
        """See `Way.add`: what needs no gradient is computed at once."""
        del step
        idle = self._recipe.skips_zero and not self._recipe.corrections.whole_step
        live = [not idle or sample.has_advantage for sample in samples]
        computed = iter(self._compute([sample for sample, alive in zip(samples, live, strict=True) if alive]))
        self._samples += [next(computed) if alive else sample for sample, alive in zip(samples, live, strict=True)]
        self._gids += gids

    def apply(self, step: int, *, tokens: int, responses: int) -> StepStats:
        """See `Way.apply`. When advantages cannot be computed on some rank, no update is applied: `skipped`."""
        del tokens, responses  # each update has its own
        coefficient = self._models.kl_coefficient
        gids, samples = sorted(self._gids), self._samples
        self.discard()
        estimated = self._estimate(samples, coefficient)
        if estimated is None:
            return StepStats.of([], kl_coefficient=coefficient, failed=True)
        limits = self._limits(estimated, step)
        counts = self._counts(gids, estimated)
        actor: list[UpdateStats] = []
        critic: list[CriticStats] = []
        for chosen in self._mini_batches(gids, step):
            batch = [sample for sample in estimated if sample.gid in chosen]
            tokens, responses = counts[[gid in chosen for gid in gids]].sum(axis=0).tolist()
            if step >= self._recipe.critic_warmup:
                self._models.actor.accumulate(batch, step=step, kl_coefficient=coefficient, limits=limits)
                size = self._recipe.normaliser(tokens=int(tokens), responses=int(responses))
                actor.append(self._models.actor.apply_update(size))
            if self._models.critic is not None:
                self._models.critic.accumulate(batch)
                critic.append(self._models.critic.apply_update(max(1, int(tokens))))
        return StepStats.of(actor, kl_coefficient=coefficient, critic=critic)

    def discard(self) -> None:
        """See `Way.discard`."""
        self._gids, self._samples = [], []
        self._models.actor.discard()
        if self._models.critic is not None:
            self._models.critic.discard()

    # ---- before the updates

    def _compute(self, batch: list[TrainSample]) -> list[TrainSample]:
        """What `Recipe.computes` names, without gradient. Collective."""
        wanted = self._recipe.computes
        if wanted & {"proximal", "entropy"}:
            found = self._models.actor.compute_log_prob(batch, calculate_entropy="entropy" in wanted)
            spread: Sequence[Float32Array | None] = found.entropy or [None] * len(batch)
            batch = [
                replace(sample, proximal=logprobs if "proximal" in wanted else None, entropy=entropy)
                for sample, logprobs, entropy in zip(batch, found.logprobs, spread, strict=True)
            ]
        if "values" in wanted and self._models.critic is not None:
            values = self._models.critic.compute_values(batch)
            batch = [replace(sample, values=value) for sample, value in zip(batch, values, strict=True)]
        return self._models.with_reference(batch)

    def _estimate(self, samples: list[TrainSample], coefficient: float) -> list[TrainSample] | None:
        """The samples with their advantages (and returns); None on all ranks when it failed on one. Collective."""
        try:
            arrays = self._advantages(samples, coefficient)
        except ValueError as error:
            logger.error("advantages not computed", extra={"error": str(error)})  # noqa: TRY400
            arrays = None
        if self._ranks.all_min(int(arrays is not None)) != [1] or arrays is None:
            return None
        try:
            advantages = normalise(arrays, self._recipe.estimator.normalise, self._all_sum)
            done = [
                replace(
                    sample,
                    advantages=advantage.astype(np.float32),
                    returns=None if sample.values is None else (array + sample.values).astype(np.float32),
                )
                for sample, array, advantage in zip(samples, arrays, advantages, strict=True)
            ]
        except ValueError as error:
            logger.error("advantages not computed", extra={"error": str(error)})  # noqa: TRY400
            done = None
        return done if self._ranks.all_min(int(done is not None)) == [1] else None

    def _advantages(self, samples: list[TrainSample], coefficient: float) -> list[FloatArray]:
        """Advantages of each sample by its group, before they are normalised over the step."""
        if self._recipe.early:
            return [sample.advantages.astype(np.float64) for sample in samples]
        groups: dict[int, list[int]] = {}
        for index, sample in enumerate(samples):
            groups.setdefault(sample.gid, []).append(index)
        arrays: list[FloatArray] = [np.zeros(0)] * len(samples)
        for members in groups.values():
            group = [samples[index] for index in members]
            data = group_data(group, self._penalties(group, coefficient), texts=self._recipe.texts)
            for index, array in zip(members, self._recipe.estimator(data), strict=True):
                arrays[index] = array
        return arrays

    def _penalties(self, group: Sequence[TrainSample], coefficient: float) -> list[FloatArray] | None:
        if self._recipe.kl.where != "reward":
            return None
        proximal = [sample.proximal for sample in group if sample.proximal is not None]
        reference = [sample.reference for sample in group if sample.reference is not None]
        return penalties(proximal, reference, self._recipe.kl.estimator, coefficient)

    def _limits(self, samples: Sequence[TrainSample], step: int) -> tuple[float | None, ...]:
        """What gates that see the whole step need to know of it. Collective where there are such gates."""
        corrections = self._recipe.corrections
        if not corrections.whole_step:
            return (None,) * len(corrections.gates)
        proximal = _joined([sample.proximal for sample in samples])
        behaviour = _joined([sample.logprobs for sample in samples])
        steps = np.concatenate([np.zeros(0, dtype=np.int64), *(sample.steps for sample in samples)])
        ages = np.maximum(0, step - steps)
        old = proximal
        if corrections.base == "prox_approx":
            tensors = (torch.from_numpy(array) for array in (proximal, behaviour, ages))
            old = old_logprobs("prox_approx", *tensors).numpy()
        return corrections.step_limits(
            old - behaviour, _joined([sample.advantages for sample in samples]), ages, self._all_sum
        )

    # ---- the updates

    def _counts(self, gids: Sequence[int], samples: Sequence[TrainSample]) -> FloatArray:
        """Sampled tokens and responses of each group, whichever rank has it, shape (groups, 2). Collective."""
        places = {gid: place for place, gid in enumerate(gids)}
        counts = np.zeros((len(gids), 2))
        for sample in samples:
            counts[places[sample.gid]] += sizes([sample])
        return self._all_sum(counts)

    def _mini_batches(self, gids: Sequence[int], step: int) -> Iterator[set[int]]:
        """Groups of each update of the step."""
        for number in range(self._recipe.passes):
            order = np.random.default_rng([self._recipe.seed, step, number]).permutation(np.asarray(gids))
            for part in np.array_split(order, self._recipe.mini_batches):
                if part.size:
                    yield set(part.tolist())

    def _all_sum(self, values: FloatArray) -> FloatArray:
        total = self._ranks.all_sum(torch.from_numpy(np.ascontiguousarray(values)).to(self._ranks.device))
        return np.asarray(total.cpu().numpy())


def _joined(arrays: Sequence[Float32Array | None]) -> Float32Array:
    return np.concatenate([np.zeros(0, dtype=np.float32), *(array for array in arrays if array is not None)])
