"""Policy losses that treat each token by itself; those of whole responses are in `losses_sequence.py`.

Notation: theta is trained, old is the centre of the trust region, mu sampled the token, u = theta / old, A the
advantage, sg stops the gradient. Ratios are formed as differences of logarithms and bounded before `exp`, so finite
log-probabilities give neither an infinite nor an undefined loss or gradient. At u = 1 the gradient of every loss is
that of REINFORCE, -A. Formulas, defaults and sources in one table: docs/reference/losses.md.
"""

from __future__ import annotations

import math

import torch

from streamrl.learner.algorithms import losses_sequence as losses_sequence  # noqa: PLC0414  (fills the registry)
from streamrl.learner.algorithms.loss import (
    LOSSES,
    LossResult,
    clipped_objective,
    half_square,
    log_below_one,
    log_dual_clip,
    log_ratio,
    option,
    policy_loss,
    uses_ratio,
    with_gradient,
)
from streamrl.learner.algorithms.tokens import LOG_RATIO_BOUND, Tokens

__all__ = ["LOSSES", "LossResult", "aipo", "cispo", "dppo", "ppo", "reinforce", "sapo", "uses_ratio"]


@policy_loss("ppo", uses_ratio=True)
def ppo(
    tokens: Tokens, *, clip_low: float = 0.2, clip_high: float = 0.28, dual_clip: float | None = 10.0
) -> LossResult:
    """PPO: `-min(u A, clip(u, 1 - clip_low, 1 + clip_high) A)` (Schulman et al., arXiv 1707.06347, equation 7).

    The asymmetric clip is that of DAPO (arXiv 2503.14476, section 3.1).

    Args:
        tokens: of whole responses.
        clip_low: the ratio gives no gradient below 1 - clip_low where A < 0; in [0, 1].
        clip_high: the ratio gives no gradient above 1 + clip_high where A > 0; at least 0.
        dual_clip: greatest ratio where A < 0, above 1 + clip_high; None: e^20. The dual clip c (Ye et al., arXiv
            1912.09729, section 3.4) and the two-sided cap delta of INTELLECT-2 (arXiv 2505.07291) are this one bound.
    """
    high = option("clip_high", clip_high, 0)
    return clipped_objective(
        log_ratio(tokens),
        tokens.advantages,
        log_low=log_below_one(option("clip_low", clip_low, 0, 1)),
        log_high=math.log1p(high),
        log_cap=log_dual_clip(dual_clip, 1 + high),
    )


@policy_loss("reinforce", uses_ratio=False)
def reinforce(tokens: Tokens) -> LossResult:
    """REINFORCE: `-A log theta` (Williams 1992), without a trust region and without a ratio.

    Off-policy it needs a gate that weighs tokens: with base bypass and `tis`, which makes it `-sg(min(w, C)) A log
    theta`.

    Args:
        tokens: of whole responses.
    """
    per_token = -tokens.advantages * tokens.logprobs
    return LossResult(per_token=per_token, clipped=torch.zeros_like(tokens.logprobs, dtype=torch.bool))


@policy_loss("cispo", uses_ratio=True)
def cispo(tokens: Tokens, *, low: float = 0.0, cap: float = 5.0) -> LossResult:
    """CISPO: `-sg(clip(u, low, cap)) A log theta` (MiniMax-M1, arXiv 2506.13585, section 3.1).

    Every token keeps its gradient; only its weight is bounded. `cap` is the bound itself, 1 + epsilon_high of the
    paper, and epsilon_max of ScaleRL (arXiv 2510.13786).

    Args:
        tokens: of whole responses.
        low: least weight, in [0, 1]; the paper leaves it off.
        cap: greatest weight, at least 1.
    """
    return _score(tokens, option("low", low, 0, 1), option("cap", cap, 1))


@policy_loss("aipo", uses_ratio=True)
def aipo(tokens: Tokens, *, cap: float = 2.0) -> LossResult:
    """AIPO: `-sg(min(u, cap)) A log theta` (LlamaRL, arXiv 2505.24034), one-sided by definition.

    Meant for base bypass, where u is theta / mu.

    Args:
        tokens: of whole responses.
        cap: rho of the paper, at least 1; 2 to 10 are in use.
    """
    return _score(tokens, 0.0, option("cap", cap, 1))


@policy_loss("sapo", uses_ratio=True)
def sapo(tokens: Tokens, *, temperature_pos: float = 1.0, temperature_neg: float = 1.05) -> LossResult:
    """SAPO: `-(4 / tau) sigmoid(tau (u - 1)) A`, a soft gate in place of the clip (arXiv 2511.20347).

    Args:
        tokens: of whole responses.
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
        tokens: of whole responses.
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
