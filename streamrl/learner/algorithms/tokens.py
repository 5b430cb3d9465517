"""What the torch side of an algorithm sees of a micro-batch: whole responses, token by token."""

from __future__ import annotations

from dataclasses import dataclass

import torch

LOG_RATIO_BOUND = 20.0
"""Bound on a log ratio before `exp`: e^20 is 4.9e8, far outside any trust region and far inside of float32."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Tokens:
    """The sampled tokens of whole responses, one behind the other; n tokens, s responses.

    All log-probabilities are natural logarithms of the probability of the sampled token. Only `logprobs` (and `entropy`
    and `values`, where the algorithm uses them) carry a gradient.

    Attributes:
        logprobs: policy being trained (theta), shape (n,).
        old: old policy, the centre of the trust region, as `learner.correction.base` says, shape (n,), no gradient.
        proximal: policy at the start of the step, shape (n,), no gradient. Equal to `old` with base decoupled.
        behaviour: as the engine sampled it (mu), shape (n,).
        advantages: shape (n,).
        sequence: index of the response of each token, 0 to s - 1, non-decreasing, shape (n,), int64.
        counts: tokens of each response, shape (s,), int64.
        ages: staleness of each token in steps, at least 0, shape (n,).
        reference: reference policy, shape (n,); None without one.
        entropy: of the distribution each token was drawn from, in nats, shape (n,); None when not asked for.
    """

    logprobs: torch.Tensor
    old: torch.Tensor
    proximal: torch.Tensor
    behaviour: torch.Tensor
    advantages: torch.Tensor
    sequence: torch.Tensor
    counts: torch.Tensor
    ages: torch.Tensor
    reference: torch.Tensor | None = None
    entropy: torch.Tensor | None = None

    @classmethod
    def trial(cls, *advantages: float) -> Tokens:
        """Three tokens of two responses, off-policy and a step old, to try out a function when the run starts.

        Args:
            advantages: of the three tokens.
        """
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
