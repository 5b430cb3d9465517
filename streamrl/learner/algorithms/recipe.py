"""The algorithm of a run: the configuration's names resolved to functions, and what follows from their combination.

The losses of tokens become one number by a weight per token and one divisor per update, both known on the host before
anything is computed. The gradient of an update is `sum over tokens of weight x loss / normaliser`, where the sum runs
over all ranks, micro-batches and rows, so it does not matter how the responses were cut up, padded or packed, or on
which rank they lie.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

import numpy as np
import numpy.typing as npt
import torch

from streamrl.config import RunConfig
from streamrl.config.learner import CriticConfig, KlConfig, LearnerConfig
from streamrl.errors import ConfigError
from streamrl.learner.algorithms.advantages import KNOWN_EARLY, Estimator, TokenTexts
from streamrl.learner.algorithms.corrections import Corrections, Level, correct
from streamrl.learner.algorithms.kl import kl_term
from streamrl.learner.algorithms.losses import LOSSES, LossResult, uses_ratio
from streamrl.learner.algorithms.tokens import Objective, Tokens, TokenSums, token_sums

Aggregate = Literal["token_mean", "sequence_mean", "prompt_mean", "constant_length"]


def token_weights(
    counts: Sequence[int] | npt.NDArray[np.int64],
    aggregate: Aggregate,
    max_new_tokens: int,
    group_means: Sequence[float] | npt.NDArray[np.float32] = (),
) -> npt.NDArray[np.float32]:
    """The weight of each token, responses of `counts` tokens one behind the other (docs/reference/losses.md).

    `group_means`: mean length of the responses to the prompt of each response, for `prompt_mean`.
    """
    lengths = np.asarray(counts, dtype=np.int64)
    if aggregate == "token_mean":
        each = np.ones(len(lengths))
    elif aggregate == "sequence_mean":
        each = 1 / np.maximum(lengths, 1)
    elif aggregate == "prompt_mean":
        each = 1 / np.asarray(group_means, dtype=np.float64)
    else:
        each = np.full(len(lengths), 1 / max_new_tokens)
    return np.repeat(each, lengths).astype(np.float32)


def normaliser(aggregate: Aggregate, *, tokens: int, responses: int) -> int:
    """What the weighted sum of an update is divided by; at least 1.

    Tokens and responses are those of all ranks, also without an advantage, and before any gate drops some: dropping
    tokens makes a step smaller, and does not increase the weight of the others.
    """
    return max(1, tokens if aggregate == "token_mean" else responses)


def lr_factor(rule: Literal["none", "ess", "staleness"], sums: TokenSums, level: Level = "token") -> float:
    """The factor of the learning rate of an update, in (0, 1]; `sums` are over all ranks.

    ess (VCPO, arXiv 2602.17616, section 4.1): the square root of the normalised effective sample size, as for AdamW the
    rate follows the square root of the number of samples. The paper's weights are those of responses; they count where
    the gate weighs at level sequence. staleness is ours: at 16 steps the whole division was slower than needed, and
    none at all too fast (docs/internals/staleness.md).
    """
    if rule == "ess":
        return math.sqrt(sums.response_ess if level == "sequence" else sums.ess)
    if rule == "staleness":
        return 1 / math.sqrt(1 + sums.mean("age"))
    return 1.0


def objective(
    tokens: Tokens,
    recipe: Recipe,
    kl_coefficient: float,
    *,
    weights: torch.Tensor | None = None,
    measure_all: bool = False,
) -> Objective:
    """`weight x (gates x loss + kl_coefficient x KL - entropy coefficient x entropy)` of each token, and `TokenSums`.

    Gates act on the policy loss alone: the KL term and the entropy bonus are about the policy where it has been, not
    about how good the token was, and go on for tokens that a gate drops. `weights` are `token_weights`; None: 1.
    """
    correction = correct(tokens, recipe.corrections)
    loss = recipe.loss(tokens)
    per_token = correction.factor * loss.per_token
    kl = None if tokens.reference is None else kl_term(tokens, recipe.kl)
    if recipe.kl.where == "loss":
        assert kl is not None
        per_token = per_token + kl_coefficient * kl
    if recipe.entropy:
        assert tokens.entropy is not None
        per_token = per_token - recipe.entropy * tokens.entropy
    if weights is not None:
        per_token = weights * per_token
    sums = token_sums(
        tokens,
        correction.log_ratio,
        loss=per_token,
        clipped=loss.clipped,
        cut=correction.cut,
        keep=correction.keep,
        kl_reference=kl,
        kl_whole=recipe.kl.where == "loss",
        measure_all=measure_all,
    )
    return Objective(per_token=per_token, sums=sums)


def reaches_zero_advantage(recipe: Recipe) -> bool:
    """Whether a token with advantage 0 has a gradient all the same, so that its response may not be left out.

    The KL term and the entropy bonus give one; so do losses with a term of their own (kimi), which a trial shows.
    """
    if recipe.kl.where == "loss" or recipe.entropy:
        return True
    tokens = Tokens.trial(0.0, 0.0, 0.0)
    (gradient,) = torch.autograd.grad(recipe.loss(tokens).per_token.sum(), tokens.logprobs)
    return bool(gradient.any())


Computed = Literal["proximal", "entropy", "reference", "values"]
ZeroVariance = Literal["keep", "drop", "resample"]
_KEEPS_ZEROS = frozenset({"none", "std", "nonzero"})  # normalisations that leave an advantage of 0 what it is


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """What a learner does with a step; the same on all ranks."""

    estimator: Estimator
    loss: Callable[[Tokens], LossResult]  # with its arguments bound
    corrections: Corrections
    kl: KlConfig
    entropy: float  # coefficient of the bonus
    aggregate: Aggregate
    max_new_tokens: int
    passes: int  # times a step goes over its groups
    mini_batches: int  # updates per pass
    zero_variance: ZeroVariance
    lr_scale: Literal["none", "ess", "staleness"]
    critic: CriticConfig | None
    mask_truncated: bool  # responses that a limit ended have no advantage
    seed: int  # mini-batches are drawn from it
    texts: TokenTexts | None  # where the estimator needs it

    @classmethod
    def of(cls, config: RunConfig) -> Recipe:
        """`ConfigError`: a name, an argument or a combination that cannot be what is meant."""
        learner = config.learner
        loss = LOSSES.resolve(learner.loss.use, learner.loss.args)
        _try_out(learner.loss.use, loss)
        corrections = Corrections.of(learner.correction)
        check_combination(learner, corrections, loss)
        estimator = Estimator.of(learner)
        _check_needs(estimator, config)
        _check_zero_variance(estimator, learner)
        _check_single(estimator, config)
        return cls(
            estimator=estimator,
            loss=loss,
            corrections=corrections,
            kl=learner.kl,
            entropy=learner.loss.entropy,
            aggregate=learner.loss.aggregate,
            max_new_tokens=config.sampling.max_new_tokens,
            passes=learner.passes,
            mini_batches=learner.mini_batches,
            zero_variance=learner.advantage.zero_variance,
            lr_scale=learner.correction.lr_scale,
            critic=learner.critic if learner.critic.kind != "none" else None,
            mask_truncated=learner.loss.truncated == "mask",
            seed=config.seed,
            texts=TokenTexts(config.model) if "text" in estimator.needs else None,
        )

    @property
    def early(self) -> bool:
        """Whether a group alone, as it comes, gives its advantages up to a normalisation that leaves zeros zero."""
        return (
            self.estimator.needs <= KNOWN_EARLY
            and self.estimator.normalise in _KEEPS_ZEROS
            and self.kl.where != "reward"
        )

    @property
    def several(self) -> bool:
        return self.passes * self.mini_batches > 1

    @cached_property
    def streams(self) -> bool:
        """Whether a micro-batch is differentiated as soon as its groups are there: nothing needs the whole step."""
        return self.early and self.estimator.normalise == "none" and not (self.several or self.critic)

    @property
    def measures_all(self) -> bool:
        """Whether log-probabilities of responses without an advantage are needed: they count in the learning rate.

        VCPO's effective sample size is that of the whole mini-batch (arXiv 2602.17616, section 4.1).
        """
        return self.lr_scale == "ess"

    @cached_property
    def skips_zero(self) -> bool:
        """Whether a response without an advantage has no gradient at all, so that leaving it out is exact."""
        return self.early and not (self.critic or self.measures_all) and not reaches_zero_advantage(self)

    @property
    def reads_all(self) -> bool:
        """Whether some rank has to read every group, also one without a gradient: its rewards or its ages count."""
        return not self.streams or self.lr_scale != "none"

    @cached_property
    def computes(self) -> frozenset[Computed]:
        """What is computed without gradient before the updates: the proximal policy where it is not the present one."""
        found: set[Computed] = set()
        apart = self.corrections.base in {"decoupled", "uncorrected"} or self.corrections.exact
        if self.kl.where == "reward" or (self.several and apart):
            found.add("proximal")
        if self.kl.where != "none":
            found.add("reference")
        if "entropy" in self.estimator.needs:
            found.add("entropy")
        if self.critic:
            found.add("values")
        return frozenset(found)

    def normaliser(self, *, tokens: int, responses: int) -> int:
        return normaliser(self.aggregate, tokens=tokens, responses=responses)

    def lr_factor(self, sums: TokenSums) -> float:
        return lr_factor(self.lr_scale, sums, self.corrections.level)


def check_combination(learner: LearnerConfig, corrections: Corrections, loss: Callable[..., LossResult]) -> None:
    """Refuse a correction and a loss that together count the importance ratio twice, or forget it.

    `ConfigError` says what is counted twice or not at all, and what to write instead.
    """
    base, name = corrections.base, learner.loss.use
    weighing = [gate.config.use for gate in corrections.gates if gate.traits.weighs]
    restricting = any(gate.traits.restricts for gate in corrections.gates)
    any_data = getattr(getattr(loss, "func", loss), "any_data", False)
    where = f"learner.correction.base {base} with learner.loss.use {name}"
    if len(weighing) > 1:
        raise ConfigError(
            f"learner.correction.gates: {' and '.join(weighing)} both weigh by the same ratio, which would be squared",
            "keep one of them; mask, veto, opsm and m2po drop tokens without a weight",
        )
    if base == "bypass" and weighing and uses_ratio(loss):
        raise ConfigError(
            f"{where}: the loss contains policy / behaviour already, gate {weighing[0]} would count it twice",
            "take gates that only drop tokens (mask in place of icepop), or base: decoupled",
        )
    if base == "bypass" and not (weighing or restricting or any_data or uses_ratio(loss)):
        raise ConfigError(
            f"{where}: neither the loss nor a gate contains policy / behaviour, so stale tokens count as fresh ones",
            "add tis to learner.correction.gates, or say so with base: uncorrected",
        )
    if base in {"decoupled", "prox_approx"} and not (weighing or restricting):
        raise ConfigError(
            f"{where}: no gate corrects for old / behaviour, outliers apart",
            "add tis, icepop, mask or m2po to learner.correction.gates, or say so with base: uncorrected",
        )
    if learner.kl.where == "reward" and (learner.kl.unbiased or learner.kl.estimator.endswith("+")):
        raise ConfigError(
            "learner.kl: unbiased and estimators with + are about the gradient of a KL term in the loss; in the reward"
            " it has none",
            "take k1, k2, k3 or abs, or learner.kl.where: loss",
        )


def _check_needs(estimator: Estimator, config: RunConfig) -> None:
    """Refuse an estimator of a user that needs what the run does not have; the configuration checks ours."""
    if "values" in estimator.needs and config.learner.critic.kind == "none":
        raise ConfigError(f"learner.advantage.use {estimator.name} needs values", "set learner.critic.kind")
    if "baseline" in estimator.needs and not config.sampling.greedy_baseline:
        raise ConfigError(
            f"learner.advantage.use {estimator.name} needs the reward of a greedy response",
            "set sampling.greedy_baseline",
        )
    if "parts" in estimator.needs and config.learner.kl.where == "reward":
        raise ConfigError(
            f"learner.advantage.use {estimator.name} reads the rewards one by one, and learner.kl.where reward changes"
            " their sum",
            "set learner.kl.where: loss",
        )
    if estimator.name == "gdpo":
        names = {reward.name or reward.use for reward in config.rewards} | {"overlong"}
        weights = config.learner.advantage.args["weights"]
        if odd := [name for name in weights if name.partition("/")[0] not in names]:
            raise ConfigError(
                f"learner.advantage.args.weights: there is no reward {odd[0]}",
                f"rewards are {', '.join(sorted(names))}",
            )


def _check_single(estimator: Estimator, config: RunConfig) -> None:
    """Refuse single responses where the others of a group are their baseline: nothing would ever be learnt."""
    single = config.sampling.group_size == 1 and ":" not in estimator.name
    if single and not estimator.learns_from_equal_rewards():
        raise ConfigError(
            f"learner.advantage.use {estimator.name} compares the responses of a group, and sampling.group_size is 1:"
            " every advantage would be 0",
            "take batch_mean, gae or reinforce_plus_plus, or raise sampling.group_size",
        )


def _check_zero_variance(estimator: Estimator, learner: LearnerConfig) -> None:
    """Refuse to leave groups with equal rewards out where they have a gradient."""
    what = learner.advantage.zero_variance
    if what == "keep":
        return
    where = f"learner.advantage.zero_variance {what}"
    if "parts" in estimator.needs:
        raise ConfigError(
            f"{where} with learner.advantage.use {estimator.name}: groups with equal sums may differ in their rewards",
            "set learner.advantage.zero_variance: keep",
        )
    if learner.kl.where == "reward":
        raise ConfigError(
            f"{where} with learner.kl.where reward: groups with equal rewards are not equal after the KL",
            "set learner.advantage.zero_variance: keep, or learner.kl.where: loss",
        )
    try:
        learns = estimator.learns_from_equal_rewards()
    except ValueError as error:
        raise ConfigError(
            f"{where} with learner.advantage.use {estimator.name}: {error}", "check the estimator"
        ) from error
    if learns:
        raise ConfigError(
            f"{where} with learner.advantage.use {estimator.name}: groups with equal rewards have advantages too,"
            " and leaving them out would change what is learnt",
            "set learner.advantage.zero_variance: keep",
        )


def _try_out(name: str, loss: Callable[..., LossResult]) -> None:
    """Run a loss on three tokens, so that a wrong argument shows when the run starts."""
    tokens = Tokens.trial(1.0, 1.0, -1.0)
    try:
        result = loss(tokens)
        shapes = [result.per_token.shape, result.clipped.shape]
    except (TypeError, ValueError, AttributeError, RuntimeError) as error:
        raise ConfigError(f"learner.loss.use {name} fails: {error}", "check learner.loss.args") from error
    if shapes != [tokens.logprobs.shape] * 2 or not result.per_token.requires_grad:
        raise ConfigError(
            f"learner.loss.use {name} does not return one number per token with a gradient",
            "return LossResult(per_token, clipped), both of shape (n,)",
        )
