"""The algorithm of a run: the configuration's names resolved to functions, and what follows from their combination.

```
recipe = Recipe.of(config)      fails when the run starts, when something does not fit
recipe.streams                  whether a micro-batch can be differentiated before the step is complete
recipe.computes                 what is computed without gradient before the updates of a step
```
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

from streamrl.config import RunConfig
from streamrl.config.learner import KlConfig, LearnerConfig
from streamrl.errors import ConfigError
from streamrl.learner.algorithms.advantages import KNOWN_EARLY, Estimator
from streamrl.learner.algorithms.aggregation import Aggregate, normaliser
from streamrl.learner.algorithms.corrections import Corrections, check_combination
from streamrl.learner.algorithms.losses import LOSSES, LossResult
from streamrl.learner.algorithms.lr_scale import lr_factor
from streamrl.learner.algorithms.objective import reaches_zero_advantage
from streamrl.learner.algorithms.sums import TokenSums
from streamrl.learner.algorithms.token_texts import TokenTexts
from streamrl.learner.algorithms.tokens import Tokens

Computed = Literal["proximal", "entropy", "reference", "values"]
ZeroVariance = Literal["keep", "drop", "resample"]
_KEEPS_ZEROS = frozenset({"none", "std", "nonzero"})
"""Normalisations over a step that leave an advantage of 0 what it is."""


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """What a learner does with a step; the same on all ranks.

    Attributes:
        estimator: of advantages.
        loss: the policy loss with its arguments bound.
        corrections: base and gates.
        kl: the section `learner.kl`.
        entropy: coefficient of the entropy bonus.
        aggregate: how tokens become one number.
        max_new_tokens: most sampled tokens of a response.
        passes: times a step goes over its groups.
        mini_batches: updates per pass.
        zero_variance: what becomes of a group with equal rewards.
        lr_scale: rule of the factor on the learning rate.
        critic: whether there is a value function.
        critic_warmup: first steps in which only the critic learns.
        seed: of the run; mini-batches are drawn from it.
        texts: text of tokens, where the estimator needs it; else None.
    """

    estimator: Estimator
    loss: Callable[[Tokens], LossResult]
    corrections: Corrections
    kl: KlConfig
    entropy: float
    aggregate: Aggregate
    max_new_tokens: int
    passes: int
    mini_batches: int
    zero_variance: ZeroVariance
    lr_scale: Literal["none", "ess", "staleness"]
    critic: bool
    critic_warmup: int
    seed: int
    texts: TokenTexts | None

    @classmethod
    def of(cls, config: RunConfig) -> Recipe:
        """Resolve a configuration.

        Raises:
            ConfigError: a name, an argument or a combination that cannot be what is meant.
        """
        learner = config.learner
        loss = LOSSES.resolve(learner.loss.use, learner.loss.args)
        _try_out(learner.loss.use, loss)
        corrections = Corrections.of(learner.correction)
        check_combination(learner, corrections, loss)
        estimator = Estimator.of(learner)
        _check_needs(estimator, config)
        _check_zero_variance(estimator, learner)
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
            critic=learner.critic.kind != "none",
            critic_warmup=learner.critic.warmup_steps,
            seed=config.seed,
            texts=TokenTexts(config.model) if "text" in estimator.needs else None,
        )

    @property
    def updates(self) -> int:
        """Updates of a step."""
        return self.passes * self.mini_batches

    @property
    def early(self) -> bool:
        """Whether a group alone, as it comes, gives its advantages up to a normalisation that leaves zeros zero."""
        return (
            self.estimator.needs <= KNOWN_EARLY
            and self.estimator.normalise in _KEEPS_ZEROS
            and self.kl.where != "reward"
        )

    @cached_property
    def streams(self) -> bool:
        """Whether a micro-batch is differentiated as soon as its groups are there: nothing needs the whole step."""
        whole = self.updates > 1 or self.corrections.whole_step or self.critic
        return self.early and self.estimator.normalise == "none" and not whole

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
        base, several = self.corrections.base, self.updates > 1
        if (several and base in {"decoupled", "uncorrected"}) or self.corrections.whole_step:
            found.add("proximal")
        if self.kl.where == "reward":
            found.add("proximal")
        if self.kl.where != "none":
            found.add("reference")
        if "entropy" in self.estimator.needs:
            found.add("entropy")
        if self.critic:
            found.add("values")
        return frozenset(found)

    def normaliser(self, *, tokens: int, responses: int) -> int:
        """What the gradient of an update is divided by; see `aggregation.normaliser`."""
        return normaliser(self.aggregate, tokens=tokens, responses=responses)

    def lr_factor(self, sums: TokenSums) -> float:
        """Factor of the learning rate of an update with these statistics of all ranks, in (0, 1]."""
        return lr_factor(self.lr_scale, sums, self.corrections.level)


def _check_needs(estimator: Estimator, config: RunConfig) -> None:
    """Refuse an estimator (of a user) that needs what the run does not have; ours are checked with the configuration.

    Raises:
        ConfigError: it needs values without a critic, or a baseline without a greedy response.
    """
    if "values" in estimator.needs and config.learner.critic.kind == "none":
        raise ConfigError(f"learner.advantage.use {estimator.name} needs values", "set learner.critic.kind")
    if "baseline" in estimator.needs and not config.sampling.greedy_baseline:
        raise ConfigError(
            f"learner.advantage.use {estimator.name} needs the reward of a greedy response",
            "set sampling.greedy_baseline",
        )


def _check_zero_variance(estimator: Estimator, learner: LearnerConfig) -> None:
    """Refuse to leave groups with equal rewards out where they have a gradient.

    Raises:
        ConfigError: the estimator gives such a group advantages, or the KL in the reward does.
    """
    what = learner.advantage.zero_variance
    if what == "keep":
        return
    where = f"learner.advantage.zero_variance {what}"
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
    """Run a loss on three tokens, so that a wrong argument shows when the run starts.

    Raises:
        ConfigError: it fails, or does not return one number per token.
    """
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
