"""Drawing tokens: the distribution of a request, and random numbers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from streamrl.engine import Request


def sample(
    logits: torch.Tensor,
    temperature: torch.Tensor | None,
    generator: torch.Generator,
    *,
    cut: Mapping[int, Request] | None = None,
    own: Mapping[int, torch.Generator] | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """One token per row by inverting the cumulative distribution in fp64: one of probability 0 is never drawn.

    Returns tokens and log-probabilities (of temperature 1 where it is 0); NaN logits give a NaN log-probability.
    """
    scores = logits.float()
    if temperature is not None:
        scores = scores / torch.where(temperature == 0, 1.0, temperature)[:, None]
    logprobs = torch.log_softmax(scores, dim=-1)
    if cut:
        rows = torch.tensor(list(cut), device=logits.device)
        logprobs[rows] = truncated(logprobs[rows], list(cut.values()))
    cumulative = logprobs.double().exp_().cumsum_(dim=-1)
    uniform = torch.rand(len(logits), 1, dtype=torch.float64, device=logits.device, generator=generator)
    for row, single in (own or {}).items():
        uniform[row] = torch.rand(1, dtype=torch.float64, device=logits.device, generator=single)
    whole = cumulative[:, -1:]
    # rounding may put the product on the last sum itself, behind all that is possible
    places = torch.minimum(uniform.mul_(whole), torch.nextafter(whole, torch.zeros_like(whole)))
    tokens = torch.searchsorted(cumulative, places, right=True).clamp_(max=logits.shape[-1] - 1)
    if temperature is not None:
        tokens = torch.where(temperature[:, None] == 0, scores.argmax(dim=-1, keepdim=True), tokens)
    return tokens[:, 0], logprobs.gather(1, tokens)[:, 0]


def truncated(logprobs: torch.Tensor, requests: Sequence[Request]) -> torch.Tensor:
    """Log-probabilities (rows, vocabulary) of what `min_p`, `top_k` and then `top_p` leave of each row, which sum to 1.

    Equally probable tokens go by id. `top_p` keeps the fewest, at least one, that reach its share of what is left.
    """

    def column(values: Sequence[float]) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.float64, device=logprobs.device)[:, None]

    ordered, order = logprobs.double().exp_().sort(dim=-1, descending=True, stable=True)
    ranks = torch.arange(logprobs.shape[-1], device=logprobs.device)
    most = column([request.top_k or logprobs.shape[-1] for request in requests])
    kept = (ranks < most) & (ordered >= column([request.min_p for request in requests]) * ordered[:, :1])
    share = column([request.top_p for request in requests])
    sums = torch.where(kept, ordered, 0.0).cumsum_(dim=-1)
    before = torch.nn.functional.pad(sums[:, :-1], (1, 0))
    kept &= (before < share * sums[:, -1:]) | (share >= 1)
    kept = torch.zeros_like(kept).scatter_(1, order, kept)
    return torch.log_softmax(logprobs.masked_fill(~kept, -torch.inf), dim=-1)
