"""Every process of a vLLM server loads this (`vllm.general_plugins`), also where nothing else of ours is needed."""

import torch


def allow() -> None:
    """Ask Linux for the AMX tiles: it kills a process that uses them without asking, and vLLM 0.32 does not ask."""
    if torch.cpu._is_amx_tile_supported():  # noqa: SLF001  (there is no public one)
        torch.cpu._init_amx()  # noqa: SLF001
