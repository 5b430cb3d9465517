"""What vLLM 0.32 lacks on a CPU, and for images. Every process of a vLLM server loads this (`vllm.general_plugins`)."""

import multiprocessing
import time
from functools import cache, partial
from typing import Any

import torch
from vllm.platforms import current_platform

from .images import prefer_pillow

_NAP_SECONDS = 2e-5


def prepare() -> None:
    """Ask Linux for the AMX tiles, wait for other processes asleep, and fork instead of spawn."""
    prefer_pillow()
    if torch.cpu._is_amx_tile_supported():  # noqa: SLF001  (there is no public one)
        torch.cpu._init_amx()  # noqa: SLF001  (Linux kills a process that uses them without asking)
    if current_platform.is_cpu():
        from vllm import _custom_ops
        from vllm.distributed.device_communicators import shm_broadcast
        from vllm.v1.engine import utils
        from vllm.v1.executor import multiproc_executor

        # The loop keeps a core busy. Where all cores are, the thread that sends tokens waits seconds for Python's lock,
        # and a response comes in one piece.
        shm_broadcast.sched_yield = lambda: time.sleep(_NAP_SECONDS)
        # A forked process does not import everything again, which takes it ten seconds of a core.
        utils.get_mp_context = multiproc_executor.get_mp_context = partial(multiprocessing.get_context, "fork")
        _custom_ops.create_onednn_scaled_mm = _int8_layer(_custom_ops.create_onednn_scaled_mm, _custom_ops)


def _int8_layer(make: Any, ops: Any) -> Any:
    """Mend what makes int8 layers wrong: scales that move, and sums that do not fit where a CPU has no VNNI."""

    @cache
    def saturates() -> bool:
        most, scales = torch.full((64, 64), 127, dtype=torch.int8), torch.ones(64, 1, dtype=torch.float32)
        found = torch.empty(64, 64, dtype=torch.float32)
        ops.onednn_scaled_mm(make(most.t(), scales, found.dtype, True, False), most, found, scales, None, None, None)
        return bool((found < 64 * 127 * 127).any())

    def layer(weight: torch.Tensor, scales: torch.Tensor, *settings: Any) -> Any:
        if saturates():  # two products of 8 bits are added in 16: then a weight may have 7
            weight, scales = (weight.float() / 2).round().to(torch.int8), scales * 2
        made = make(weight, scales, *settings)
        made.scales = scales  # it reads them at their address, and a reload copies the layer's to another
        return made

    return layer
