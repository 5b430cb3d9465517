"""From a directory to a sharded model, of which each rank reads its own rows."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any, Final, TypeAlias

import torch
from safetensors import SafetensorError
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from transformers import PreTrainedModel
from transformers.core_model_loading import Concatenate, MergeModulelist, WeightTransform

from streamrl.cards import check_room
from streamrl.config import ModelConfig, RunConfig
from streamrl.config.learner import LearnerConfig
from streamrl.errors import CannotCreate, ConfigError
from streamrl.images.vision import Vision, auto_class
from streamrl.learner.batch import RowLimits
from streamrl.learner.model import Backbone, decoder_layers, set_up_layers, takes_flex
from streamrl.learner.ranks import Ranks, rows_of
from streamrl.learner.rows import row_limits

logger = logging.getLogger(__name__)

OwnRows: TypeAlias = dict[nn.Parameter, torch.Tensor]
"""This rank's rows of parameters that are on `meta` themselves, float32 in the host's memory."""
SMALL: Final = 1 << 26
"""Models with fewer parameters are one FSDP unit and stay whole between forward and backward: memory is no concern,
while each unit costs a gather and a scatter."""


def load_model(config: ModelConfig, key: str = "model.path") -> PreTrainedModel:
    """Load a model whole, in float32 on the CPU; one with a weight that is not finite is refused (`key` names it)."""
    model = _read(config, key)
    broken = [name for name, weight in model.named_parameters() if not bool(torch.isfinite(weight).all())]
    if broken:
        raise _not_finite(config, key, broken)
    return model


def load_rows(config: ModelConfig, ranks: Ranks, key: str = "model.path") -> tuple[PreTrainedModel, OwnRows]:
    """As `load_model`, but the model is on `meta`, and this rank reads its own rows alone. Collective."""
    model = _read(config, key, ranks.host_mesh if ranks.world > 1 else None)
    # Where transformers puts rows together from several tensors of the files, the model is read whole and cut then.
    if ranks.world > 1 and not all(map(_keeps_rows, getattr(model, "_weight_conversions", ()))):
        model = _read(config, key)
    rows: OwnRows = {}
    broken = []

    def keep(name: str, weight: nn.Parameter) -> nn.Parameter:
        whole = weight.detach()
        own = whole.to_local() if isinstance(whole, DTensor) else whole[rows_of(len(whole), ranks.rank, ranks.world)]
        if not bool(torch.isfinite(own).all()):
            broken.append(name)
        empty = nn.Parameter(torch.empty(weight.shape, dtype=weight.dtype, device="meta"))
        rows[empty] = own
        return empty

    _replace(model, keep)
    if ranks.all_max(len(broken)) != [0]:
        raise _not_finite(config, key, broken or ["a weight in the rows of another rank"])
    return model, rows


def _read(config: ModelConfig, key: str, mesh: DeviceMesh | None = None) -> PreTrainedModel:
    try:
        with _cut_before_reading(mesh) if mesh is not None else nullcontext():
            model: PreTrainedModel = auto_class(config).from_pretrained(
                config.path, dtype=torch.float32, attn_implementation=config.attention
            )
    except (OSError, ValueError, KeyError, SafetensorError) as error:
        hint = f"set {key} to a directory of a Hugging Face causal language model"
        where = "exists" if Path(config.path).exists() else "does not exist"
        raise ConfigError(f"{key} {config.path} ({where}) cannot be loaded: {error}", hint) from error
    return model


def _not_finite(config: ModelConfig, key: str, names: list[str]) -> ConfigError:
    return ConfigError(
        f"{key} {config.path}: {', '.join(names[:3])} has values that are not finite",
        "take another checkpoint of this model: nothing can be sampled or learned from this one",
    )


@contextmanager
def _cut_before_reading(mesh: DeviceMesh) -> Iterator[None]:
    """Within the block transformers, which reads only the local rows of a DTensor, makes models of DTensors."""
    read = PreTrainedModel._load_pretrained_model  # noqa: SLF001

    def cut(model: PreTrainedModel, *arguments: Any, **options: Any) -> Any:
        _replace(model, lambda _, weight: nn.Parameter(distribute_tensor(weight, mesh, [Shard(0)], src_data_rank=None)))
        return read(model, *arguments, **options)

    PreTrainedModel._load_pretrained_model = staticmethod(cut)  # noqa: SLF001
    try:
        yield
    finally:
        PreTrainedModel._load_pretrained_model = staticmethod(read)  # noqa: SLF001


def _replace(module: nn.Module, change: Callable[[str, nn.Parameter], nn.Parameter]) -> None:
    """Put what `change` makes of each parameter in all its places: tied parameters stay tied."""
    made: dict[nn.Parameter, nn.Parameter] = {}
    for name, old in list(module.named_parameters(remove_duplicate=False)):
        if old not in made:
            made[old] = change(name, old)
            made[old].requires_grad_(old.requires_grad)
        path, _, key = name.rpartition(".")
        setattr(module.get_submodule(path), key, made[old])


def _keeps_rows(conversion: WeightTransform) -> bool:
    """Whether the rows of a parameter can be made of the same rows of the tensors in the files."""
    steps = [(type(step), getattr(step, "dim", None)) for step in getattr(conversion, "operations", ())]
    return steps in ([], [(MergeModulelist, 0)], [(MergeModulelist, 0), (Concatenate, 1)])


def freeze_images(model: PreTrainedModel, vision: Vision | None, learner: LearnerConfig) -> None:
    """Leave what sees images alone as it is, unless it is to be trained, too (`learner.train_vision`)."""
    if vision is not None and not learner.train_vision:
        for name in vision.modules:
            model.base_model.get_submodule(name).requires_grad_(requires_grad=False)


def prepare(
    model: Backbone,
    rows: OwnRows,
    config: RunConfig,
    learner: LearnerConfig,
    ranks: Ranks,
    *,
    small: int,
    exact: Iterable[nn.Module] = (),
) -> tuple[RowLimits, bool]:
    """Set a model of `load_rows` up, shard and fill it; returns the limits of rows before it is tried, and of `shard`.

    `learner` is the section as it counts for this model. Parameters that are not trained have the type `model.dtype`.
    """
    model.flex = takes_flex(model.model, ranks.device, config.model.attention)
    limits = row_limits(config, model.model.config.get_text_config(), packed=model.flex)
    limits = replace(limits, vision=model.vision)
    dtype, offload = getattr(torch, config.model.dtype), "parameters" in learner.offload
    place = torch.device("cpu") if offload else ranks.device
    # In the type of the forward pass what is not trained; else weights, gradients, moments and averages in float32.
    trained = 20 if learner.ema else 16
    sizes = ((own.numel(), trained if weight.requires_grad else dtype.itemsize) for weight, own in rows.items())
    _check_room(ranks, place, sum(count * size for count, size in sizes), config.model.path)
    named = {name: rows.pop(weight) for name, weight in model.named_parameters() if weight in rows}
    set_up_layers(model.model, learner)
    whole = shard(model, ranks.mesh, dtype, small=small, exact=exact, offload=offload)
    _fill(model, named, dtype, place)
    return limits, whole


def _check_room(ranks: Ranks, place: torch.device, need: int, path: str) -> None:
    problem = None
    try:
        check_room(place, need, f"a rank's share of {path}")
    except CannotCreate as error:
        problem = error
    if ranks.all_max(int(problem is not None)) != [0]:
        raise problem or CannotCreate("another rank has no room on its card", "its log says how much is missing")


def _fill(model: nn.Module, rows: dict[str, torch.Tensor], dtype: torch.dtype, place: torch.device) -> None:
    """Give a sharded model on `meta` its rows, one parameter after the other; those that are not trained in `dtype`."""

    def fill(name: str, empty: nn.Parameter) -> nn.Parameter:
        if name not in rows:
            return empty
        assert isinstance(empty, DTensor)
        # A copy in any case: storages of safetensors cannot be resized.
        own = rows.pop(name).to(place, torch.float32 if empty.requires_grad else dtype, copy=True)
        # `from_local` would bring rows that stay on the host to the device of the mesh.
        return nn.Parameter(DTensor(own, empty._spec, requires_grad=False))  # type: ignore[no-untyped-call]  # noqa: SLF001

    _replace(model, fill)


def shard(
    model: Backbone,
    mesh: DeviceMesh,
    dtype: torch.dtype,
    *,
    small: int = SMALL,
    exact: Iterable[nn.Module] = (),
    offload: bool = False,
) -> bool:
    """Shard every parameter on dimension 0 over the mesh, in place (FSDP2); True: it is one unit that stays whole.

    Forward and backward run in `dtype`, the modules of `exact`, which do not overlap, in float32; weights, gradients
    and their reduction are float32. With `offload` a unit is on the device only while it computes.
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
