"""Whole tensors out of shards: for the engines, and for a Hugging Face directory at the end of a run."""

from __future__ import annotations

import logging
import shutil
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TypeAlias

import torch
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from streamrl.errors import CannotCreate
from streamrl.weight_sync.adapter import write_adapter
from streamrl.weight_sync.manifest import Adapter

logger = logging.getLogger(__name__)

Rows: TypeAlias = Callable[[str, torch.Tensor], torch.Tensor]
"""Takes the name of a parameter and this rank's rows of it, and returns the rows that others are to see."""


@torch.no_grad()
def full_tensors(
    parameters: Mapping[str, DTensor], dtype: torch.dtype, rows: Rows | None = None
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield name and whole tensor of each parameter, one at a time, as a copy on the CPU.

    Collective: every rank must go through all of it, in the same order, because each item is a gather; a rank that has
    no use for a tensor drops it. The cast comes before the gather, so bfloat16 halves what travels. Peak extra memory
    is one tensor.

    Args:
        parameters: by name.
        dtype: of what is yielded.
        rows: makes other rows of this rank's own; None: they are taken as they are.
    """
    for name, parameter in parameters.items():
        shard = parameter.to_local().detach()
        if rows is not None:
            shard = rows(name, shard)
        if parameter.device_mesh.size() == 1:
            yield name, shard.to(device="cpu", dtype=dtype, copy=True)
            continue
        cast = DTensor.from_local(
            shard.to(parameter.device_mesh.device_type, dtype),  # it may lie on the host
            parameter.device_mesh,
            parameter.placements,
            run_check=False,
            shape=parameter.shape,
            stride=parameter.stride(),
        )
        whole = cast.full_tensor()
        yield name, whole.to("cpu", copy=whole.device.type == "cpu")


def write_model(
    folder: Path,
    model: PreTrainedModel,
    tensors: Mapping[str, torch.Tensor],
    *,
    tokenizer: str,
    dtype: torch.dtype,
    adapter: tuple[Adapter, Mapping[str, torch.Tensor]] | None = None,
) -> None:
    """Write a Hugging Face directory (safetensors, configuration, tokenizer) that plain transformers loads.

    The directory appears whole under its name; one that is there is replaced.

    Args:
        folder: where to write.
        model: gives class, configuration and buffers; its parameters may be sharded and are not read.
        tensors: whole parameters by Hugging Face name, tied ones once.
        tokenizer: directory or hub name; when there is none, the model is written without and a warning is logged.
        dtype: type of the weights in the files.
        adapter: is merged into `tensors`; it goes into the folder `adapter` as well, as peft reads it.

    Raises:
        CannotCreate: the disk is full or the folder cannot be written; what was there before is still there.
    """
    copy = AutoModelForCausalLM.from_config(model.config, dtype=dtype)
    copy.generation_config = model.generation_config
    buffers = {name: buffer.to("cpu") for name, buffer in model.named_buffers()}
    with torch.no_grad():
        for name, parameter in copy.named_parameters():
            parameter.copy_(tensors[name])
        for name, buffer in copy.named_buffers():
            buffer.copy_(buffers[name])
    draft = folder.with_name(folder.name + ".draft")
    try:
        shutil.rmtree(draft, ignore_errors=True)
        draft.mkdir(parents=True)
        copy.save_pretrained(draft)
        write_tokenizer(draft, tokenizer)
        if adapter is not None:
            write_adapter(draft / "adapter", *adapter)
        if folder.exists():
            shutil.rmtree(folder)
        draft.rename(folder)
    except OSError as error:
        raise CannotCreate(f"the model cannot be written to {folder}: {error}", "make room and export again") from error


def write_tokenizer(folder: Path, source: str) -> None:
    """Write the tokenizer of a model beside it; a warning where there is none."""
    try:
        tokenizer = AutoTokenizer.from_pretrained(source)
    except (OSError, ValueError, KeyError) as error:
        logger.warning("model exported without tokenizer", extra={"source": source, "error": str(error)})
        return
    tokenizer.save_pretrained(folder)
