"""Policy losses whose ratio belongs to a whole response.

Notation as in `losses.py`; U is the product and s the geometric mean of the ratios u of a response. Each token carries
its response's number, and the gradient to its own log-probability: aggregation weighs all tokens of a response alike,
so its mean over the tokens (`aggregate: sequence_mean`) is the loss of the response as the papers write it. Where
advantages differ within a response, each token keeps its own (GSPO-token, arXiv 2507.18071, section 4.3).
"""

from __future__ import annotations

import math
from typing import Literal

import torch

from streamrl.errors import ConfigError
from streamrl.learner.algorithms.loss import (
    LossResult,
    clipped_objective,
    half_square,
    log_below_one,
    log_dual_clip,
    log_ratio,
    option,
    policy_loss,
    with_gradient,
)
from streamrl.learner.algorithms.tokens import LOG_RATIO_BOUND, Tokens

Level = Literal["token", "sequence"]
_LOG_LEAST = math.log(1e-8)


@policy_loss("gspo", uses_ratio=True)
def gspo(
    tokens: Tokens, *, clip_low: float = 3e-4, clip_high: float = 4e-4, dual_clip: float | None = 10.0
) -> LossResult:
    """GSPO: `-min(s A, clip(s, 1 - clip_low, 1 + clip_high) A)` (arXiv 2507.18071, equation 5).

    The paper aggregates by `sequence_mean`.

    Args:
        tokens: of whole responses.
        clip_low: in [0, 1].
        clip_high: at least 0.
        dual_clip: greatest s where A < 0, above 1 + clip_high; None: e^20. The dual clip of `ppo`, on the ratio of
            the response: the paper's minimum leaves that side open.
    """
    high = option("clip_high", clip_high, 0)
    log_u = _bounded(log_ratio(tokens).detach())
    log_s = tokens.spread(tokens.mean_per_response(log_u))
    return clipped_objective(
        log_s + tokens.logprobs - tokens.logprobs.detach(),
        tokens.advantages,
        log_low=log_below_one(option("clip_low", clip_low, 0, 1)),
        log_high=math.log1p(high),
        log_cap=log_dual_clip(dual_clip, 1 + high),
    )


@policy_loss("gmpo", uses_ratio=True)
def gmpo(
    tokens: Tokens, *, clip_low: float = 0.4, clip_high: float = 0.4, dual_clip: float | None = 10.0
) -> LossResult:
    """GMPO: `-s' A`, s' the geometric mean of token ratios clipped one by one (arXiv 2507.20673).

    A ratio is clipped from above where A > 0 and from below where A < 0, in log space. Tokens that are clipped give no
    gradient, the others s' A. The paper aggregates by `sequence_mean`.

    Args:
        tokens: of whole responses.
        clip_low: the ratio is bounded by e^-clip_low, at least 0.
        clip_high: the ratio is bounded by e^clip_high, at least 0.
        dual_clip: greatest s' where A < 0, above e^clip_high; None: e^20. As in `gspo`.
    """
    log_low, log_high = -option("clip_low", clip_low, 0), option("clip_high", clip_high, 0)
    log_cap = log_dual_clip(dual_clip, math.exp(log_high))
    log_u = _bounded(log_ratio(tokens).detach())
    bounded = torch.where(tokens.advantages >= 0, log_u.clamp(max=log_high), log_u.clamp(min=log_low))
    log_s = tokens.spread(tokens.mean_per_response(bounded))
    capped = torch.where(tokens.advantages < 0, log_s.clamp(max=log_cap), log_s)
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
        tokens: of whole responses.
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
        tokens: of whole responses.
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
    # Far from U = 1 the exponent is very negative: phi is then 0, which is what is meant.
    phi = (k * log_u + rate * (1 - log_u.exp())).exp()
    per_token = -phi * tokens.advantages * tokens.logprobs
    return LossResult(per_token=per_token, clipped=torch.zeros_like(good))


@policy_loss("kimi", uses_ratio=False, any_data=True)
def kimi(tokens: Tokens, *, tau: float = 0.1, level: Level = "sequence") -> LossResult:
    """Kimi k1.5, or OPMD: `-A log theta + (tau / 2) (log U)^2` (arXiv 2501.12599, section 2.3.2), without a ratio.

    The square keeps theta near old and stands in for a trust region; any data may be learnt from. Old is the policy at
    the start of the step with base decoupled, the one that sampled with bypass. Log U is bounded as `half_square` says.

    Args:
        tokens: of whole responses.
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
