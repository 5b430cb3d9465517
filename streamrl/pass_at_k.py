"""avg@k and pass@k: what several responses to each held-out prompt say."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import takewhile
from math import comb


def at_k(prompts: Iterable[tuple[int, int]], samples: int) -> dict[str, float]:
    """`avg_at_K` and `pass_at_K` of prompts `(scored responses, right ones)` that got `samples` responses each.

    avg@k is the mean over prompts of the share of right responses, k all of them. pass@k, for k a power of two and all
    of them, is the chance that one of k responses is right: the unbiased estimate of each prompt with at least k scored
    responses (Chen et al. 2021, arXiv:2107.03374, section 2.1), and their mean. Empty with one sample per prompt.
    """
    known = [(scored, right) for scored, right in prompts if scored]
    if samples < 2 or not known:
        return {}
    figures = {f"avg_at_{samples}": sum(right / scored for scored, right in known) / len(known)}
    powers = takewhile(lambda k: k < samples, (1 << n for n in range(1, samples)))
    for k in (*powers, samples):
        chances = [1 - comb(scored - right, k) / comb(scored, k) for scored, right in known if scored >= k]
        if chances:
            figures[f"pass_at_{k}"] = sum(chances) / len(chances)
    return figures


def in_words(figures: dict[str, float]) -> str:
    """`avg@8 0.512  pass@8 0.870`, of all responses; empty without figures."""
    samples = max((int(name.rpartition("_")[2]) for name in figures), default=0)
    shown = ((f"{what}@{samples}", figures.get(f"{what}_at_{samples}")) for what in ("avg", "pass"))
    return "  ".join(f"{name} {value:.3f}" for name, value in shown if value is not None)
