"""What the old policy is, and what stands between the policy that sampled and the gradient: gates.

docs/reference/corrections.md names the policies and ratios (Hilton et al., arXiv 2110.00641; AReaL, arXiv 2505.24298,
equation 5). With base bypass old is behaviour, and rho would count the whole ratio a second time; there gates look at
theta / behaviour, and may drop tokens but not weigh them (`recipe.check_combination`).

A gate looks at `log rho` and gives each token a weight, or drops tokens, or both. Ratios come in detached, everything
is compared in log space, and exponents are clamped to `LOG_RATIO_BOUND`, so finite log-probabilities give finite
weights.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, TypeVar

import torch

from streamrl.config.learner import CorrectionConfig, GateConfig
from streamrl.errors import ConfigError
from streamrl.learner.algorithms.registry import Registry
from streamrl.learner.algorithms.tokens import LOG_RATIO_BOUND, Tokens


def smallest_masked(squares: torch.Tensor, movable: torch.Tensor, tau: float) -> torch.Tensor:
    """The smallest square to be dropped, so that the mean of the `movable` ones is at most tau; infinity: all may stay.

    Dropping the largest until the others fit keeps the longest ascending prefix that fits, because its mean only grows.
    """
    # Values that do not count go after all others, so shapes do not depend on data and the host need not wait.
    ordered = torch.where(movable, squares, math.inf).sort().values
    means = ordered.double().cumsum(0) / torch.arange(1, ordered.numel() + 1, device=ordered.device)
    kept = (means <= tau).sum()
    return torch.cat([ordered, ordered.new_full((1,), math.inf)]).index_select(0, kept[None])[0]


Level = Literal["token", "sequence", "geometric"]
Range = tuple[float, float]


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class GateResult:
    """What a gate says of n tokens, each of shape (n,); None leaves all tokens as they are."""

    weight: torch.Tensor | None = None  # factor of the policy loss, at least 0; only of a gate with the trait `weighs`
    keep: torch.Tensor | None = None  # bool: False for tokens without a policy gradient
    cut: torch.Tensor | None = None  # bool: a bound cut the ratio, so the weight is not it; for statistics


@dataclass(frozen=True, kw_only=True, slots=True)
class Traits:
    """What the check of combinations must know of a gate."""

    ranges: Mapping[Level, Range]  # default (low, high) of the ratio for each level it knows, the default level first
    bounds: frozenset[str] = frozenset({"low", "high"})  # which of the two it reads
    tightens: bool = True  # it reads `tighten`
    entropy: bool = False  # it reads the entropy of tokens
    weighs: bool = False  # its weight contains the ratio, so no other gate and no loss may contain it as well
    # Gates that only drop outliers do not restrict.
    restricts: bool = False  # kept tokens have ratios near 1, so the ratio may be left out, as a chosen approximation


GateFunction = Callable[..., GateResult]
"""`(log_ratio (n,), tokens, gate, *, further arguments) -> GateResult`; in `gate` level, low and high are filled in."""
_G = TypeVar("_G", bound=GateFunction)
GATES: Registry[GateFunction] = Registry("learner.correction.gates.use")
ANY_RATIO: Range = (0.0, math.inf)
_PLUGIN = Traits(ranges={"token": ANY_RATIO, "sequence": ANY_RATIO, "geometric": ANY_RATIO})


def traits(**known: Any) -> Callable[[_G], _G]:
    """Decorator: set the `Traits` of a gate of your own; a gate without them is taken for one that drops outliers."""

    def add(function: _G) -> _G:
        function.traits = Traits(**known)  # type: ignore[attr-defined]
        return function

    return add


def at_level(log_ratio: torch.Tensor, tokens: Tokens, gate: GateConfig) -> torch.Tensor:
    """The log ratio of each token at the level of the gate, shape (n,): sums and means are those of its response."""
    if gate.level == "token":
        return log_ratio
    values = log_ratio.double()
    response = tokens.sum_per_response(values) if gate.level == "sequence" else tokens.mean_per_response(values)
    return tokens.spread(response).to(log_ratio.dtype)


def log_bounds(tokens: Tokens, gate: GateConfig) -> tuple[torch.Tensor, torch.Tensor]:
    """The log of the bounds of each token, shape (n,), or () where all have the same; `tighten` makes them narrower."""
    assert gate.low is not None
    assert gate.high is not None
    low, high = (
        tokens.behaviour.new_full((), math.log(bound) if bound else -math.inf) for bound in (gate.low, gate.high)
    )
    if not gate.tighten:
        return low, high
    ages = tokens.ages
    if gate.level != "token":  # that of the oldest token of the response
        oldest = torch.zeros_like(tokens.counts).to(ages.dtype)
        ages = tokens.spread(oldest.scatter_reduce(0, tokens.sequence, ages, "amax"))
    looseness = 1 + gate.tighten * ages.to(tokens.behaviour.dtype)
    return low / looseness, high / looseness


@GATES.register("tis")
@traits(ranges={"token": (0.0, 2.0), "sequence": (0.0, 2.0), "geometric": (0.0, 2.0)}, weighs=True)
def truncated(log_ratio: torch.Tensor, tokens: Tokens, gate: GateConfig) -> GateResult:
    """Truncated importance sampling: `weight = clip(rho, low, high)`, low 0 and high C = 2 by default.

    Yao et al., "Your efficient RL framework secretly brings you off-policy RL training" (2025).
    """
    ratio = at_level(log_ratio, tokens, gate)
    low, high = log_bounds(tokens, gate)
    weight = torch.minimum(torch.maximum(ratio, low), high).clamp(max=LOG_RATIO_BOUND).exp()
    return GateResult(weight=weight, cut=(ratio > high) | (ratio < low))


_BANDS: dict[Level, Range] = {"token": (0.5, 5.0), "sequence": (0.5, 2.0), "geometric": (0.99, 1.01)}


@GATES.register("icepop")
@traits(ranges=_BANDS, weighs=True)
def icepop(log_ratio: torch.Tensor, tokens: Tokens, gate: GateConfig) -> GateResult:
    """Masked importance sampling: `weight = rho` where low <= rho <= high, and nothing elsewhere.

    Ring-1T (arXiv 2510.18855, section 3.3).
    """
    ratio = at_level(log_ratio, tokens, gate)
    weight = ratio.clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND).exp()
    return GateResult(weight=weight, keep=mask(log_ratio, tokens, gate).keep)


@GATES.register("mask")
@traits(ranges=_BANDS, restricts=True)
def mask(log_ratio: torch.Tensor, tokens: Tokens, gate: GateConfig) -> GateResult:
    """Rejection: tokens with low <= rho <= high are kept, without a weight.

    With level sequence: Liu and Li, "When speed kills stability" (2025).
    """
    ratio = at_level(log_ratio, tokens, gate)
    low, high = log_bounds(tokens, gate)
    return GateResult(keep=(ratio >= low) & (ratio <= high))


@GATES.register("veto")
@traits(ranges={"token": (1e-4, math.inf)})
def veto(log_ratio: torch.Tensor, tokens: Tokens, gate: GateConfig) -> GateResult:
    """Drop a whole response when the ratio of any of its tokens is below low, 1e-4, or above high, if given.

    As in slime and SkyRL.
    """
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

    With delta = -log low this drops a response when A < 0 and the mean of `log(behaviour / old)` is above delta, 0.5
    (DeepSeek-V3.2, arXiv 2512.02556, section 3.1, off-policy sequence masking).
    """
    low, _ = log_bounds(tokens, gate)
    gone = at_level(log_ratio, tokens, gate) < low
    return GateResult(keep=~(gone & (tokens.advantages < 0)))


@GATES.register("m2po")
@traits(ranges={"token": ANY_RATIO}, bounds=frozenset(), restricts=True)
def m2po(
    log_ratio: torch.Tensor,
    tokens: Tokens,
    gate: GateConfig,
    *,
    tau: float = 0.04,
    only: Literal["outward", "all"] = "outward",
) -> GateResult:
    """Drop the tokens of a micro-batch with the largest `(log rho)^2` until the mean of the others is at most tau.

    Zheng et al., arXiv 2510.01161, algorithm 1. The mean is over the tokens that can be dropped: with only outward
    those where the update would push the ratio further from 1 (A > 0 and rho > 1, or A < 0 and rho < 1), the ones that
    the clip of PPO would stop as well. Tokens of equal value are dropped together, so the result does not depend on the
    order of tokens. `tighten` is ours: a token of age a counts as if its log ratio were 1 + tighten x a times as large.

    Args:
        tau: at least 0.
        only: outward, or all tokens.
    """
    if only not in {"outward", "all"} or not tau >= 0:
        raise ConfigError(
            f"learner.correction.gates: m2po with only: {only}, tau: {tau}",
            "only is outward or all, tau is at least 0",
        )
    outward = ((tokens.advantages > 0) & (log_ratio > 0)) | ((tokens.advantages < 0) & (log_ratio < 0))
    movable = outward if only == "outward" else torch.ones_like(outward)
    scaled = log_ratio * (1 + gate.tighten * tokens.ages.to(log_ratio.dtype))
    squares = scaled * scaled
    return GateResult(keep=~movable | (squares < smallest_masked(squares, movable, tau)))


_LEAST = 1e-6  # probabilities are bounded to [1e-6, 1 - 1e-6], so that both logarithms of a divergence are finite


@GATES.register("binary_kl")
@traits(ranges={"token": (0.0, 0.1), "sequence": (0.0, 5e-3)}, bounds=frozenset({"high"}), tightens=False)
def binary_kl(log_ratio: torch.Tensor, tokens: Tokens, gate: GateConfig) -> GateResult:
    """Keep what has a binary KL of at most high: `D(p, q) = p log(p / q) + (1 - p) log((1 - p) / (1 - q))`.

    p and q are probabilities of the sampled token, all other tokens being the second event. Level token: D(mu, old) and
    D(old, mu) are both within the bound (KPop: Guo et al., ringtech.notion.site/kpop, 2026; prime-rl pull request
    3283). Level sequence: the mean of D(mu, old) over the tokens of the response is (FlashREINFORCE: Hu et al., 2026;
    OpenRLHF pull request 1339).
    """
    p = tokens.behaviour.clamp(max=0).exp().clamp(_LEAST, 1 - _LEAST).double()
    q = (tokens.behaviour + log_ratio).clamp(max=0).exp().clamp(_LEAST, 1 - _LEAST).double()
    distance = _binary_kl(p, q)
    if gate.level == "sequence":
        distance = tokens.spread(tokens.mean_per_response(distance))
    else:
        distance = torch.maximum(distance, _binary_kl(q, p))
    assert gate.high is not None
    return GateResult(keep=distance <= gate.high)


def _binary_kl(p: torch.Tensor, q: torch.Tensor) -> torch.Tensor:
    return p * (p / q).log() + (1 - p) * ((1 - p) / (1 - q)).log()


@GATES.register("tv")
@traits(ranges={"token": (0.0, 0.3)}, bounds=frozenset({"high"}), tightens=False)
def total_variation(log_ratio: torch.Tensor, tokens: Tokens, gate: GateConfig) -> GateResult:
    """Keep tokens whose probability moved by at most high, whatever the sign of A: `|old - mu| <= high`.

    IPO, the default of prime-rl (its pull requests 3418 and 3586). The loss `dppo` looks at the sign of A.
    """
    assert gate.high is not None
    moved = (tokens.behaviour + log_ratio).clamp(max=0).exp() - tokens.behaviour.clamp(max=0).exp()
    return GateResult(keep=moved.abs() <= gate.high)


@GATES.register("clip_cov")
@traits(ranges={"token": (1.0, 5.0)}, tightens=False)
def clip_cov(log_ratio: torch.Tensor, tokens: Tokens, gate: GateConfig, *, share: float = 2e-4) -> GateResult:
    """Clip-Cov: drop a few of the tokens whose covariance with A is above low and below high.

    Cui et al., arXiv 2505.22617, section 4.2: tokens that are probable and good, or improbable and bad, take the
    entropy. The covariance of a token is `(A - mean A) (log theta - mean log theta)` over the tokens of a micro-batch
    that have an advantage. The paper draws at random among those between the bounds; here they lie evenly spaced, so
    that a step can be repeated.

    Args:
        share: of the tokens, at least one is dropped; from 0 to 1.
    """
    del log_ratio
    assert gate.low is not None
    assert gate.high is not None
    covariance, live = tokens.covariances()
    found = live & (covariance > gate.low) & (covariance < gate.high)
    number, count = found.cumsum(0), found.sum().clamp(min=1)
    wanted = (live.sum() * _share(gate, share)).long().clamp(min=1)
    return GateResult(keep=~(found & (number * wanted // count > (number - 1) * wanted // count)))


@GATES.register("top_entropy")
@traits(ranges={"token": ANY_RATIO}, bounds=frozenset(), tightens=False, entropy=True)
def top_entropy(log_ratio: torch.Tensor, tokens: Tokens, gate: GateConfig, *, share: float = 0.2) -> GateResult:
    """Drop all but the tokens of a micro-batch with the highest entropy, where the response could fork.

    Wang et al., arXiv 2506.01939, section 5.1.

    Args:
        share: of the tokens that stay; from 0 to 1.
    """
    del log_ratio
    assert tokens.entropy is not None
    kept = math.ceil(_share(gate, share) * tokens.entropy.numel())
    order = tokens.entropy.detach().argsort(descending=True, stable=True)
    return GateResult(keep=torch.zeros_like(order, dtype=torch.bool).index_fill(0, order[:kept], value=True))


def _share(gate: GateConfig, share: float) -> float:
    if not 0 <= share <= 1:
        raise ConfigError(f"learner.correction.gates: {gate.use} with share: {share}", "share is from 0 to 1")
    return share


_ABSURD = 2.0**20  # bound on the log ratio of a token: squares and sums over responses stay finite
_TIS, _VETO = GateConfig(use="tis"), GateConfig(use="veto")
_DEFAULT_GATES = {"decoupled": (_TIS, _VETO), "prox_approx": (_TIS, _VETO), "bypass": (_VETO,), "uncorrected": ()}
"""Gates of a base where the configuration names none."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Correction:
    """What all gates together say of n tokens, each of shape (n,) and without a gradient."""

    factor: torch.Tensor  # of the policy loss: product of the weights, 0 where a token is dropped
    keep: torch.Tensor  # bool: False for dropped tokens
    cut: torch.Tensor  # bool: a bound cut the weight
    log_ratio: torch.Tensor  # log of the weight w that `TokenSums` describe, before any gate


@dataclass(frozen=True, kw_only=True, slots=True)
class Gate:
    """A gate of the run: `config` with every default filled in, and its function with its arguments bound."""

    config: GateConfig
    function: GateFunction
    traits: Traits

    @classmethod
    def of(cls, config: GateConfig) -> Gate:
        """`ConfigError`: no such gate, argument or level, a bound it does not read, or bounds that exclude all."""
        function = GATES.resolve(config.use, config.args)
        assert isinstance(function, partial)
        traits: Traits = getattr(function.func, "traits", _PLUGIN)
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
        if config.tighten and not traits.tightens:
            raise ConfigError(f"{where} has no tighten", "remove tighten")
        if config.tighten and (low > 1 or high < 1):
            raise ConfigError(f"{where}: tighten narrows bounds around 1, but 1 is outside of them", "remove tighten")
        filled = config.model_copy(update={"level": level, "low": low, "high": high})
        gate = cls(config=filled, function=function, traits=traits)
        gate.try_out()
        return gate

    def __call__(self, log_ratio: torch.Tensor, tokens: Tokens) -> tuple[torch.Tensor, ...]:
        """Return weight, keep and cut, all of shape (n,)."""
        result = self.function(log_ratio, tokens, self.config)
        if result.weight is not None and not self.traits.weighs:
            raise ConfigError(
                f"learner.correction.gates: {self.config.use} gives weights without the trait `weighs`",
                "decorate it with streamrl.learner.algorithms.corrections.traits(ranges=..., weighs=True)",
            )
        none = torch.zeros_like(log_ratio, dtype=torch.bool)
        weight = torch.ones_like(log_ratio) if result.weight is None else result.weight.detach()
        return weight, ~none if result.keep is None else result.keep, none if result.cut is None else result.cut

    def try_out(self) -> None:
        """Run the gate on three tokens, so that a wrong argument shows when the run starts."""
        zeros = torch.zeros(3)
        try:
            shapes = [part.shape for part in self(zeros, Tokens.trial(1.0, 1.0, 1.0))]
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
    """The correction of a run: `learner.correction`, resolved."""

    base: str  # what the old policy is
    gates: tuple[Gate, ...]  # in the order of the configuration; empty with base uncorrected
    exact: bool  # the ratio of tokens of staleness 0 is 1

    @classmethod
    def of(cls, config: CorrectionConfig) -> Corrections:
        gates = _DEFAULT_GATES[config.base] if config.gates is None else config.gates
        return cls(base=config.base, gates=tuple(Gate.of(gate) for gate in gates), exact=config.exact_on_policy_ratio)

    @property
    def reads_entropy(self) -> bool:
        return any(gate.traits.entropy for gate in self.gates)

    @property
    def level(self) -> Level:
        """Level of the gate that weighs; token when none does."""
        return next((gate.config.level for gate in self.gates if gate.traits.weighs), None) or "token"


def old_logprobs(base: str, proximal: torch.Tensor, behaviour: torch.Tensor, ages: torch.Tensor) -> torch.Tensor:
    """The log-probabilities of the old policy; with prox_approx the present policy stands in for `proximal`.

    prox_approx (A-3PO, arXiv 2512.06547): `behaviour + a (proximal - behaviour)` with a = age / (age + 1).
    """
    proximal = proximal.detach()
    if base == "bypass":
        return behaviour
    if base == "prox_approx":
        share = ages.to(behaviour.dtype) / (ages + 1)
        return behaviour + share * (proximal - behaviour)
    return proximal


def behaviour_logprobs(
    exact: bool, proximal: torch.Tensor, behaviour: torch.Tensor, ages: torch.Tensor
) -> torch.Tensor:
    """What tokens were sampled with; `exact`: those of staleness 0 with the policy of the start of the step."""
    return torch.where(ages == 0, proximal.detach(), behaviour) if exact else behaviour


def correct(tokens: Tokens, corrections: Corrections) -> Correction:
    """Apply all gates to a micro-batch: weights multiply, and a token is kept when every gate keeps it."""
    present = tokens.logprobs.detach()
    bypass = corrections.base == "bypass"
    gated = ((present if bypass else tokens.old) - tokens.behaviour).clamp(-_ABSURD, _ABSURD)
    factor = torch.ones_like(gated)
    keep = torch.ones_like(gated, dtype=torch.bool)
    cut = ~keep
    for gate in corrections.gates:
        weight, kept, bounded = gate(gated, tokens)
        factor, keep, cut = factor * weight, keep & kept, cut | bounded
    moved = gated if bypass else (tokens.proximal - tokens.behaviour).clamp(-_ABSURD, _ABSURD)
    return Correction(factor=factor * keep, keep=keep, cut=cut, log_ratio=moved)
