"""Which way float32 matrices are multiplied on this machine, by a trial at the start.

On CPUs `medium` hands float32 products to oneDNN. Where MKL takes a slow path (AMD) that is up to twice as fast, and
as exact; on CPUs with AMX it computes in bfloat16. With attention `sdpa` the many small products of the CPU's flash
kernel go to oneDNN too and cost more than the large ones gain, so the trial has attention in it.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

import torch
from torch.nn import functional
from transformers import PreTrainedModel

from streamrl.config import RunConfig
from streamrl.learner.ranks import Ranks

logger = logging.getLogger(__name__)
_PRECISIONS = ("highest", "high", "medium")
_ROUNDS = 5
_ROWS, _SEQUENCES, _HIDDEN = 512, 8, 256
"""Sizes of the trial; wider models are tried at this width, in half a second."""
_GAIN = 0.9
"""`medium` must take less than this share of the time: a difference within the noise is none."""
_LOSS = 8.0
"""Times by which the largest error may grow: another order of summation, not another type."""


def agreed_precision(config: RunConfig, ranks: Ranks, model: PreTrainedModel) -> str:
    """The value of `torch.set_float32_matmul_precision` for all ranks: that of rank 0's trial. Collective."""
    text = model.config.get_text_config()
    heads = getattr(text, "num_attention_heads", 1)
    chosen = choose_precision(config, ranks.device, hidden=text.hidden_size, heads=heads) if ranks.rank == 0 else ""
    return _PRECISIONS[ranks.broadcast_ints([_PRECISIONS.index(chosen)] if chosen else [])[0]]


def choose_precision(config: RunConfig, device: torch.device, *, hidden: int, heads: int) -> str:
    """The value of `torch.set_float32_matmul_precision` for this run, as configured or by a trial (`auto`).

    The trial never lowers the precision: `medium` is taken only where it is as exact as `highest`. It is logged.

    Args:
        config: `learner.matmul_precision`, `model.attention` and `model.dtype`.
        device: that computes.
        hidden: hidden size of the model.
        heads: attention heads of the model.
    """
    asked = config.learner.matmul_precision
    if asked != "auto":
        if asked == "medium" and device.type == "cpu" and config.model.attention == "sdpa":
            logger.warning("matmul precision medium slows attention sdpa down on CPUs: set model.attention to eager")
        return asked
    if device.type != "cpu" or config.model.dtype != "float32":
        logger.info("matmul precision", extra={"precision": "highest", "why": "nothing to gain but on float32 CPUs"})
        return "highest"
    if torch.cpu._is_amx_tile_supported():  # noqa: SLF001  (there is no public question)
        logger.info("matmul precision", extra={"precision": "highest", "why": "AMX would compute in bfloat16"})
        return "highest"
    return _trial(hidden, heads, sdpa=config.model.attention == "sdpa")


def _trial(hidden: int, heads: int, *, sdpa: bool) -> str:
    hidden = min(hidden, _HIDDEN)
    before = torch.get_float32_matmul_precision()
    generator = torch.Generator().manual_seed(0)
    left, right = (torch.randn(size, generator=generator) for size in ((_ROWS, hidden), (hidden, 4 * hidden)))
    shape = (_SEQUENCES, heads, _ROWS // _SEQUENCES, max(1, hidden // heads))
    query = torch.randn(shape, generator=generator, requires_grad=True)

    def work() -> None:
        torch.mm(left, right)
        if sdpa:
            mixed = functional.scaled_dot_product_attention(query, query, query, is_causal=True)
            torch.autograd.grad(mixed.sum(), query)

    exact = left.double() @ right.double()
    seconds: dict[str, float] = {}
    errors: dict[str, float] = {}
    try:
        for precision in ("highest", "medium"):
            torch.set_float32_matmul_precision(precision)
            errors[precision] = float((torch.mm(left, right).double() - exact).abs().max())
            seconds[precision] = fastest(work)
    finally:
        torch.set_float32_matmul_precision(before)
    chosen = verdict(seconds, errors)
    milliseconds = {name: round(1e3 * value, 3) for name, value in seconds.items()}
    logger.info("matmul precision", extra={"precision": chosen, "milliseconds": milliseconds, "errors": errors})
    return chosen


def verdict(seconds: dict[str, float], errors: dict[str, float]) -> str:
    """`medium` when it was clearly faster and as exact, else `highest`; both by name of the precision."""
    faster = seconds["medium"] < _GAIN * seconds["highest"]
    exact = errors["medium"] <= _LOSS * errors["highest"]
    return "medium" if faster and exact else "highest"


def fastest(work: Callable[[], None]) -> float:
    """Seconds of the fastest of some rounds, after one that prepares kernels."""
    work()
    times = []
    for _ in range(_ROUNDS):
        started = time.perf_counter()
        work()
        times.append(time.perf_counter() - started)
    return min(times)
