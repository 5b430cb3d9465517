"""What vLLM 0.32 lacks on a CPU. Every process of a vLLM server loads this (`vllm.general_plugins`)."""

import multiprocessing
import time
from functools import partial
from typing import Any

import torch
from vllm.platforms import current_platform

_NAP_SECONDS = 2e-5


def prepare() -> None:
    """Ask Linux for the AMX tiles, wait for other processes asleep, and fork instead of spawn."""
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
        make = _custom_ops.create_onednn_scaled_mm

        def kept(weight: torch.Tensor, scales: torch.Tensor, *settings: Any) -> Any:
            # An int8 layer reads its scales at the address that they have here; a reload copies them elsewhere.
            handler = make(weight, scales, *settings)
            handler.scales = scales
            return handler

        _custom_ops.create_onednn_scaled_mm = kept
