"""What the old policy is, and what stands between the policy that sampled and the gradient.

Three policies appear (Hilton et al., arXiv 2110.00641; AReaL, arXiv 2505.24298, equation 5):

* behaviour, which sampled the token: perhaps some versions ago, perhaps with other kernels,
* old, the centre of the trust region, as `learner.correction.base` says,
* the policy being trained (theta).

The loss works with `u = theta / old`, the gates of this module with `rho = old / behaviour`, and `rho u` is the whole
importance ratio. With base bypass old is behaviour, u is the whole ratio, and rho would count it a second time; there
gates look at theta / behaviour, and may drop tokens but not weigh them. `check_combination` refuses what would count a
ratio twice or not at all.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import numpy.typing as npt
import torch

from streamrl.config.learner import CorrectionConfig, GateConfig, LearnerConfig
from streamrl.errors import ConfigError
from streamrl.learner.algorithms.gates import GATES, GateFunction, Level, StepTokens, Traits, traits_of
from streamrl.learner.algorithms.loss import LossResult, uses_ratio
from streamrl.learner.algorithms.second_moment import AllSum
from streamrl.learner.algorithms.tokens import Tokens

_ABSURD = 2.0**20
"""Bound on the log ratio of a token: far beyond any real one, and squares and sums over responses stay finite."""
_TIS, _VETO = GateConfig(use="tis"), GateConfig(use="veto")
_DEFAULT_GATES = {"decoupled": (_TIS, _VETO), "prox_approx": (_TIS, _VETO), "bypass": (_VETO,), "uncorrected": ()}
"""Gates of a base where the configuration names none."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Correction:
    """What all gates together say of n tokens; nothing in it carries a gradient.

    Attributes:
        factor: what the policy loss of each token is multiplied by: product of the weights, 0 where a token is dropped;
            shape (n,).
        keep: False for dropped tokens, shape (n,), bool.
        cut: tokens whose weight a bound cut, shape (n,), bool.
        log_ratio: log of the importance weight w that the statistics describe, before any gate: the policy at
            the start of the step over behaviour, or with base bypass the present policy over behaviour; shape (n,).
    """

    factor: torch.Tensor
    keep: torch.Tensor
    cut: torch.Tensor
    log_ratio: torch.Tensor


@dataclass(frozen=True, kw_only=True, slots=True)
class Gate:
    """A gate of the run: `config` with every default filled in, and its function with its arguments bound."""

    config: GateConfig
    function: GateFunction
    traits: Traits

    @classmethod
    def of(cls, config: GateConfig) -> Gate:
        """Resolve a gate.

        Raises:
            ConfigError: no such gate, argument or level, a bound it does not read, or bounds that exclude each other.
        """
        function = GATES.resolve(config.use, config.args)
        assert isinstance(function, partial)
        traits = traits_of(function.func)
        level: Level = next(iter(traits.ranges)) if config.level is None else config.level
        where = f"learner.correction.gates: {config.use}"
        if level not in traits.ranges:
            raise ConfigError(f"{where} has no level {level}", f"it knows {', '.join(traits.ranges)}")
        for bound in ("low", "high"):
            if getattr(config, bound) is not None and bound not in traits.bounds:
                raise ConfigError(f"{where} has no {bound} bound", f"remove {bound}")
        low, high = traits.ranges[level]
        low = low if config.low is None else config.low
        high = high if config.high is None else config.high
        if low > high:
            raise ConfigError(f"{where}: low {low:g} is above high {high:g}", "no ratio would pass")
        if config.tighten and (low > 1 or high < 1):
            raise ConfigError(f"{where}: tighten narrows bounds around 1, but 1 is outside of them", "remove tighten")
        filled = config.model_copy(update={"level": level, "low": low, "high": high})
        gate = cls(config=filled, function=function, traits=traits)
        gate.try_out()
        return gate

    @property
    def whole_step(self) -> bool:
        """It must see all tokens of a step at once."""
        return self.traits.step is not None and self.config.args.get("over", "step") == "step"

    def __call__(self, log_ratio: torch.Tensor, tokens: Tokens, limit: float | None) -> tuple[torch.Tensor, ...]:
        """Return weight, keep and cut, all of shape (n,)."""
        extra = () if self.traits.step is None else (limit,)
        result = self.function(log_ratio, tokens, self.config, *extra)
        if result.weight is not None and not self.traits.weighs:
            raise ConfigError(
                f"learner.correction.gates: {self.config.use} gives weights without saying so",
                "decorate it with streamrl.learner.algorithms.gates.traits(ranges=..., weighs=True)",
            )
        none = torch.zeros_like(log_ratio, dtype=torch.bool)
        weight = torch.ones_like(log_ratio) if result.weight is None else result.weight.detach()
        return weight, ~none if result.keep is None else result.keep, none if result.cut is None else result.cut

    def try_out(self) -> None:
        """Run the gate on three tokens, so that a wrong argument shows when the run starts.

        Raises:
            ConfigError: it fails, or returns something else than one number per token.
        """
        zeros, ones = torch.zeros(3), torch.ones(3)
        tokens = Tokens(
            logprobs=zeros,
            old=zeros,
            proximal=zeros,
            behaviour=zeros,
            advantages=ones,
            sequence=torch.tensor([0, 0, 1]),
            counts=torch.tensor([2, 1]),
            ages=torch.zeros(3, dtype=torch.int64),
        )
        try:
            shapes = [part.shape for part in self(zeros, tokens, None)]
        except (TypeError, ValueError, AttributeError, RuntimeError) as error:
            raise ConfigError(
                f"learner.correction.gates: {self.config.use} fails: {error}", "check its args"
            ) from error
        if shapes != [zeros.shape] * 3:
            raise ConfigError(
                f"learner.correction.gates: {self.config.use} does not return one value per token",
                "return a GateResult of tensors of shape (n,)",
            )


@dataclass(frozen=True, kw_only=True, slots=True)
class Corrections:
    """The correction of a run: `learner.correction`, resolved.

    Attributes:
        base: what the old policy is.
        gates: in the order of the configuration; empty with base uncorrected.
    """

    base: str
    gates: tuple[Gate, ...]

    @classmethod
    def of(cls, config: CorrectionConfig) -> Corrections:
        """Resolve the gates; without any in the configuration those of the base.

        Raises:
            ConfigError: a gate cannot be resolved.
        """
        gates = _DEFAULT_GATES[config.base] if config.gates is None else config.gates
        return cls(base=config.base, gates=tuple(Gate.of(gate) for gate in gates))

    @property
    def whole_step(self) -> bool:
        """Some gate must see all tokens of a step before the first one is differentiated."""
        return any(gate.whole_step for gate in self.gates)

    @property
    def level(self) -> Level:
        """Level of the gate that weighs; token when none does."""
        weighing = [gate.config.level for gate in self.gates if gate.traits.weighs]
        return (weighing[0] if weighing else None) or "token"

    def step_limits(
        self,
        log_ratio: npt.NDArray[np.float32],
        advantages: npt.NDArray[np.float32],
        ages: npt.NDArray[np.int64],
        all_sum: AllSum,
    ) -> tuple[float | None, ...]:
        """Return what each gate that sees the whole step needs to know of it; None for the others.

        Collective when `whole_step`; otherwise nothing happens.

        Args:
            log_ratio: `old - behaviour` of this rank's tokens of the step (with base bypass `proximal - behaviour`),
                shape (n,).
            advantages: of the same tokens.
            ages: of the same tokens.
            all_sum: sums over ranks.
        """
        step = StepTokens(
            log_ratio=torch.from_numpy(log_ratio),
            advantages=torch.from_numpy(advantages),
            ages=torch.from_numpy(ages),
        )
        limits = ((gate, gate.traits.step if gate.whole_step else None) for gate in self.gates)
        return tuple(None if limit is None else float(limit(step, gate.config, all_sum)) for gate, limit in limits)


def old_logprobs(base: str, proximal: torch.Tensor, behaviour: torch.Tensor, ages: torch.Tensor) -> torch.Tensor:
    """Return the log-probabilities of the old policy, shape (n,).

    decoupled, uncorrected: the policy at the start of the step. bypass: the one that sampled. prox_approx (A-3PO,
    arXiv 2512.06547): `behaviour + a (proximal - behaviour)` with a = age / (age + 1), which needs no forward pass of
    its own: the present policy stands in for `proximal`.

    Args:
        base: `learner.correction.base`.
        proximal: policy at the start of the step, shape (n,).
        behaviour: as the engine sampled it.
        ages: staleness of each token in steps.
    """
    proximal = proximal.detach()
    if base == "bypass":
        return behaviour
    if base == "prox_approx":
        share = ages.to(behaviour.dtype) / (ages + 1)
        return behaviour + share * (proximal - behaviour)
    return proximal


def correct(tokens: Tokens, corrections: Corrections, limits: Sequence[float | None] | None = None) -> Correction:
    """Apply all gates to a micro-batch: weights multiply, and a token is kept when every gate keeps it.

    Args:
        tokens: whole responses.
        corrections: of the run.
        limits: from `Corrections.step_limits`; None: the tokens of the micro-batch decide.

    Raises:
        ConfigError: a gate of a user gives a weight without having said so.
    """
    present = tokens.logprobs.detach()
    bypass = corrections.base == "bypass"
    gated = ((present if bypass else tokens.old) - tokens.behaviour).clamp(-_ABSURD, _ABSURD)
    factor = torch.ones_like(gated)
    keep = torch.ones_like(gated, dtype=torch.bool)
    cut = ~keep
    for gate, limit in zip(corrections.gates, limits or [None] * len(corrections.gates), strict=True):
        weight, kept, bounded = gate(gated, tokens, limit)
        factor, keep, cut = factor * weight, keep & kept, cut | bounded
    moved = gated if bypass else (tokens.proximal - tokens.behaviour).clamp(-_ABSURD, _ABSURD)
    return Correction(factor=factor * keep, keep=keep, cut=cut, log_ratio=moved)


def check_combination(learner: LearnerConfig, corrections: Corrections, loss: Callable[..., LossResult]) -> None:
    """Refuse a correction and a loss that together count the importance ratio twice, or forget it.

    Args:
        learner: the section of the configuration.
        corrections: its correction, resolved.
        loss: its policy loss, resolved. Besides `uses_ratio` a loss of a user may have the flag `any_data`: it needs no
            ratio, because something else in it keeps the policy near the one that sampled, as in `kimi`.

    Raises:
        ConfigError: what is counted twice or not at all, and what to write instead.
    """
    base, name = corrections.base, learner.loss.use
    weighing = [gate.config.use for gate in corrections.gates if gate.traits.weighs]
    restricting = any(gate.traits.restricts for gate in corrections.gates)
    any_data = getattr(getattr(loss, "func", loss), "any_data", name == "kimi")
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
