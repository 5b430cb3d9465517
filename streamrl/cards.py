"""The device that a process computes on, and whether the run fits on it."""

from __future__ import annotations

import torch

from streamrl.errors import CannotCreate, ConfigError


def choose_device(name: str, dtype: str, *, section: str, local_rank: int = 0) -> torch.device:
    """The device `name` of a section of the run file; `auto` is CUDA where there is one, else the CPU.

    A process that sees one card has that one, if it is the first of its host; else `cuda` is the card of the local
    rank. `ConfigError`: there is no such device, or it does not compute in `dtype`.
    """
    key, count = f"{section}.device", torch.cuda.device_count()
    try:
        device = torch.device("cuda" if count else "cpu") if name == "auto" else torch.device(name)
    except RuntimeError as error:
        raise ConfigError(f"{key} {name!r} is no device", "use auto, cpu or cuda") from error
    if device.type != "cuda":
        return device
    if count == 1 and not local_rank:
        device = torch.device("cuda", 0)
    elif ":" not in str(device):
        device = torch.device("cuda", local_rank)
    if device.index >= count:
        raise ConfigError(
            f"{key} is {name}, which is {device} here, and this process sees {count} CUDA devices",
            "use auto or cpu, or fewer ranks; in a container, start it with the GPUs (--gpus all)",
        )
    if dtype == "bfloat16" and torch.cuda.get_device_capability(device) < (8, 0):
        raise ConfigError(
            f"{torch.cuda.get_device_name(device)} does not compute in bfloat16",
            "set model.dtype, engine.dtype and weights.dtype to float32, or take a newer card (Ampere or later)",
        )
    return device


def check_room(device: torch.device, need: int, what: str) -> None:
    """Raise CannotCreate if a card has not `need` bytes free: it is too small, or another process fills it."""
    if device.type != "cuda":
        return
    free, total = torch.cuda.mem_get_info(device)
    free += torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    if free < need:
        small = "take more ranks, learner.offload, learner.lora or a smaller model"
        raise CannotCreate(
            f"{what} needs {need >> 20} MiB on {device}, which has {free >> 20} MiB free of {total >> 20} MiB",
            small if need > total else f"another process fills it (`nvidia-smi`): end that, or {small}",
        )
