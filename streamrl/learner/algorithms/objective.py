"""What is differentiated: the policy loss behind its gates, plus the KL term, minus the entropy bonus."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch

from streamrl.config.learner import KlConfig
from streamrl.learner.algorithms.corrections import Corrections, correct
from streamrl.learner.algorithms.kl import kl_term
from streamrl.learner.algorithms.loss import LossResult
from streamrl.learner.algorithms.sums import token_sums
from streamrl.learner.algorithms.tokens import Tokens


class Terms(Protocol):
    """What the objective needs of a recipe."""

    @property
    def loss(self) -> Callable[[Tokens], LossResult]:
        """The policy loss with its arguments bound."""

    @property
    def corrections(self) -> Corrections:
        """The bases and gates."""

    @property
    def kl(self) -> KlConfig:
        """The section `learner.kl`."""

    @property
    def entropy(self) -> float:
        """Coefficient of the entropy bonus."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Objective:
    """The objective of each token and the sums of the statistics.

    Attributes:
        per_token: shape (n,), with a gradient; to be added up, and divided by the normaliser of the update.
        sums: float64, shape (len(TOKEN_SUMS),), without a gradient, in the order of `TOKEN_SUMS`.
    """

    per_token: torch.Tensor
    sums: torch.Tensor = field(repr=False)


def objective(
    tokens: Tokens,
    terms: Terms,
    kl_coefficient: float,
    *,
    weights: torch.Tensor | None = None,
    limits: Sequence[float | None] | None = None,
    measure_all: bool = False,
) -> Objective:
    """Return `weight x (gates x loss + kl_coefficient x KL - entropy coefficient x entropy)` of each token.

    Gates act on the policy loss alone: the KL term and the entropy bonus are about the policy where it has been, not
    about how good the token was, and go on for tokens that a gate drops.

    Args:
        tokens: whole responses; with a reference for a KL in the loss, with an entropy for the bonus.
        terms: of the run.
        kl_coefficient: present value of the controller; used with `learner.kl.where` loss.
        weights: of the aggregation (`aggregation.token_weights`), shape (n,); None: 1.
        limits: of gates that see the whole step (`Corrections.step_limits`); None: these tokens decide.
        measure_all: statistics are over all responses, not only over those with an advantage.
    """
    correction = correct(tokens, terms.corrections, limits)
    loss = terms.loss(tokens)
    per_token = correction.factor * loss.per_token
    kl = None if tokens.reference is None else kl_term(tokens, terms.kl)
    if terms.kl.where == "loss":
        assert kl is not None
        per_token = per_token + kl_coefficient * kl
    if terms.entropy:
        assert tokens.entropy is not None
        per_token = per_token - terms.entropy * tokens.entropy
    if weights is not None:
        per_token = weights * per_token
    sums = token_sums(
        tokens,
        correction.log_ratio,
        loss=per_token,
        clipped=loss.clipped,
        cut=correction.cut,
        keep=correction.keep,
        kl_reference=kl,
        kl_whole=terms.kl.where == "loss",
        measure_all=measure_all,
    )
    return Objective(per_token=per_token, sums=sums)


def reaches_zero_advantage(terms: Terms) -> bool:
    """Whether a token with advantage 0 has a gradient all the same, so that its response may not be left out.

    The KL term and the entropy bonus give one; so do losses with a term of their own (kimi), which a trial shows.
    """
    if terms.kl.where == "loss" or terms.entropy:
        return True
    tokens = Tokens.trial(0.0, 0.0, 0.0)
    (gradient,) = torch.autograd.grad(terms.loss(tokens).per_token.sum(), tokens.logprobs)
    return bool(gradient.any())
