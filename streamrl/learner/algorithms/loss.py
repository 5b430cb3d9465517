"""What a policy loss is: its signature, its result, the registry, and the pieces that several losses share.

A loss gets whole responses (`Tokens`) and gives one number per token. It knows of no other response, no gate, no mean
over tokens and no rank: gates multiply its result (`corrections.py`), aggregation weighs and adds it up
(`aggregation.py`). Its trust region is around `tokens.old`; u = theta / old.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar, cast

import torch

from streamrl.errors import ConfigError
from streamrl.learner.algorithms.registry import Registry
from streamrl.learner.algorithms.tokens import LOG_RATIO_BOUND, Tokens


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class LossResult:
    """The loss of each token.

    Attributes:
        per_token: shape (n,), with a gradient to `Tokens.logprobs`. A sum over tokens, never a mean: the learner
            divides by the count of the whole step.
        clipped: tokens on which the trust region acted, by a bounded ratio or by taking the gradient away; shape (n,),
            bool.
    """

    per_token: torch.Tensor
    clipped: torch.Tensor


class PolicyLoss(Protocol):
    """A function `(tokens, *, options...) -> LossResult`."""

    uses_ratio: bool
    """Whether it weighs tokens by u. Then, where `old` is the sampling policy, a weight of a gate would enter twice."""

    any_data: bool
    """Whether it needs no ratio off-policy, because another term of it keeps the policy near `old`."""

    def __call__(self, tokens: Tokens, **options: Any) -> LossResult:
        """Return the loss of each token."""


LOSSES: Registry[Callable[..., LossResult]] = Registry("learner.loss.use")
"""All policy losses; `losses.py` and `losses_sequence.py` fill it."""

_F = TypeVar("_F", bound=Callable[..., LossResult])


def policy_loss(name: str, *, uses_ratio: bool, any_data: bool = False) -> Callable[[_F], _F]:
    """Decorator: register a policy loss.

    Args:
        name: what `learner.loss.use` calls it.
        uses_ratio: see `PolicyLoss`.
        any_data: see `PolicyLoss`.
    """

    def add(function: _F) -> _F:
        flags: PolicyLoss = cast("Any", function)
        flags.uses_ratio, flags.any_data = uses_ratio, any_data
        LOSSES.register(name)(function)
        return function

    return add


def uses_ratio(loss: Callable[..., LossResult]) -> bool:
    """Whether a loss, with or without bound arguments, weighs tokens by u; a user's own without the flag does."""
    return bool(getattr(getattr(loss, "func", loss), "uses_ratio", True))


def option(name: str, value: float, least: float, greatest: float = math.inf) -> float:
    """Return the value of an option.

    Raises:
        ConfigError: it is no number between `least` and `greatest`.
    """
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
    """A tensor with the values of `weight` and the gradient `weight` to each log-probability.

    It is the surrogate of the score function: `weight * grad log pi`, whatever the weight depends on.
    """
    return weight.detach() * (1 + logprobs - logprobs.detach())


def half_square(logprobs: torch.Tensor, log_ratios: torch.Tensor, counts: torch.Tensor | float = 1.0) -> torch.Tensor:
    """Half the square of log ratios; gradient: the log ratio, to the log-probability of the same place.

    Both stay at their bound beyond +-`LOG_RATIO_BOUND`: the pull back does not end there, as that of a clamp would, and
    does not grow either.

    Args:
        logprobs: carry the gradient, shape (n,).
        log_ratios: shape (n,); no gradient flows into them.
        counts: so many tokens carry the same log ratio, that of their response, and each an equal part of the square.
    """
    bounded = log_ratios.detach().clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND)
    return bounded * (bounded / (2 * counts) + logprobs - logprobs.detach())


def clipped_objective(
    log_u: torch.Tensor, advantages: torch.Tensor, *, log_low: float, log_high: float, log_cap: float
) -> LossResult:
    """Return `-min(u A, clip(u) A)` of each token, with u of negative advantages bounded by a cap as well.

    The minimum bounds u from above where A > 0 and from below where A < 0, and nowhere else; the cap closes the side
    that stays open.

    Args:
        log_u: log ratios with a gradient, shape (n,).
        advantages: shape (n,).
        log_low: logarithm of the lower end of the clip.
        log_high: logarithm of the upper end of the clip.
        log_cap: logarithm of the greatest ratio where A < 0.
    """
    bounded = torch.where(advantages >= 0, log_u.clamp(max=log_high), log_u.clamp(log_low, log_cap))
    clipped = (bounded.detach() != log_u.detach()) & (advantages != 0)
    return LossResult(per_token=-advantages * bounded.exp(), clipped=clipped)


def log_below_one(clip_low: float) -> float:
    """Log of 1 - clip_low; minus infinity for 1."""
    return math.log1p(-clip_low) if clip_low < 1 else -math.inf


def log_dual_clip(dual_clip: float | None, least: float) -> float:
    """Log of the greatest ratio where A < 0; None: `LOG_RATIO_BOUND`.

    Raises:
        ConfigError: it is below `least`, the upper end of the clip.
    """
    return LOG_RATIO_BOUND if dual_clip is None else math.log(option("dual_clip", dual_clip, least))
