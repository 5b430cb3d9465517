"""Gates: what stands between an importance ratio and the gradient.

A gate looks at `log rho`, the log ratio of the old policy to the one that sampled (`rho = old / behaviour`; with base
bypass `rho = policy / behaviour`), and gives each token a weight, or drops tokens, or both. `rho > 1` means that the
policy likes the token more than it did when the token was sampled. Nothing here carries a gradient: the ratios come in
detached. Everything is compared in log space, and exponents are clamped to `LOG_RATIO_BOUND`, so finite
log-probabilities give finite weights.

Sources, by gate: tis: Yao et al., "Your efficient RL framework secretly brings you off-policy RL training" (2025);
icepop: Ring-1T (arXiv 2510.18855, section 3.3); mask with level sequence: Liu and Li, "When speed kills stability"
(2025); veto: slime and SkyRL; opsm: DeepSeek-V3.2 (arXiv 2512.02556, section 3.1, off-policy sequence masking); m2po:
Zheng et al. (arXiv 2510.01161, algorithm 1).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

import torch

from streamrl.config.learner import GateConfig
from streamrl.errors import ConfigError
from streamrl.learner.algorithms.registry import Registry
from streamrl.learner.algorithms.second_moment import AllSum, smallest_masked, step_limit
from streamrl.learner.algorithms.tokens import LOG_RATIO_BOUND, Tokens

Level = Literal["token", "sequence", "geometric"]
Range = tuple[float, float]


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class GateResult:
    """What a gate says of n tokens; None leaves all tokens as they are.

    Attributes:
        weight: factor of the policy loss, at least 0, shape (n,). Only a gate with the trait `weighs` may give one.
        keep: False for tokens without a policy gradient, shape (n,), bool.
        cut: True where the weight is not the ratio because a bound cut it, shape (n,), bool; for statistics.
    """

    weight: torch.Tensor | None = None
    keep: torch.Tensor | None = None
    cut: torch.Tensor | None = None


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class StepTokens:
    """What a gate sees of a step before its first update, on this rank; possibly no tokens.

    Attributes:
        log_ratio: as the gate gets it, shape (n,).
        advantages: of the same tokens.
        ages: staleness of the same tokens in steps.
    """

    log_ratio: torch.Tensor
    advantages: torch.Tensor
    ages: torch.Tensor


StepLimit = Callable[[StepTokens, GateConfig, AllSum], float]
"""`(tokens of this rank, gate, all_sum) -> number`, the same on all ranks: each calls all_sum equally often."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Traits:
    """What the check of combinations must know of a gate.

    Attributes:
        ranges: default (low, high) of the ratio for each level the gate knows, the default level first.
        bounds: which of the two the gate reads.
        weighs: its weight contains the ratio, so no other gate and no loss may contain it as well.
        restricts: kept tokens have ratios near 1, so that leaving the ratio out is an approximation somebody chose;
            gates that only drop outliers do not.
        step: it looks at all tokens of a step at once, unless its argument `over` is `microbatch`: the number that it
            finds in them, which the gate gets as its fourth argument (None in the trial at the start and without a
            step). None: it looks at a micro-batch, and has no fourth argument.
    """

    ranges: Mapping[Level, Range]
    bounds: frozenset[str] = frozenset({"low", "high"})
    weighs: bool = False
    restricts: bool = False
    step: StepLimit | None = None


GateFunction = Callable[..., GateResult]
"""`(log_ratio (n,), tokens, gate, *, further arguments) -> GateResult`; in `gate` level, low and high are filled in."""
_G = TypeVar("_G", bound=GateFunction)
GATES: Registry[GateFunction] = Registry("learner.correction.gates.use")
ANY_RATIO: Range = (0.0, math.inf)
_PLUGIN = Traits(ranges={"token": ANY_RATIO, "sequence": ANY_RATIO, "geometric": ANY_RATIO})


def traits(**known: Any) -> Callable[[_G], _G]:
    """Decorator: say of a gate of your own what `Traits` holds; without it, it is taken for one that drops outliers."""

    def add(function: _G) -> _G:
        function.traits = Traits(**known)  # type: ignore[attr-defined]
        return function

    return add


def traits_of(function: GateFunction) -> Traits:
    """Return the traits of a gate."""
    found: Traits = getattr(function, "traits", _PLUGIN)
    return found


def at_level(log_ratio: torch.Tensor, tokens: Tokens, level: Level) -> torch.Tensor:
    """Return the log ratio of each token's response at a level, given back to each token, shape (n,).

    token: as it is. sequence: sum over the response, the log ratio of the whole response. geometric: mean over the
    response, the log of the geometric mean ratio. Sums are taken in double precision.
    """
    if level == "token":
        return log_ratio
    values = log_ratio.double()
    response = tokens.sum_per_response(values) if level == "sequence" else tokens.mean_per_response(values)
    return tokens.spread(response).to(log_ratio.dtype)


def log_bounds(tokens: Tokens, gate: GateConfig) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the log of the bounds of each token, two tensors of shape (n,), or () where all have the same.

    Both are divided by 1 + tighten x age: the older a token, the narrower its range. At the levels of a response the
    age is that of its oldest token.
    """
    assert gate.low is not None
    assert gate.high is not None
    low, high = (
        tokens.behaviour.new_full((), math.log(bound) if bound else -math.inf) for bound in (gate.low, gate.high)
    )
    if not gate.tighten:
        return low, high
    looseness = 1 + gate.tighten * _age(tokens, gate.level).to(tokens.behaviour.dtype)
    return low / looseness, high / looseness


def _age(tokens: Tokens, level: Level | None) -> torch.Tensor:
    if level == "token":
        return tokens.ages
    oldest = torch.zeros_like(tokens.counts).to(tokens.ages.dtype)
    return tokens.spread(oldest.scatter_reduce(0, tokens.sequence, tokens.ages, "amax"))


def _ratio(log_ratio: torch.Tensor) -> torch.Tensor:
    return log_ratio.clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND).exp()


@GATES.register("tis")
@traits(ranges={"token": (0.0, 2.0), "sequence": (0.0, 2.0), "geometric": (0.0, 2.0)}, weighs=True)
def truncated(log_ratio: torch.Tensor, tokens: Tokens, gate: GateConfig) -> GateResult:
    """Truncated importance sampling: `weight = clip(rho, low, high)`, low 0 and high C = 2 by default."""
    ratio = at_level(log_ratio, tokens, gate.level or "token")
    low, high = log_bounds(tokens, gate)
    weight = torch.minimum(torch.maximum(ratio, low), high).clamp(max=LOG_RATIO_BOUND).exp()
    return GateResult(weight=weight, cut=(ratio > high) | (ratio < low))


_BANDS: dict[Level, Range] = {"token": (0.5, 5.0), "sequence": (0.5, 2.0), "geometric": (0.99, 1.01)}


@GATES.register("icepop")
@traits(ranges=_BANDS, weighs=True)
def icepop(log_ratio: torch.Tensor, tokens: Tokens, gate: GateConfig) -> GateResult:
    """Masked importance sampling: `weight = rho` where low <= rho <= high, and nothing elsewhere."""
    ratio = at_level(log_ratio, tokens, gate.level or "token")
    low, high = log_bounds(tokens, gate)
    return GateResult(weight=_ratio(ratio), keep=(ratio >= low) & (ratio <= high))


@GATES.register("mask")
@traits(ranges=_BANDS, restricts=True)
def mask(log_ratio: torch.Tensor, tokens: Tokens, gate: GateConfig) -> GateResult:
    """Rejection: tokens with low <= rho <= high are kept, without a weight."""
    ratio = at_level(log_ratio, tokens, gate.level or "token")
    low, high = log_bounds(tokens, gate)
    return GateResult(keep=(ratio >= low) & (ratio <= high))


@GATES.register("veto")
@traits(ranges={"token": (1e-4, math.inf)})
def veto(log_ratio: torch.Tensor, tokens: Tokens, gate: GateConfig) -> GateResult:
    """Drop a whole response when the ratio of any of its tokens is below low, 1e-4, or above high, if given."""
    low, high = log_bounds(tokens, gate)
    outliers = ((log_ratio < low) | (log_ratio > high)).to(log_ratio.dtype)
    return GateResult(keep=tokens.spread(tokens.sum_per_response(outliers)) == 0)


@GATES.register("opsm")
@traits(
    ranges={level: (math.exp(-0.5), math.inf) for level in ("geometric", "sequence", "token")},
    bounds=frozenset({"low"}),
)
def off_policy_sequence_mask(log_ratio: torch.Tensor, tokens: Tokens, gate: GateConfig) -> GateResult:
    """Drop tokens with a negative advantage in responses the policy has moved away from: ratio below low.

    With delta = -log low this drops a response when A < 0 and the mean of `log(behaviour / old)` is above delta, 0.5.
    """
    low, _ = log_bounds(tokens, gate)
    gone = at_level(log_ratio, tokens, gate.level or "geometric") < low
    return GateResult(keep=~(gone & (tokens.advantages < 0)))


def _m2po_limit(step: StepTokens, gate: GateConfig, all_sum: AllSum) -> float:
    only = gate.args.get("only", "outward")
    movable, squares = second_moments(step.log_ratio, step.advantages, step.ages, gate.tighten, only)
    return step_limit(squares[movable].numpy(), gate.args.get("tau", 0.04), all_sum)


@GATES.register("m2po")
@traits(ranges={"token": ANY_RATIO}, bounds=frozenset(), restricts=True, step=_m2po_limit)
def m2po(
    log_ratio: torch.Tensor,
    tokens: Tokens,
    gate: GateConfig,
    limit: float | None = None,
    *,
    tau: float = 0.04,
    only: Literal["outward", "all"] = "outward",
    over: Literal["step", "microbatch"] = "step",
) -> GateResult:
    """Drop the tokens with the largest `(log rho)^2` until the mean of the others is at most tau.

    The mean is over the tokens that can be dropped: with only outward those where the update would push the ratio
    further from 1 (A > 0 and rho > 1, or A < 0 and rho < 1), the ones that the clip of PPO would stop as well.
    Tokens of equal value are dropped together, so the result does not depend on the order of tokens. `tighten` counts
    a token of age a as if its log ratio were 1 + tighten x a times as large.

    Args:
        log_ratio: shape (n,).
        tokens: the same n tokens.
        gate: low and high are not used.
        limit: smallest dropped `(log rho)^2`, as `Corrections.step_limits` found it over the step; None: these tokens
            alone decide.
        tau: at least 0.
        only: outward, or all tokens.
        over: step: all tokens of the step on all ranks decide; microbatch: those of a micro-batch, which needs no
            second look at them but depends on how the step was cut up.
    """
    if over not in {"step", "microbatch"} or only not in {"outward", "all"} or not tau >= 0:
        raise ConfigError(
            f"learner.correction.gates: m2po with over: {over}, only: {only}, tau: {tau}",
            "over is step or microbatch, only is outward or all, tau is at least 0",
        )
    movable, squares = second_moments(log_ratio, tokens.advantages, tokens.ages, gate.tighten, only)
    if over == "step" and limit is not None:
        cut = squares.new_full((), limit)
    else:
        cut = smallest_masked(squares, movable, tau)
    return GateResult(keep=~movable | (squares < cut))


def second_moments(
    log_ratio: torch.Tensor, advantages: torch.Tensor, ages: torch.Tensor, tighten: float, only: str
) -> tuple[torch.Tensor, torch.Tensor]:
    """Which tokens m2po may drop, bool, and their (tightened) squared log ratio; both of shape (n,)."""
    outward = ((advantages > 0) & (log_ratio > 0)) | ((advantages < 0) & (log_ratio < 0))
    scaled = log_ratio * (1 + tighten * ages.to(log_ratio.dtype))
    return (outward if only == "outward" else torch.ones_like(outward)), scaled * scaled
