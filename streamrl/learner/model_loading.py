"""From a directory to a sharded model."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from pathlib import Path
from typing import Final

import torch
from safetensors import SafetensorError
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from transformers import AutoModelForCausalLM, PreTrainedModel

from streamrl.config import ModelConfig, RunConfig
from streamrl.config.learner import LearnerConfig
from streamrl.errors import ConfigError
from streamrl.learner.batch import RowLimits
from streamrl.learner.model import Backbone, decoder_layers, set_up_layers, takes_flex
from streamrl.learner.ranks import Ranks
from streamrl.learner.rows import row_limits

logger = logging.getLogger(__name__)

SMALL: Final = 1 << 26
"""Models with fewer parameters are one FSDP unit and stay whole between forward and backward: memory is no concern,
while each unit costs a gather and a scatter."""


def load_model(config: ModelConfig, key: str = "model.path") -> PreTrainedModel:
    """Load the causal language model of a run in float32 on the CPU: the master weights.

    `key` of the run's configuration names the path, for messages. A model with a weight that is not finite is refused
    (ConfigError). Code that comes with a model is never executed.
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


def prepare(
    model: Backbone,
    config: RunConfig,
    learner: LearnerConfig,
    ranks: Ranks,
    *,
    small: int,
    exact: Iterable[nn.Module] = (),
) -> tuple[RowLimits, bool]:
    """Set a whole model up and shard it; returns the limits of rows before the model is tried, and that of `shard`.

    `learner` is the section as it counts for this model; `small` and `exact` are those of `shard`. A model of which
    nothing is trained is cast to `model.dtype`: no update needs more digits than its forward pass has.
    """
    model.flex = takes_flex(model.model, ranks.device, config.model.attention)
    limits = row_limits(config, model.model.config.get_text_config(), packed=model.flex)
    dtype = getattr(torch, config.model.dtype)
    set_up_layers(model.model, learner)
    if not any(parameter.requires_grad for parameter in model.parameters()):
        for parameter in model.parameters():
            parameter.data = parameter.data.to(dtype)
    return limits, shard(model, ranks.mesh, dtype, small=small, exact=exact, offload="parameters" in learner.offload)


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

    With `dtype` bfloat16 forward and backward run in it, while weights, gradients and their reduction stay float32; the
    modules of `exact`, which do not overlap, run in float32 whatever `dtype` is. A model with fewer parameters than
    `small` becomes one unit that stays whole between forward and backward (returns True). With `offload`, shards and
    gradients lie on the host, and each unit is on the device only while it computes; on a CPU nothing changes.
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
