"""Tokens of made-up responses for the tests of losses."""

from __future__ import annotations

import torch

from streamrl.learner.algorithms.corrections import old_logprobs
from streamrl.learner.algorithms.losses import LossResult
from streamrl.learner.algorithms.tokens import Tokens


def make_tokens(
    theta,
    proximal,
    behaviour,
    advantages=None,
    *,
    base="decoupled",
    counts=None,
    ages=None,
    dtype=torch.float64,
    **more,
) -> Tokens:
    """Tokens under three policies: of one response, fresh, and with advantages of 1 where nothing else is said."""
    theta, proximal, behaviour = (torch.as_tensor(column, dtype=dtype) for column in (theta, proximal, behaviour))
    counts = torch.as_tensor([len(theta)] if counts is None else counts)
    ages = torch.zeros(len(theta), dtype=torch.int64) if ages is None else torch.as_tensor(ages)
    return Tokens(
        logprobs=theta,
        old=old_logprobs(base, proximal, behaviour, ages),
        proximal=proximal,
        behaviour=behaviour,
        advantages=torch.ones_like(theta) if advantages is None else torch.as_tensor(advantages, dtype=theta.dtype),
        sequence=torch.arange(len(counts)).repeat_interleave(counts),
        counts=counts,
        ages=ages,
        **{name: torch.as_tensor(value, dtype=dtype) for name, value in more.items()},
    )


def tokens_of(logprobs, old, advantages, *, counts=None, behaviour=None, dtype=torch.float64) -> Tokens:
    """Tokens around an old policy, one response each when `counts` is left out."""
    counts = [1] * len(logprobs) if counts is None else counts
    return make_tokens(logprobs, old, old if behaviour is None else behaviour, advantages, counts=counts, dtype=dtype)


def with_logprobs(tokens: Tokens, logprobs: torch.Tensor) -> Tokens:
    """The same tokens under another policy."""
    fields = {name: getattr(tokens, name) for name in Tokens.__slots__}
    return Tokens(**(fields | {"logprobs": logprobs}))


def differentiate(loss, tokens: Tokens) -> tuple[LossResult, torch.Tensor]:
    """The result of a loss, and the gradient of its sum to the trained log-probs."""
    logprobs = tokens.logprobs.clone().requires_grad_()
    result = loss(with_logprobs(tokens, logprobs))
    (gradient,) = torch.autograd.grad(result.per_token.sum(), logprobs)
    return result, gradient


def slope(loss, tokens: Tokens, step: float = 1e-6) -> torch.Tensor:
    """Central differences of the sum of `loss(logprobs)` in each log-probability."""
    slopes = []
    for place in range(len(tokens.logprobs)):
        shift = torch.zeros_like(tokens.logprobs)
        shift[place] = step
        up, down = (loss(with_logprobs(tokens, tokens.logprobs + sign * shift)) for sign in (1, -1))
        slopes.append((up.sum() - down.sum()) / (2 * step))
    return torch.stack(slopes)


def random_tokens(seed: int, responses: int = 40, *, spread: float = 0.3, alike: bool = True) -> Tokens:
    """Responses of one to nine tokens around an old policy; advantages of a response are alike, or of a token."""
    generator = torch.Generator().manual_seed(seed)
    counts = torch.randint(1, 10, (responses,), generator=generator)
    total = int(counts.sum())
    old, noise, other = torch.randn(3, total, generator=generator, dtype=torch.float64)
    old = old - 4
    advantages = torch.randn(responses, generator=generator, dtype=torch.float64).repeat_interleave(counts)
    if not alike:
        advantages = torch.randn(total, generator=generator, dtype=torch.float64)
    return tokens_of(old + spread * noise, old, advantages, counts=counts, behaviour=old + spread * other)
