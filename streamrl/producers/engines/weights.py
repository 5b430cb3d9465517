"""Checking a version of the weights against a model, and copying it in."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from streamrl.errors import WeightsError


def match_weights(model: Any, tensors: Mapping[str, torch.Tensor]) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Pair every parameter of the model with its new values; nothing is written.

    Parameters must all be there; a tied parameter needs one of its names, and several names need equal values. Buffers
    that the model saves may be there.

    Returns:
        (parameter or buffer, new values of the same shape) for each storage once.

    Raises:
        WeightsError: unknown or missing names, other shapes, no floating point, not finite, or tied names that differ.
    """
    names: dict[int, list[str]] = {}
    targets: dict[int, torch.Tensor] = {}
    for name, target in model.state_dict(keep_vars=True).items():
        names.setdefault(id(target), []).append(name)
        targets[id(target)] = target
    known = {name for group in names.values() for name in group}
    if unknown := sorted(set(tensors) - known):
        raise WeightsError(f"{len(unknown)} tensors that this model does not have: {_few(unknown)}", _HINT)
    missing = [
        group[0]
        for key, group in names.items()
        if isinstance(targets[key], torch.nn.Parameter) and not any(name in tensors for name in group)
    ]
    if missing:
        raise WeightsError(f"{len(missing)} parameters of the model are missing: {_few(missing)}", _HINT)
    pairs = []
    for key, group in names.items():
        present = [name for name in group if name in tensors]
        for name in present:
            _check(name, tensors[name], targets[key])
        if any(not torch.equal(tensors[name], tensors[present[0]]) for name in present[1:]):
            raise WeightsError(
                f"{' and '.join(present)} are one parameter of this model, but their values differ", _HINT
            )
        if present:
            pairs.append((targets[key], tensors[present[0]]))
    return pairs


def copy_weights(pairs: list[tuple[torch.Tensor, torch.Tensor]]) -> None:
    """Write what `match_weights` has paired, converting type and device."""
    with torch.no_grad():
        for target, values in pairs:
            target.copy_(values)


_HINT = "learner and engine must load the same model (model.path)"


def _check(name: str, values: torch.Tensor, target: torch.Tensor) -> None:
    if values.shape != target.shape:
        raise WeightsError(f"{name} has shape {tuple(values.shape)}, the model's is {tuple(target.shape)}", _HINT)
    if values.is_floating_point() != target.is_floating_point():
        raise WeightsError(f"{name} is {values.dtype}, the model's is {target.dtype}", _HINT)
    if values.is_floating_point() and not is_finite(values):
        raise WeightsError(f"{name} has values that are not finite", "the training has diverged")


def is_finite(values: torch.Tensor) -> bool:
    """Whether all values are finite, in one pass at the speed of memory (`isfinite` takes twenty times as long)."""
    if not values.numel():
        return True
    if values.element_size() == 1:  # torch compares no float8
        values = values.float()
    # the least and the greatest value of anything with a NaN are NaN
    least, greatest = torch.aminmax(values)
    return bool(torch.isfinite(least) & torch.isfinite(greatest))


def _few(names: list[str]) -> str:
    return ", ".join(names[:3]) + (", ..." if len(names) > 3 else "")
