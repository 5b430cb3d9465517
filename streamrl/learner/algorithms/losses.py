"""Losses: the policy's, each a function by name, and the value function's; notation: docs/reference/losses.md.

A policy loss gets whole responses (`Tokens`) and gives one number per token. It knows of no gate, no mean over tokens
and no rank, and (but for `kl_cov`) of no other response: gates multiply its result (`corrections.py`), aggregation
weighs and adds it up (`recipe.py`). Its trust region is around `tokens.old`. At u = 1 the gradient of every loss is
that of REINFORCE, -A.

Losses whose ratio belongs to a whole response give each token its response's number, and the gradient to its own
log-probability: aggregation weighs all tokens of a response alike, so its mean over the tokens (`aggregate:
sequence_mean`) is the loss of the response as the papers write it.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, TypeVar

import torch

from streamrl.errors import ConfigError
from streamrl.learner.algorithms.registry import Registry
from streamrl.learner.algorithms.tokens import LOG_RATIO_BOUND, Objective, Sums, Tokens


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class LossResult:
    """The loss of each token. The learner adds it up and divides by the count of the whole step."""

    per_token: torch.Tensor  # shape (n,), with a gradient to `Tokens.logprobs`
    clipped: torch.Tensor  # shape (n,), bool: the trust region bounded the ratio of the token, or took its gradient


LOSSES: Registry[Callable[..., LossResult]] = Registry("learner.loss.use")

_F = TypeVar("_F", bound=Callable[..., LossResult])


def policy_loss(name: str, *, uses_ratio: bool, any_data: bool = False) -> Callable[[_F], _F]:
    """Decorator: register a policy loss.

    Args:
        name: what `learner.loss.use` calls it.
        uses_ratio: it weighs tokens by u; where `old` is the sampling policy, a weight of a gate would enter twice.
        any_data: it needs no ratio off-policy, because another term of it keeps the policy near `old`.
    """

    def add(function: _F) -> _F:
        vars(function).update(uses_ratio=uses_ratio, any_data=any_data)
        LOSSES.register(name)(function)
        return function

    return add


def uses_ratio(loss: Callable[..., LossResult]) -> bool:
    """Whether a loss, with or without bound arguments, weighs tokens by u; a user's own without the flag does."""
    return bool(getattr(getattr(loss, "func", loss), "uses_ratio", True))


def option(name: str, value: float, least: float, greatest: float = math.inf) -> float:
    """The value of an option; `ConfigError`: it is no number between `least` and `greatest`."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not least <= value <= greatest:
        raise ConfigError(
            f"learner.loss.args {name} is {value!r}",
            f"it is a number from {least:g} to {greatest:g}" if greatest < math.inf else f"it is at least {least:g}",
        )
    return float(value)


def log_ratio(tokens: Tokens) -> torch.Tensor:
    """Log u = log theta - log old of each token, shape (n,), unbounded, with a gradient."""
    return tokens.logprobs - tokens.old.detach()


def with_gradient(weight: torch.Tensor, logprobs: torch.Tensor) -> torch.Tensor:
    """The values of `weight` with the gradient `weight * grad log pi`, whatever the weight depends on."""
    return weight.detach() * (1 + logprobs - logprobs.detach())


def half_square(logprobs: torch.Tensor, log_ratios: torch.Tensor, counts: torch.Tensor | float = 1.0) -> torch.Tensor:
    """Half the square of log ratios; gradient: the log ratio, to the log-probability of the same place.

    Both stay at their bound beyond +-`LOG_RATIO_BOUND`: the pull back does not end there, as that of a clamp would, and
    does not grow either. `counts`: so many tokens carry the log ratio of their response, each a part of the square.
    """
    bounded = log_ratios.detach().clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND)
    return bounded * (bounded / (2 * counts) + logprobs - logprobs.detach())


def clipped_objective(
    log_u: torch.Tensor, advantages: torch.Tensor, clip_low: float, clip_high: float, dual_clip: float | None
) -> LossResult:
    """Return `-min(u A, clip(u) A)` of each token, with u of negative advantages bounded by `dual_clip` as well.

    The minimum bounds u from above where A > 0 and from below where A < 0, and nowhere else; `dual_clip` closes the
    side that stays open.
    """
    low, high = option("clip_low", clip_low, 0, 1), option("clip_high", clip_high, 0)
    log_low = math.log1p(-low) if low < 1 else -math.inf
    log_cap = log_dual_clip(dual_clip, 1 + high)
    bounded = torch.where(advantages >= 0, log_u.clamp(max=math.log1p(high)), log_u.clamp(log_low, log_cap))
    clipped = (bounded.detach() != log_u.detach()) & (advantages != 0)
    return LossResult(per_token=-advantages * bounded.exp(), clipped=clipped)


def log_dual_clip(dual_clip: float | None, least: float) -> float:
    """Log of the greatest ratio where A < 0; `ConfigError`: it is below `least`, the upper end of the clip."""
    return LOG_RATIO_BOUND if dual_clip is None else math.log(option("dual_clip", dual_clip, least))


@policy_loss("ppo", uses_ratio=True)
def ppo(
    tokens: Tokens, *, clip_low: float = 0.2, clip_high: float = 0.28, dual_clip: float | None = 10.0
) -> LossResult:
    """PPO: `-min(u A, clip(u, 1 - clip_low, 1 + clip_high) A)` (Schulman et al., arXiv 1707.06347, equation 7).

    The asymmetric clip is that of DAPO (arXiv 2503.14476, section 3.1).

    Args:
        clip_low: the ratio gives no gradient below 1 - clip_low where A < 0; in [0, 1].
        clip_high: the ratio gives no gradient above 1 + clip_high where A > 0; at least 0.
        dual_clip: greatest ratio where A < 0, above 1 + clip_high; None: e^20. The dual clip c (Ye et al., arXiv
            1912.09729, section 3.4) and the two-sided cap delta of INTELLECT-2 (arXiv 2505.07291) are this one bound.
    """
    return clipped_objective(log_ratio(tokens), tokens.advantages, clip_low, clip_high, dual_clip)


@policy_loss("reinforce", uses_ratio=False)
def reinforce(tokens: Tokens) -> LossResult:
    """REINFORCE: `-A log theta` (Williams 1992), without a trust region and without a ratio.

    Off-policy it needs a gate that weighs tokens: with base bypass and `tis`, which makes it `-sg(min(w, C)) A log
    theta`.
    """
    per_token = -tokens.advantages * tokens.logprobs
    return LossResult(per_token=per_token, clipped=torch.zeros_like(tokens.logprobs, dtype=torch.bool))


@policy_loss("cispo", uses_ratio=True)
def cispo(tokens: Tokens, *, low: float = 0.0, cap: float = 5.0) -> LossResult:
    """CISPO: `-sg(clip(u, low, cap)) A log theta` (MiniMax-M1, arXiv 2506.13585, section 3.1).

    Every token keeps its gradient; only its weight is bounded. `cap` is the bound itself, 1 + epsilon_high of the
    paper, and epsilon_max of ScaleRL (arXiv 2510.13786).

    Args:
        low: least weight, in [0, 1]; the paper leaves it off.
        cap: greatest weight, at least 1.
    """
    return _score(tokens, option("low", low, 0, 1), option("cap", cap, 1))


@policy_loss("aipo", uses_ratio=True)
def aipo(tokens: Tokens, *, cap: float = 2.0) -> LossResult:
    """AIPO: `-sg(min(u, cap)) A log theta` (LlamaRL, arXiv 2505.24034), one-sided by definition.

    Meant for base bypass, where u is theta / mu.

    Args:
        cap: rho of the paper, at least 1; 2 to 10 are in use.
    """
    return _score(tokens, 0.0, option("cap", cap, 1))


@policy_loss("sapo", uses_ratio=True)
def sapo(tokens: Tokens, *, temperature_pos: float = 1.0, temperature_neg: float = 1.05) -> LossResult:
    """SAPO: `-(4 / tau) sigmoid(tau (u - 1)) A`, a soft gate in place of the clip (arXiv 2511.20347).

    Args:
        temperature_pos: tau where A > 0, above 0.
        temperature_neg: tau elsewhere; greater, because gradients of negative tokens spread over the vocabulary.
    """
    tiny = 1e-6
    positive = option("temperature_pos", temperature_pos, tiny)
    negative = option("temperature_neg", temperature_neg, tiny)
    u = log_ratio(tokens).clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND).exp()
    tau = torch.where(tokens.advantages > 0, positive, negative)
    gate = torch.sigmoid(tau * (u - 1)) * 4 / tau
    return LossResult(per_token=-gate * tokens.advantages, clipped=torch.zeros_like(u, dtype=torch.bool))


@policy_loss("dppo", uses_ratio=True)
def dppo(
    tokens: Tokens, *, low: float = 0.2, high: float = 0.2, cap: float = 20.0, regulariser: float = 0.0
) -> LossResult:
    """DPPO with the binary total variation: `-keep min(u, cap) A` (arXiv 2602.04879; the cap: section 5.4).

    A token gives no gradient when it is already so much likelier (A > 0) or less likely (A < 0) than it was sampled
    that its probability alone has moved by more than a bound: `theta - mu > high`, or `< -low`. So rare tokens, whose
    ratios are large and whose share of the distance is small, go on learning. The region is around mu with any base;
    the weight is u, so with base decoupled the gate supplies old / mu.

    Args:
        low: greatest fall of a probability, in [0, 1].
        high: greatest rise of a probability, in [0, 1].
        cap: greatest weight, at least 1.
        regulariser: adds `regulariser (log theta / mu)^2` of all tokens, at least 0; 1e-3 is in use (Kimi K2.5, arXiv
            2602.02276). Beyond e^+-20 see `half_square`.
    """
    low, high = option("low", low, 0, 1), option("high", high, 0, 1)
    log_u = log_ratio(tokens).detach()
    bounded = log_u.clamp(max=math.log(option("cap", cap, 1)))
    moved = tokens.logprobs.detach().clamp(max=0).exp() - tokens.behaviour.clamp(max=0).exp()
    outside = torch.where(tokens.advantages > 0, moved > high, moved < -low) & (tokens.advantages != 0)
    weight = bounded.exp().masked_fill(outside, 0)
    per_token = -tokens.advantages * with_gradient(weight, tokens.logprobs)
    if option("regulariser", regulariser, 0):
        distance = half_square(tokens.logprobs, tokens.logprobs - tokens.behaviour)
        per_token = per_token + 2 * regulariser * distance
    return LossResult(per_token=per_token, clipped=outside | ((bounded != log_u) & (tokens.advantages != 0)))


def _score(tokens: Tokens, low: float, cap: float) -> LossResult:
    """`-sg(clip(u, low, cap)) A log theta`."""
    log_u = log_ratio(tokens).detach()
    bounded = log_u.clamp(math.log(low) if low else -math.inf, math.log(cap))
    per_token = -bounded.exp() * tokens.advantages * tokens.logprobs
    return LossResult(per_token=per_token, clipped=(bounded != log_u) & (tokens.advantages != 0))


@policy_loss("kl_cov", uses_ratio=True)
def kl_cov(tokens: Tokens, *, share: float = 2e-4, coefficient: float = 1.0, cap: float = 20.0) -> LossResult:
    """KL-Cov: `-min(u, cap) A`, plus `coefficient |log u|` for the tokens with the highest covariance with A.

    Cui et al., arXiv 2505.22617, section 4.2, equation 13. The covariance is that of the gate `clip_cov`, over a
    micro-batch: the one loss that sees other responses. With one update per step it acts with base bypass alone,
    because u is 1 otherwise. The paper has no cap; here it is that of `dppo`.

    Args:
        share: of the tokens with an advantage that are pulled back, those with a positive covariance and at least one;
            from 0 to 1.
        coefficient: strength of the pull, at least 0.
        cap: greatest weight, at least 1.
    """
    log_u = log_ratio(tokens)
    covariance, live = tokens.covariances()
    wanted = (live.sum() * option("share", share, 0, 1)).long().clamp(min=1)
    pulled = (covariance.argsort(descending=True, stable=True).argsort() < wanted) & (covariance > 0)
    bounded = log_u.detach().clamp(max=math.log(option("cap", cap, 1)))
    per_token = -tokens.advantages * with_gradient(bounded.exp(), tokens.logprobs)
    # Its gradient does not end beyond the bound, as that of a clamp would.
    pull = log_u.detach().clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND).abs()
    pull = pull + log_u.detach().sign() * (tokens.logprobs - tokens.logprobs.detach())
    per_token = per_token + option("coefficient", coefficient, 0) * torch.where(pulled, pull, 0)
    return LossResult(per_token=per_token, clipped=(bounded != log_u) & (tokens.advantages != 0))


Level = Literal["token", "sequence"]
_LOG_LEAST = math.log(1e-8)


@policy_loss("gspo", uses_ratio=True)
def gspo(
    tokens: Tokens, *, clip_low: float = 3e-4, clip_high: float = 4e-4, dual_clip: float | None = 10.0
) -> LossResult:
    """GSPO: `-min(s A, clip(s, 1 - clip_low, 1 + clip_high) A)` (arXiv 2507.18071, equation 5).

    The paper aggregates by `sequence_mean`.

    Args:
        clip_low: in [0, 1].
        clip_high: at least 0.
        dual_clip: greatest s where A < 0, above 1 + clip_high; None: e^20. The dual clip of `ppo`, on the ratio of
            the response: the paper's minimum leaves that side open.
    """
    log_s = tokens.spread(tokens.mean_per_response(_bounded(log_ratio(tokens).detach())))
    log_s = log_s + tokens.logprobs - tokens.logprobs.detach()
    return clipped_objective(log_s, tokens.advantages, clip_low, clip_high, dual_clip)


@policy_loss("gmpo", uses_ratio=True)
def gmpo(
    tokens: Tokens, *, clip_low: float = 0.4, clip_high: float = 0.4, dual_clip: float | None = 10.0
) -> LossResult:
    """GMPO: `-s' A`, s' the geometric mean of token ratios clipped one by one (arXiv 2507.20673).

    A ratio is clipped from above where A > 0 and from below where A < 0, in log space. Tokens that are clipped give no
    gradient, the others s' A. The paper aggregates by `sequence_mean`.

    Args:
        clip_low: the ratio is bounded by e^-clip_low, at least 0.
        clip_high: the ratio is bounded by e^clip_high, at least 0.
        dual_clip: greatest s', above e^clip_high, which s' of a response with A > 0 everywhere never exceeds; None:
            e^20. As in `gspo`.
    """
    log_low, log_high = -option("clip_low", clip_low, 0), option("clip_high", clip_high, 0)
    log_cap = log_dual_clip(dual_clip, math.exp(log_high))
    log_u = _bounded(log_ratio(tokens).detach())
    bounded = torch.where(tokens.advantages >= 0, log_u.clamp(max=log_high), log_u.clamp(min=log_low))
    log_s = tokens.spread(tokens.mean_per_response(bounded))
    capped = log_s.clamp(max=log_cap)
    clipped = ((bounded != log_u) | (capped != log_s)) & (tokens.advantages != 0)
    ratio = capped.exp()
    per_token = -tokens.advantages * torch.where(clipped, ratio, with_gradient(ratio, tokens.logprobs))
    return LossResult(per_token=per_token, clipped=clipped)


@policy_loss("topr", uses_ratio=True)
def topr(
    tokens: Tokens, *, level: Level = "sequence", cap: float = 1.0, positive: float = 1.0, negative: float = 1.0
) -> LossResult:
    """TOPR: `-A log theta` where A >= 0, `-sg(min(U, cap)) A log theta` where A < 0 (arXiv 2503.14286).

    Good responses are learnt from as in supervised learning, however old they are; bad ones fade as they become
    unlikely. Meant for base bypass, where U is theta / mu of the response.

    Args:
        level: sequence, as in the paper; token: the ratio of each token by itself.
        cap: greatest weight where A < 0, above 0.
        positive: factor of responses with A >= 0, at least 0.
        negative: factor of the others, at least 0.
    """
    log_u = _bounded(log_ratio(tokens).detach())
    log_ratios = log_u if _token_level(level) else tokens.spread(tokens.sum_per_response(log_u))
    log_cap = math.log(option("cap", cap, 1e-6))
    bad = tokens.advantages < 0
    weight = torch.where(
        bad,
        log_ratios.clamp(max=log_cap).exp() * option("negative", negative, 0),
        torch.full_like(log_ratios, option("positive", positive, 0)),
    )
    per_token = -weight * tokens.advantages * tokens.logprobs
    return LossResult(per_token=per_token, clipped=bad & (log_ratios > log_cap))


@policy_loss("vespo", uses_ratio=True)
def vespo(
    tokens: Tokens,
    *,
    k_pos: float = 2.0,
    lambda_pos: float = 3.0,
    k_neg: float = 3.0,
    lambda_neg: float = 2.0,
) -> LossResult:
    """VESPO: `-sg(phi(U)) A log theta`, `phi(U) = U^k e^(lambda (1 - U))` (arXiv 2602.10693).

    Phi is 1 at U = 1 and falls off smoothly on both sides; its peak is at k / lambda. The log ratio of the response is
    bounded to [log 1e-8, 20].

    Args:
        k_pos: k where A >= 0, at least 0.
        lambda_pos: lambda where A >= 0, above 0.
        k_neg: k where A < 0.
        lambda_neg: lambda where A < 0.
    """
    tiny = 1e-4
    good = tokens.advantages >= 0
    k = torch.where(good, option("k_pos", k_pos, 0), option("k_neg", k_neg, 0))
    rate = torch.where(good, option("lambda_pos", lambda_pos, tiny), option("lambda_neg", lambda_neg, tiny))
    log_u = tokens.sum_per_response(_bounded(log_ratio(tokens).detach())).clamp(_LOG_LEAST, LOG_RATIO_BOUND)
    log_u = tokens.spread(log_u)
    # Far from U = 1 the exponent is very negative and phi is 0, as the formula says.
    phi = (k * log_u + rate * (1 - log_u.exp())).exp()
    per_token = -phi * tokens.advantages * tokens.logprobs
    return LossResult(per_token=per_token, clipped=torch.zeros_like(good))


@policy_loss("kimi", uses_ratio=False, any_data=True)
def kimi(tokens: Tokens, *, tau: float = 0.1, level: Level = "sequence") -> LossResult:
    """Kimi k1.5, or OPMD: `-A log theta + (tau / 2) (log U)^2` (arXiv 2501.12599, section 2.3.2), without a ratio.

    The square keeps theta near old and stands in for a trust region; any data may be learnt from. Old is the policy at
    the start of the step with base decoupled, the one that sampled with bypass. Log U is bounded as `half_square` says.

    Args:
        tau: strength of the square, at least 0.
        level: sequence: the log ratio of the response, as in the paper; token: of each token by itself.
    """
    log_u, counts = _bounded(log_ratio(tokens).detach()), torch.ones_like(tokens.logprobs)
    if not _token_level(level):
        log_u, counts = tokens.spread(tokens.sum_per_response(log_u)), tokens.spread(tokens.counts)
    square = half_square(tokens.logprobs, log_u, counts)
    per_token = option("tau", tau, 0) * square - tokens.advantages * tokens.logprobs
    return LossResult(per_token=per_token, clipped=torch.zeros_like(log_u, dtype=torch.bool))


def _bounded(log_u: torch.Tensor) -> torch.Tensor:
    """Bound the log ratio of a token before it is added to others."""
    return log_u.clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND)


def _token_level(level: str) -> bool:
    if level not in {"token", "sequence"}:
        raise ConfigError(f"learner.loss.args level is {level!r}", "it is token or sequence")
    return level == "token"


@dataclass(kw_only=True, slots=True)
class ValueSums(Sums):
    """Sums over tokens, from which all statistics of a critic follow."""

    clipped: float = 0.0  # tokens whose value was outside the trust region with the larger loss inside: no gradient
    values: float = 0.0  # at the start of the step
    returns: float = 0.0  # what they are to become
    returns_squared: float = 0.0
    error: float = 0.0  # returns - values at the start of the step
    error_squared: float = 0.0

    @property
    def explained_variance(self) -> float:
        """`1 - Var(returns - values) / Var(returns)`, at most 1; 0 where returns do not vary.

        1: the values of the start of the step predict the returns; below 0: a constant would predict them better.
        """
        spread = self.mean("returns_squared") - self.mean("returns") ** 2
        left = self.mean("error_squared") - self.mean("error") ** 2
        return 1 - left / spread if spread > 1e-12 * max(1.0, self.mean("returns_squared")) else 0.0


def clipped_value_loss(values: torch.Tensor, old: torch.Tensor, returns: torch.Tensor, *, clip: float) -> Objective:
    """Return `max((V - R)^2, (clip(V, V_old - c, V_old + c) - R)^2) / 2` of each token, and `ValueSums`.

    The larger of the two, as in the code of PPO (Schulman et al., arXiv 1707.06347; Engstrom et al., arXiv 2005.12729,
    section 3): a value that has gone further than c towards its return gives no gradient, one that has gone away from
    it does. V_old is of the start of the step; `clip` is c, 0: no trust region, the plain squared error.
    """
    old = old.detach()
    error = (values - returns).square()
    bounded = (values.clamp(old - clip, old + clip) - returns).square() if clip else error
    clipped = (bounded > error).detach()
    per_token = torch.maximum(error, bounded) / 2
    wide, wide_returns = old.double(), returns.double()
    left = wide_returns - wide
    columns = (
        torch.ones_like(wide),
        per_token.detach().double(),
        clipped.double(),
        wide,
        wide_returns,
        wide_returns.square(),
        left,
        left.square(),
    )
    return Objective(per_token=per_token, sums=torch.stack(columns).sum(dim=1))
