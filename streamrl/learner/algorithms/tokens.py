"""What the torch side of an algorithm sees of a micro-batch, whole responses token by token, and statistics of it.

Statistics are sums over tokens, so that they add over micro-batches and ranks.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import ClassVar, Self

import torch

LOG_RATIO_BOUND = 20.0
"""Bound on a log ratio before `exp`: e^20 is 4.9e8, far outside any trust region and far inside of float32."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Tokens:
    """The sampled tokens of whole responses, one behind the other; n tokens, s responses.

    All have shape (n,) but `counts`. `logprobs`, `old`, `proximal`, `behaviour` and `reference` are log-probabilities
    (natural) of the sampled token. Only `logprobs` (and `entropy`, where the algorithm uses it) carry a gradient.
    """

    logprobs: torch.Tensor  # policy being trained (theta)
    old: torch.Tensor  # centre of the trust region, as `learner.correction.base` says
    proximal: torch.Tensor  # policy at the start of the step; `old` with base decoupled
    behaviour: torch.Tensor  # as the engine sampled it (mu)
    advantages: torch.Tensor
    sequence: torch.Tensor  # index of the response of each token, 0 to s - 1, non-decreasing, int64
    counts: torch.Tensor  # tokens of each response, shape (s,), int64
    ages: torch.Tensor  # staleness in steps, at least 0
    reference: torch.Tensor | None = None  # reference policy; None without one
    entropy: torch.Tensor | None = None  # of the distribution a token was drawn from, in nats; None: not asked for

    @classmethod
    def trial(cls, *advantages: float) -> Tokens:
        """Three tokens of two responses, off-policy and a step old, to try out a function when the run starts."""
        other = torch.tensor([-1.0, -0.7, -2.0])
        return cls(
            logprobs=torch.tensor([-0.5, -1.0, -3.0], requires_grad=True),
            old=other,
            proximal=other,
            behaviour=other,
            advantages=torch.tensor(advantages),
            sequence=torch.tensor([0, 0, 1]),
            counts=torch.tensor([2, 1]),
            ages=torch.ones(3, dtype=torch.int64),
            entropy=torch.ones(3),
        )

    def sum_per_response(self, values: torch.Tensor) -> torch.Tensor:
        """Sum of a value over the tokens of each response, shape (s,); differentiable."""
        zeros = torch.zeros(self.counts.shape[0], dtype=values.dtype, device=values.device)
        return zeros.index_add(0, self.sequence, values)

    def mean_per_response(self, values: torch.Tensor) -> torch.Tensor:
        """Mean of a value over the tokens of each response, shape (s,); differentiable. 0 for a response of none."""
        return self.sum_per_response(values) / self.counts.clamp(min=1)

    def spread(self, values: torch.Tensor) -> torch.Tensor:
        """Give every token the value of its response: shape (s,) to (n,)."""
        return values.index_select(0, self.sequence)

    def covariances(self) -> tuple[torch.Tensor, torch.Tensor]:
        """`(A - mean A) (log theta - mean log theta)` over the tokens with an advantage, and which these are, (n,).

        How much a token changes the entropy of the policy (arXiv 2505.22617, section 4.1); without a gradient.
        """
        live = self.advantages != 0
        count, logprobs = live.sum().clamp(min=1), self.logprobs.detach() * live
        covariance = (self.advantages - self.advantages.sum() / count) * (logprobs - logprobs.sum() / count)
        return covariance * live, live


AGE_BUCKETS = ("0", "1", "2_3", "4_7", "8_15", "16")  # staleness in steps; the last one has no end
_AGE_STARTS = (1, 2, 4, 8, 16)  # of each bucket but the first
_RESPONSE_BOUND = 300.0
"""Bound on the log ratio of a response: its square is still a finite float64 after `exp`, summed over any step."""


@dataclass(kw_only=True, slots=True)
class Sums:
    """Numbers summed over tokens, which travel as a tensor and add up over micro-batches and ranks."""

    tokens: float = 0.0  # number of tokens
    loss: float = 0.0  # sum of what is differentiated
    _WIDTH: ClassVar[str] = "tokens"  # number of tokens that a field is summed over, unless `_WIDTHS` names another
    _WIDTHS: ClassVar[Mapping[str, str]] = {}

    @classmethod
    def names(cls) -> tuple[str, ...]:
        """Names of the fields, in their order in a tensor."""
        return tuple(item.name for item in fields(cls))

    @classmethod
    def from_tensor(cls, sums: torch.Tensor) -> Self:
        return cls(**dict(zip(cls.names(), sums.tolist(), strict=True)))

    def mean(self, name: str) -> float:
        """Mean of a field per token; 0 without tokens."""
        value, count = getattr(self, name), self.count(name)
        return float(value / count) if count else 0.0

    def count(self, name: str) -> float:
        """Number of tokens that a field is summed over."""
        return float(getattr(self, self._WIDTHS.get(name, self._WIDTH)))


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Objective:
    """What is differentiated, and the sums of its statistics in the order of `Sums.names()`."""

    per_token: torch.Tensor  # shape (n,), with a gradient; to be added up
    sums: torch.Tensor  # float64, without a gradient


@dataclass(kw_only=True, slots=True)
class TokenSums(Sums):
    """Sums over the tokens of an update, from which all statistics of a loss follow.

    They do not depend on whether responses without an advantage were computed. What needs log-probabilities is summed
    over the measured tokens: those of responses with an advantage, or of all where the learning rate follows the
    effective sample size of the whole update (`Recipe.measures_all`).

    w is the importance weight before any bound: the policy at the start of the step (with base bypass: the present
    one) over the one that sampled. `tokens`, `loss` and `age` are over all tokens, measured or not.
    """

    measured: float = 0.0  # number of measured tokens
    responses: float = 0.0  # number of measured responses
    weight: float = 0.0  # w
    weight_squared: float = 0.0
    response_weight: float = 0.0  # over responses, the product of their w
    response_weight_squared: float = 0.0
    squared_log_ratio: float = 0.0  # (log w)^2
    engine_gap: float = 0.0  # |log w| of the measured tokens of staleness 0: engine and learner had the same weights
    clipped: float = 0.0  # tokens on which the trust region of the loss acted
    capped: float = 0.0  # tokens whose weight a gate cut
    masked: float = 0.0  # tokens that a gate dropped
    age: float = 0.0  # staleness in steps
    kl_k1: float = 0.0  # -log w, the plain estimator of KL(behaviour || policy)
    kl_k3: float = 0.0  # w - 1 - log w, the low-variance estimator of the same; never negative
    kl_reference: float = 0.0  # estimate of the KL to the reference policy, before its coefficient; 0 without one
    kl_tokens: float = 0.0  # number of tokens of `kl_reference`: all with a KL in the loss, else the measured
    entropy: float = 0.0  # in nats; where it was not computed -log p, which estimates it
    # Measured tokens by staleness (`AGE_BUCKETS`), and those of them that a gate dropped.
    tokens_0: float = 0.0
    tokens_1: float = 0.0
    tokens_2_3: float = 0.0
    tokens_4_7: float = 0.0
    tokens_8_15: float = 0.0
    tokens_16: float = 0.0
    masked_0: float = 0.0
    masked_1: float = 0.0
    masked_2_3: float = 0.0
    masked_4_7: float = 0.0
    masked_8_15: float = 0.0
    masked_16: float = 0.0
    _WIDTH: ClassVar[str] = "measured"
    _WIDTHS: ClassVar[Mapping[str, str]] = {
        "loss": "tokens",
        "age": "tokens",
        "engine_gap": "tokens_0",
        "kl_reference": "kl_tokens",
    }

    def __add__(self, other: TokenSums) -> TokenSums:
        return TokenSums(**{name: getattr(self, name) + getattr(other, name) for name in TOKEN_SUMS})

    @property
    def ess(self) -> float:
        """Normalised effective sample size of tokens, (sum w)^2 / (n sum w^2), in (0, 1]; 1 without tokens."""
        return _ess(self.measured, self.weight, self.weight_squared)

    @property
    def response_ess(self) -> float:
        """Normalised effective sample size of responses, whose weight is the product of those of their tokens."""
        return _ess(self.responses, self.response_weight, self.response_weight_squared)

    @property
    def masked_by_age(self) -> dict[str, float]:
        """Share of the measured tokens that a gate dropped, by bucket of staleness; only buckets with tokens."""
        return {
            bucket.replace("_", "-"): getattr(self, f"masked_{bucket}") / count
            for bucket in AGE_BUCKETS
            if (count := getattr(self, f"tokens_{bucket}"))
        }


TOKEN_SUMS = TokenSums.names()


def _ess(count: float, total: float, squares: float) -> float:
    return total**2 / (count * squares) if count and squares else 1.0


def token_sums(
    tokens: Tokens,
    log_ratio: torch.Tensor,
    *,
    loss: torch.Tensor,
    clipped: torch.Tensor,
    cut: torch.Tensor,
    keep: torch.Tensor,
    kl_reference: torch.Tensor | None,
    kl_whole: bool,
    measure_all: bool,
) -> torch.Tensor:
    """Return the sums in the order of `TOKEN_SUMS`, float64, without a gradient; nothing waits for the device.

    `kl_whole`: the KL is summed over all tokens. `measure_all`: also those of responses without an advantage count.
    """
    wide = log_ratio.detach().double()
    bounded = wide.clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND)
    weight = bounded.exp()
    ones, none = torch.ones_like(wide), torch.zeros_like(wide)
    measured, responses = ones, torch.ones_like(tokens.counts, dtype=wide.dtype)
    if not measure_all:
        responses = (tokens.sum_per_response((tokens.advantages != 0).double()) > 0).double()
        measured = tokens.spread(responses)
    of_kl = none if kl_reference is None else ones if kl_whole else measured
    masked = (~keep).double()
    ages = tokens.ages.to(wide.device)
    # A table of the starts would have to be copied to the device, and the host would wait for that.
    bucket = torch.stack([ages >= start for start in _AGE_STARTS]).sum(dim=0)
    by_age = wide.new_zeros(2, len(AGE_BUCKETS)).index_add(1, bucket, torch.stack([measured, measured * masked]))
    entropy = -tokens.logprobs if tokens.entropy is None else tokens.entropy
    response = tokens.sum_per_response(wide).clamp(-_RESPONSE_BOUND, _RESPONSE_BOUND).exp() * responses
    columns = {
        "tokens": ones,
        "measured": measured,
        "loss": loss.detach().double(),
        "weight": measured * weight,
        "weight_squared": measured * weight * weight,
        "squared_log_ratio": measured * wide * wide,
        "engine_gap": measured * (ages == 0) * wide.abs(),
        "clipped": measured * clipped,
        "capped": measured * cut,
        "masked": measured * masked,
        "age": ages.double(),
        "kl_k1": measured * -wide,
        "kl_k3": measured * (weight - 1 - bounded),
        "kl_reference": none if kl_reference is None else of_kl * kl_reference.detach().double(),
        "kl_tokens": of_kl,
        "entropy": measured * entropy.detach().double(),
    }
    found = dict(zip(columns, torch.stack(tuple(columns.values())).sum(dim=1).unbind(), strict=True))
    found |= {
        "responses": responses.sum(),
        "response_weight": response.sum(),
        "response_weight_squared": (response * response).sum(),
    }
    head = [found[name] for name in TOKEN_SUMS[: len(found)]]
    return torch.cat([torch.stack(head), by_age.flatten()])


def skipped_sums(tokens: int, age: int) -> torch.Tensor:
    """The sums of responses that were not computed, on the CPU; `age` is summed over their tokens."""
    return torch.tensor([{"tokens": tokens, "age": age}.get(name, 0) for name in TOKEN_SUMS], dtype=torch.float64)
