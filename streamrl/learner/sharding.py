"""From a directory to a model whose parameters are spread over the ranks (FSDP2)."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import torch
from safetensors import SafetensorError
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from transformers import AutoModelForCausalLM, PreTrainedModel

from streamrl.config import ModelConfig
from streamrl.errors import ConfigError
from streamrl.learner.model import Backbone, decoder_layers

SMALL = 1 << 26
"""Models with fewer parameters are one FSDP unit and stay whole between forward and backward: memory is no concern,
while each unit costs a gather and a scatter."""


def load_model(config: ModelConfig, key: str = "model.path") -> PreTrainedModel:
    """Load the causal language model of a run in float32 on the CPU: the master weights.

    Args:
        config: path and attention implementation.
        key: of the run's configuration that names the path, for messages.

    Raises:
        ConfigError: the directory is missing or holds no causal language model, a file of it is cut off, or a weight is
            not finite. Code that comes with a model is never executed.
    """
    try:
        model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(
            config.path, dtype=torch.float32, attn_implementation=config.attention
        )
    except (OSError, ValueError, KeyError, SafetensorError) as error:
        hint = f"set {key} to a directory of a Hugging Face causal language model"
        where = "exists" if Path(config.path).exists() else "does not exist"
        raise ConfigError(f"{key} {config.path} ({where}) cannot be loaded: {error}", hint) from error
    broken = [name for name, weight in model.named_parameters() if not bool(torch.isfinite(weight).all())]
    if broken:
        raise ConfigError(
            f"{key} {config.path}: {', '.join(broken[:3])} has values that are not finite",
            "take another checkpoint of this model: nothing can be sampled or learned from this one",
        )
    return model


def shard(
    model: Backbone,
    mesh: DeviceMesh,
    dtype: torch.dtype,
    *,
    small: int = SMALL,
    exact: Iterable[nn.Module] = (),
    offload: bool = False,
) -> bool:
    """Shard every parameter on dimension 0 over the mesh, in place (FSDP2).

    With `dtype` bfloat16 forward and backward run in it, while weights, gradients and their reduction stay float32.

    Args:
        model: on the CPU or on the device of the mesh; its parameters move there.
        mesh: one dimension, all ranks.
        dtype: type of forward and backward.
        small: models with fewer parameters than this become one unit.
        exact: modules of the model that run in float32 whatever `dtype` is; they do not overlap.
        offload: shards and gradients lie on the host, and each unit is on the device only while it computes. On a CPU
            there is no other memory to go to, and nothing changes.

    Returns:
        True when the model became one unit that stays whole between forward and backward.
    """
    policy = MixedPrecisionPolicy(param_dtype=None if dtype == torch.float32 else dtype, reduce_dtype=torch.float32)
    offload = offload and mesh.device_type != "cpu"
    place = CPUOffloadPolicy() if offload else OffloadPolicy()
    whole = not offload and sum(parameter.numel() for parameter in model.parameters()) < small
    if not whole:
        for layer in reversed(decoder_layers(model.model)):
            fully_shard(layer, mesh=mesh, mp_policy=policy, offload_policy=place, reshard_after_forward=True)
    if dtype != torch.float32:
        float32 = MixedPrecisionPolicy(param_dtype=torch.float32, reduce_dtype=torch.float32)
        for module in exact:
            fully_shard(module, mesh=mesh, mp_policy=float32, offload_policy=place, reshard_after_forward=False)
    fully_shard(model, mesh=mesh, mp_policy=policy, offload_policy=place, reshard_after_forward=False)
    assert isinstance(model, FSDPModule)
    return whole
