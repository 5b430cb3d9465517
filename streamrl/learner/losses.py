"""The policy loss: decoupled PPO with truncated importance sampling, formed in log space.

Three policies appear (Hilton et al., arXiv 2110.00641; AReaL, arXiv 2505.24298, equation 5):

* behaviour, which sampled the token (perhaps some versions ago, perhaps with other kernels),
* proximal, the policy at the start of the step, the centre of the trust region,
* the policy that is being trained.

All are natural logarithms of the probability of the sampled token. Ratios are clamped before they are exponentiated,
so finite log-probabilities can give neither an infinite nor an undefined loss or gradient.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, fields

import torch

LOG_RATIO_BOUND = 20.0
"""Bound on a log ratio before `exp`: e^20 is 4.9e8, far outside any trust region and far inside of float32."""


@dataclass(kw_only=True, slots=True)
class TokenSums:
    """Sums over trained tokens, from which all statistics of a loss follow; they add across micro-batches and ranks.

    Attributes:
        tokens: number of trained tokens.
        loss: sum of the loss.
        weight: sum of importance weights w = proximal / behaviour, before the cap.
        weight_squared: sum of w^2.
        squared_log_ratio: sum of (log w)^2.
        clipped: tokens whose ratio (policy / proximal) was clipped, so that they give no gradient.
        capped: tokens whose importance weight was cut down to the cap.
        kl_k1: sum of -log w, the plain estimator of KL(behaviour || proximal).
        kl_k3: sum of w - 1 - log w, the low-variance estimator of the same; never negative.
    """

    tokens: float = 0.0
    loss: float = 0.0
    weight: float = 0.0
    weight_squared: float = 0.0
    squared_log_ratio: float = 0.0
    clipped: float = 0.0
    capped: float = 0.0
    kl_k1: float = 0.0
    kl_k3: float = 0.0

    @classmethod
    def from_tensor(cls, sums: torch.Tensor) -> TokenSums:
        """Read the sums out of a tensor of shape (number of fields,), in the order of the fields."""
        return cls(**dict(zip(TOKEN_SUMS, sums.tolist(), strict=True)))

    @property
    def ess(self) -> float:
        """Normalised effective sample size, (sum w)^2 / (n sum w^2), in (0, 1]; 1 without tokens."""
        total = self.tokens * self.weight_squared
        return self.weight**2 / total if total else 1.0

    def mean(self, name: str) -> float:
        """Mean of a field per trained token; 0 without tokens."""
        value: float = getattr(self, name)
        return value / self.tokens if self.tokens else 0.0


TOKEN_SUMS = tuple(item.name for item in fields(TokenSums))


@dataclass(frozen=True, kw_only=True, slots=True)
class PolicyLoss:
    """The loss of each token and the sums of the statistics.

    Attributes:
        per_token: loss of each token, shape (tokens,), with a gradient to the log-probabilities.
        sums: float64, shape (len(TOKEN_SUMS),), without a gradient, in the order of `TOKEN_SUMS`.
    """

    per_token: torch.Tensor
    sums: torch.Tensor = field(repr=False)


def decoupled_ppo(
    logprobs: torch.Tensor,
    prox_logprobs: torch.Tensor,
    behaviour_logprobs: torch.Tensor,
    advantages: torch.Tensor,
    *,
    clip_low: float = 0.2,
    clip_high: float = 0.28,
    importance_cap: float = 2.0,
) -> PolicyLoss:
    """Return `-min(rho, C) * min(u A, clip(u, 1 - clip_low, 1 + clip_high) A)` of each token.

    u = policy / proximal carries the gradient, rho = proximal / behaviour does not. With proximal = behaviour this is
    PPO; with policy = proximal (one update per batch) it is truncated importance sampling. The minimum leaves one
    side open (A < 0, u large): there log u is clamped to `LOG_RATIO_BOUND`.

    Args:
        logprobs: policy being trained, shape (tokens,), float32.
        prox_logprobs: policy at the start of the step; no gradient flows into it.
        behaviour_logprobs: as the engine sampled it.
        advantages: shape (tokens,).
        clip_low: the ratio is clipped below 1 - clip_low, in [0, 1].
        clip_high: the ratio is clipped above 1 + clip_high, at least 0.
        importance_cap: C, at least 1.

    Returns:
        Loss per token (a sum, never a mean: the learner divides by the token count of the whole step) and statistics.
    """
    prox_logprobs = prox_logprobs.detach()
    log_rho = prox_logprobs - behaviour_logprobs
    weight = log_rho.clamp(max=math.log(importance_cap)).exp()
    log_u = logprobs - prox_logprobs
    log_low = math.log1p(-clip_low) if clip_low < 1 else -math.inf
    # min(u A, clip(u) A) bounds u from above where A > 0 and from below where A < 0, and nowhere else.
    above, below = log_u.clamp(max=math.log1p(clip_high)), log_u.clamp(log_low, LOG_RATIO_BOUND)
    bounded = torch.where(advantages >= 0, above, below)
    per_token = -(weight * advantages) * bounded.exp()
    clipped = (bounded.detach() != log_u.detach()) & (advantages != 0)
    sums = _sums(per_token.detach(), log_rho, clipped, math.log(importance_cap))
    return PolicyLoss(per_token=per_token, sums=sums)


def _sums(loss: torch.Tensor, log_rho: torch.Tensor, clipped: torch.Tensor, log_cap: float) -> torch.Tensor:
    """Sums of `TOKEN_SUMS`, in double precision: they are added over many tokens and squared."""
    wide = log_rho.double()
    bounded = wide.clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND)
    weight = bounded.exp()
    columns = (
        torch.ones_like(wide),
        loss.double(),
        weight,
        weight * weight,
        wide * wide,
        clipped.double(),
        (log_rho > log_cap).double(),
        -wide,
        weight - 1 - bounded,
    )
    return torch.stack(columns).sum(dim=1)
