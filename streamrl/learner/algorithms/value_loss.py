"""The loss of a value function: squared error with a trust region around the values of the start of the step."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from streamrl.learner.algorithms.sums import Sums


@dataclass(kw_only=True, slots=True)
class ValueSums(Sums):
    """Sums over tokens, from which all statistics of a critic follow; they add across micro-batches and ranks.

    Attributes:
        tokens: number of tokens.
        loss: sum of the loss.
        clipped: tokens whose value was outside the trust region with the larger loss inside, so they give no gradient.
        values: sum of the values at the start of the step.
        returns: sum of what they are to become.
        returns_squared: sum of its squares.
        error: sum of returns - values at the start of the step.
        error_squared: sum of its squares.
    """

    loss: float = 0.0
    clipped: float = 0.0
    values: float = 0.0
    returns: float = 0.0
    returns_squared: float = 0.0
    error: float = 0.0
    error_squared: float = 0.0

    @property
    def explained_variance(self) -> float:
        """`1 - Var(returns - values) / Var(returns)`, at most 1; 0 where returns do not vary.

        1: the values of the start of the step predict the returns; below 0: a constant would predict them better.
        """
        spread = self.mean("returns_squared") - self.mean("returns") ** 2
        left = self.mean("error_squared") - self.mean("error") ** 2
        return 1 - left / spread if spread > 1e-12 * max(1.0, self.mean("returns_squared")) else 0.0


VALUE_SUMS = ValueSums.names()


@dataclass(frozen=True, kw_only=True, slots=True)
class ValueLoss:
    """The loss of each token and the sums of the statistics.

    Attributes:
        per_token: shape (n,), with a gradient to the values.
        sums: float64, shape (len(VALUE_SUMS),), without a gradient, in the order of `VALUE_SUMS`.
    """

    per_token: torch.Tensor
    sums: torch.Tensor = field(repr=False)


def clipped_value_loss(values: torch.Tensor, old: torch.Tensor, returns: torch.Tensor, *, clip: float) -> ValueLoss:
    """Return `max((V - R)^2, (clip(V, V_old - c, V_old + c) - R)^2) / 2` of each token.

    The larger of the two, as in the code of PPO (Schulman et al., arXiv 1707.06347; Engstrom et al., arXiv 2005.12729,
    section 3): a value that has gone further than c towards its return gives no gradient, one that has gone away from
    it does.

    Args:
        values: V, being trained, shape (n,).
        old: V_old, at the start of the step; no gradient flows into it.
        returns: R, shape (n,).
        clip: c, at least 0; 0: no trust region, the plain squared error.
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
    return ValueLoss(per_token=per_token, sums=torch.stack(columns).sum(dim=1))
