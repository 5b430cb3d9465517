"""Replaces SGLang's kernels on a CPU without AMX, where SGLang imports but does not call them.

Every layer falls back to plain torch; calling a kernel all the same raises an error that names it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

__version__ = "0.4.10"


def __getattr__(name: str) -> Callable[..., Any]:
    if name.startswith("__"):
        raise AttributeError(name)

    def missing(*_args: Any, **_named: Any) -> None:
        raise NotImplementedError(f"sgl_kernel.{name} needs SGLang's own kernels, which this environment lacks")

    return missing


def _without_pinning(make: Callable[..., Any]) -> Callable[..., Any]:
    """Code for LoRA adapters asks for pinned memory; a torch without an accelerator refuses instead of ignoring it."""

    @functools.wraps(make)
    def call(*args: Any, **named: Any) -> Any:
        named.pop("pin_memory", None)
        return make(*args, **named)

    return call


# What reads Qwen's images imports a module of another model, which looks for these.
for _name in ("sigmoid_mul", "qk_gemma_rmsnorm", "qk_gemma_rmsnorm_with_gate", "qkvzba_split_reshape_cat_contiguous"):
    setattr(torch.ops.sgl_kernel, f"fused_{_name}_cpu", __getattr__(f"fused_{_name}_cpu"))
for _name in ("arange", "empty", "full", "ones", "tensor", "zeros", "empty_like", "zeros_like"):
    setattr(torch, _name, _without_pinning(getattr(torch, _name)))
setattr(torch.Tensor, "pin_memory", lambda self, *_args, **_named: self)  # noqa: B010 - mypy forbids the assignment
