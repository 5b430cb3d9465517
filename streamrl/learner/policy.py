"""The actor: the causal language model that is trained, with streaming accumulation of gradients."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch.distributed.tensor import DTensor
from typing_extensions import override

from streamrl.config import RunConfig
from streamrl.images.vision import vision_of
from streamrl.learner.algorithms.corrections import behaviour_logprobs, old_logprobs
from streamrl.learner.algorithms.recipe import Recipe, objective, token_weights
from streamrl.learner.algorithms.tokens import Tokens, TokenSums, skipped_sums
from streamrl.learner.batch import Microbatch, TrainSample, sizes
from streamrl.learner.model import LogProbModel
from streamrl.learner.model_loading import SMALL, freeze_images, load_rows, prepare
from streamrl.learner.optimizer import UpdateStats
from streamrl.learner.ranks import Ranks
from streamrl.learner.sharding import TrainableModel
from streamrl.learner.weight_copy import Rows
from streamrl.weight_sync.manifest import Adapter
from streamrl.wire import Float32Array

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True, slots=True)
class LogProbs:
    logprobs: list[Float32Array]  # of the sampled tokens, one array per sample in the order of the batch
    entropy: list[Float32Array] | None  # in nats, of the distribution each token was drawn from; None: not asked for


class Actor(TrainableModel[TokenSums]):
    """A causal language model in training; with `lora` its adapter alone is trained, else all weights are."""

    def __init__(self, config: RunConfig, ranks: Ranks, *, small: int = SMALL) -> None:
        self.config = config
        learner = config.learner
        self.recipe = Recipe.of(config)
        if self.recipe.texts is not None:
            self.recipe.texts.load()
        if learner.threads is not None:
            torch.set_num_threads(learner.threads)
        base, rows = load_rows(config.model, ranks)
        vision = vision_of(config.model)
        freeze_images(base, vision, learner)
        self.lora = None
        if learner.lora.rank:
            from streamrl.learner.lora import Lora

            self.lora = Lora(base, config, rows, vision)
        model = LogProbModel(base, temperature=config.sampling.temperature, chunk=learner.logprob_chunk, vision=vision)
        if learner.matmul_precision == "medium" and ranks.device.type == "cpu" and config.model.attention == "sdpa":
            logger.warning("matmul precision medium slows attention sdpa down on CPUs: set model.attention to eager")
        torch.set_float32_matmul_precision(learner.matmul_precision)
        limits, whole = prepare(model, rows, config, learner, ranks, small=small)
        super().__init__(model, learner, ranks, limits, kind=TokenSums, whole=whole)

    def compute_log_prob(self, batch: Sequence[TrainSample], calculate_entropy: bool = False) -> LogProbs:
        """Log-probabilities under the present weights of this rank's samples. Collective, no gradient."""
        logprobs, entropy = self._compute(batch, 2, entropy=calculate_entropy)
        return LogProbs(logprobs=logprobs, entropy=entropy if calculate_entropy else None)

    def accumulate(self, batch: Sequence[TrainSample], *, step: int = 0, kl_coefficient: float = 0.0) -> None:
        """Add the gradient of the objective of this rank's samples, summed over tokens. Collective.

        Samples without an advantage are skipped where that is exact; they count in the size of the update all the same.
        """
        skips = self.recipe.skips_zero
        live = [sample for sample in batch if sample.has_advantage] if skips else batch
        idle = [sample for sample in batch if not sample.has_advantage] if skips else []
        parts = self._agree(live)
        self._backward(parts, lambda part: self._loss(part, step, kl_coefficient))
        if idle:
            ages = np.concatenate([np.maximum(0, step - sample.steps) for sample in idle])
            self._sums += skipped_sums(ages.size, int(ages.sum())).to(self._sums.device, non_blocking=True)

    def update_policy(
        self, batch: Sequence[TrainSample], *, step: int = 0, kl_coefficient: float = 0.0
    ) -> UpdateStats[TokenSums]:
        """One update with the samples of all ranks. Collective."""
        self.accumulate(batch, step=step, kl_coefficient=kl_coefficient)
        tokens, responses = self._total(*sizes(batch))
        return self.apply_update(self.recipe.normaliser(tokens=tokens, responses=responses))

    @property
    def published(self) -> dict[str, DTensor]:
        """Parameters that versions of the weights hold, by name: all of them, or the base that an adapter changes."""
        if self.lora is not None and not self._merges:
            return self.parameters
        return dict(self._frozen) if self._merges else {**self._frozen, **self.parameters}

    @property
    def adapter(self) -> Adapter | None:
        """Description of the adapter, in versions that hold an adapter alone; None when versions hold all weights."""
        return None if self.lora is None or self._merges else self.lora.about

    def published_rows(self) -> Rows | None:
        """What makes rows of a version of this rank's rows, until the next update; None: the same. Collective."""
        return self.lora.merged_rows(self._parameters) if self.lora is not None and self._merges else None

    def compute_ref_log_prob(self, batch: Sequence[TrainSample]) -> list[Float32Array]:
        """The policy without its adapter (`learner.reference.kind: base`): no copy of any weight."""
        assert self.lora is not None, "no adapter is trained"
        with self.lora.disabled():
            return self.compute_log_prob(batch).logprobs

    @property
    def _merges(self) -> bool:
        return self.lora is not None and not self.config.learner.lora.alone

    @override
    def _lr_factor(self, trained: TokenSums) -> float:
        return self.recipe.lr_factor(trained)

    @override
    def _name_of(self, name: str) -> str:
        return name if self.lora is None else self.lora.name_of(name)

    def _loss(self, part: Microbatch, step: int, kl_coefficient: float) -> torch.Tensor:
        bonus = bool(self.recipe.entropy)
        asked = bonus or self.recipe.corrections.reads_entropy
        logprobs, entropy = self._forward(part, entropy=asked, entropy_gradient=bonus)
        if not len(part.samples):
            total: torch.Tensor = logprobs.sum() * 0
            return total
        recipe, weights = self.recipe, None
        if recipe.aggregate != "token_mean":
            weights = self._to_device(
                token_weights(part.counts, recipe.aggregate, recipe.max_new_tokens, part.group_means)
            )
        tokens = self._tokens(part, logprobs, entropy, step)
        found = objective(tokens, recipe, kl_coefficient, weights=weights, measure_all=recipe.measures_all)
        self._sums += found.sums
        return found.per_token.sum()

    def _tokens(self, part: Microbatch, logprobs: torch.Tensor, entropy: torch.Tensor | None, step: int) -> Tokens:
        corrections = self.recipe.corrections
        proximal = logprobs.detach() if part.proximal is None else self._to_device(part.proximal)
        ages = self._to_device(np.maximum(0, step - part.steps))
        behaviour = behaviour_logprobs(corrections.exact, proximal, self._to_device(part.behaviour), ages)
        return Tokens(
            logprobs=logprobs,
            old=old_logprobs(corrections.base, proximal, behaviour, ages),
            proximal=proximal,
            behaviour=behaviour,
            advantages=self._to_device(part.advantages),
            sequence=self._to_device(np.repeat(np.arange(len(part.counts)), part.counts)),
            counts=self._to_device(part.counts),
            ages=ages,
            reference=None if part.reference is None else self._to_device(part.reference),
            entropy=entropy,
        )
