"""Versions that are an adapter alone (LoRA, DoRA): their tensors, their sum with a base weight, their files.

The tensors have the names that the files of peft have: `base_model.model.MODULE.lora_A.weight` (rank, in),
`.lora_B.weight` (out, rank) and, with DoRA, `.lora_magnitude_vector` (out,). MODULE is a linear layer of the base model
with weight (out, in).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import orjson
import torch
from safetensors.torch import save_file

from streamrl.atomic import whole_directory
from streamrl.errors import CannotCreate, WeightsError
from streamrl.weight_sync.manifest import Adapter

PREFIX: Final = "base_model.model."
LORA_A: Final = ".lora_A.weight"
LORA_B: Final = ".lora_B.weight"
MAGNITUDE: Final = ".lora_magnitude_vector"


@dataclass(frozen=True, slots=True)
class Names:
    """Names of the tensors of one adapted module; `magnitude` with DoRA only."""

    lora_a: str
    lora_b: str
    magnitude: str | None = None


def names_of(module: str, *, dora: bool) -> Names:
    stem = PREFIX + module
    return Names(stem + LORA_A, stem + LORA_B, stem + MAGNITUDE if dora else None)


def adapted(adapter: Adapter, tensors: Mapping[str, torch.Tensor]) -> dict[str, Names]:
    """Modules that a version adapts, with the names of their tensors; WeightsError when these are not whole."""
    modules = sorted(
        name.removeprefix(PREFIX).removesuffix(LORA_A)
        for name in tensors
        if name.startswith(PREFIX) and name.endswith(LORA_A)
    )
    found = {module: names_of(module, dora=adapter.dora) for module in modules}
    expected = {
        name for names in found.values() for name in (names.lora_a, names.lora_b, names.magnitude) if name is not None
    }
    if not found or expected != set(tensors):
        odd = sorted(expected ^ set(tensors))
        raise WeightsError(
            f"this is no whole {adapter.kind} adapter: {', '.join(odd[:3]) or 'no tensors'}",
            "learner and engines must be of one version of streamrl",
        )
    return found


@torch.no_grad()
def merge(
    weight: torch.Tensor,
    lora_a: torch.Tensor,
    lora_b: torch.Tensor,
    *,
    scale: float,
    magnitude: torch.Tensor | None = None,
) -> torch.Tensor:
    """Rows of a weight with its adapter, float32: W + scale B A (Hu et al., arXiv 2106.09685, section 4.1).

    With a magnitude m each row is set to the length m (Liu et al., arXiv 2402.09353, equation 5). A rank merges its own
    rows: `weight` (rows, in), `lora_a` whole, (rank, in), `lora_b` (rows, rank), `magnitude` (rows,).
    """
    whole = weight.float() + (lora_b.float() @ lora_a.float()) * scale
    if magnitude is None:
        return whole
    length: torch.Tensor = torch.linalg.norm(whole, dim=1)
    return (magnitude.float() / length)[:, None] * whole


def peft_config(adapter: Adapter) -> dict[str, Any]:
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": adapter.base,
        "r": adapter.rank,
        "lora_alpha": adapter.alpha,
        "target_modules": adapter.targets,
        "use_dora": adapter.dora,
        "bias": "none",
        "lora_dropout": 0.0,
        "inference_mode": True,
    }


def write_adapter(folder: Path, adapter: Adapter, tensors: Mapping[str, torch.Tensor]) -> None:
    """Write the directory of an adapter as peft, vLLM and SGLang read it; it appears whole, replacing another."""
    try:
        with whole_directory(folder) as draft:
            values = {name: tensor.contiguous() for name, tensor in tensors.items()}
            save_file(values, draft / "adapter_model.safetensors", metadata={"format": "pt"})
            (draft / "adapter_config.json").write_bytes(orjson.dumps(peft_config(adapter), option=orjson.OPT_INDENT_2))
    except OSError as error:
        raise CannotCreate(f"the adapter cannot be written to {folder}: {error}", "make room there") from error
