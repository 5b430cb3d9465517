"""The distance to the reference policy: estimators per token, penalties in the reward, and the coefficient's control.

docs/reference/kl-and-critic.md has the estimators (Schulman, "Approximating KL divergence", 2020), whose expectations
are over the policy. With `unbiased` a term is multiplied by the importance weight policy / behaviour, so that the
expectation is right off-policy (DeepSeek-V3.2, arXiv 2512.02556, section 3.1); the weight then carries a gradient of
its own, which makes that of k1 and k3 the gradient of KL(policy || reference).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from streamrl.config.learner import KlConfig
from streamrl.learner.algorithms.tokens import LOG_RATIO_BOUND, Tokens

UNBIASED_CAP = 10.0  # greatest importance weight of the unbiased form; beyond it the weight is constant
_ERROR_CLIP = 0.2


def kl_estimate(estimator: str, logprobs: torch.Tensor, reference: torch.Tensor) -> torch.Tensor:
    """An estimate of KL(policy || reference) per token, shape (n,), with a gradient to the policy alone.

    The exponent of k3 is clamped to `LOG_RATIO_BOUND`: a token so much likelier under the reference gives k3 no
    gradient; with k3+ it gives one.
    """
    difference = logprobs - reference.detach()
    if estimator.endswith("+"):
        surrogate = 0.5 * difference * difference
        value = kl_estimate(estimator[:-1], logprobs.detach(), reference)
        return value + surrogate - surrogate.detach()
    if estimator == "k1":
        return difference
    if estimator == "abs":
        return difference.abs()
    if estimator == "k2":
        return 0.5 * difference * difference
    assert estimator == "k3", estimator
    bounded = (-difference).clamp(max=LOG_RATIO_BOUND)
    return bounded.expm1() - bounded


def kl_term(tokens: Tokens, config: KlConfig) -> torch.Tensor:
    """The KL term of the loss per token, before its coefficient, shape (n,), with a gradient."""
    assert tokens.reference is not None
    estimate = kl_estimate(config.estimator, tokens.logprobs, tokens.reference)
    if not config.unbiased:
        return estimate
    log_weight = tokens.logprobs - tokens.behaviour
    if config.estimator.endswith("+"):  # its gradient is right as it is
        log_weight = log_weight.detach()
    return log_weight.clamp(max=math.log(UNBIASED_CAP)).exp() * estimate


def penalties(
    logprobs: Sequence[npt.NDArray[np.float32]],
    reference: Sequence[npt.NDArray[np.float32]],
    estimator: str,
    coefficient: float,
) -> list[npt.NDArray[np.float64]]:
    """`coefficient x estimate` of each token, to be taken off its reward; `logprobs` is of the start of the step."""
    double = ([torch.from_numpy(array.astype(np.float64)) for array in arrays] for arrays in (logprobs, reference))
    return [coefficient * kl_estimate(estimator, mine, theirs).numpy() for mine, theirs in zip(*double, strict=True)]


def with_teacher(tokens: Tokens, coefficient: float) -> Tokens:
    """The tokens with `coefficient x (log reference - log policy)` added to the advantage of each.

    With importance weights the policy gradient of that is `-coefficient` times the gradient of KL(policy || reference)
    at each place where the policy has been: on-policy distillation (Lu et al., "On-Policy Distillation", Thinking
    Machines Lab, 2025, with its discount of 0; Agarwal et al., arXiv 2306.13649, section 3). The policy is the present
    one, so old tokens do not push on what has been learnt since. The difference is bounded to +-`LOG_RATIO_BOUND`.
    """
    assert tokens.reference is not None
    difference = (tokens.reference - tokens.logprobs.detach()).clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND)
    return replace(tokens, advantages=tokens.advantages + coefficient * difference)


class KlController:
    """The coefficient of the KL term; its state is saved in checkpoints.

    fixed: it stays what it is. adaptive (Ziegler et al., arXiv 1909.08593, section 2.2): after each step it is
    multiplied by `1 + clip(kl / target - 1, -0.2, 0.2) x responses / horizon`.
    """

    def __init__(self, config: KlConfig) -> None:
        self._config = config
        self.coefficient = config.coefficient

    def update(self, kl: float, responses: int) -> None:
        """Take note of a step: its mean KL per token, and its responses on all ranks."""
        if self._config.controller == "fixed" or not math.isfinite(kl):
            return
        error = min(max(kl / self._config.target - 1, -_ERROR_CLIP), _ERROR_CLIP)
        self.coefficient *= 1 + error * min(1.0, responses / self._config.horizon)  # stays positive

    def state(self) -> dict[str, float]:
        return {"kl_coefficient": self.coefficient}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Put back what `state` returned; with controller fixed the configuration counts, as for the learning rate."""
        if self._config.controller == "adaptive":
            self.coefficient = float(state.get("kl_coefficient", self.coefficient))
