"""Whether a version of the weights fits a model, and how it gets into it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import torch

from streamrl.errors import WeightsError

_HINT: Final = "learner and engine must load the same model (model.path)"


def check_weights(model: Any, tensors: Mapping[str, torch.Tensor]) -> None:
    """`WeightsError`, unless all parameters are given, a tied one under one name; buffers of the model are optional."""
    names: dict[int, list[str]] = {}
    targets = model.state_dict(keep_vars=True)
    for name, target in targets.items():
        names.setdefault(id(target), []).append(name)
    if unknown := sorted(set(tensors) - set(targets)):
        raise WeightsError(f"{len(unknown)} tensors that this model does not have: {_few(unknown)}", _HINT)
    given = [(group, [name for name in group if name in tensors]) for group in names.values()]
    parameter = torch.nn.Parameter
    missing = [group[0] for group, there in given if not there and isinstance(targets[group[0]], parameter)]
    if missing:
        raise WeightsError(f"{len(missing)} parameters of the model are missing: {_few(missing)}", _HINT)
    if twice := next((there for _, there in given if len(there) > 1), None):
        raise WeightsError(f"{' and '.join(twice)} are one parameter of this model", _HINT)
    for name, values in tensors.items():
        target = targets[name]
        if values.shape != target.shape:
            raise WeightsError(f"{name} has shape {tuple(values.shape)}, the model's is {tuple(target.shape)}", _HINT)
        if values.is_floating_point() != target.is_floating_point():
            raise WeightsError(f"{name} is {values.dtype}, the model's is {target.dtype}", _HINT)


def copy_weights(pairs: list[tuple[torch.Tensor, torch.Tensor]]) -> None:
    with torch.no_grad():
        for target, values in pairs:
            target.copy_(values)


def _few(names: list[str]) -> str:
    return ", ".join(names[:3]) + (", ..." if len(names) > 3 else "")
