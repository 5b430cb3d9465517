"""Controls of model and cache between two decode steps: swapping weights, standing still, freeing memory."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import ExitStack
from typing import Any, Final, Literal

import torch

from streamrl.errors import WeightsError
from streamrl.producers.engines.slots import Job, SlotDecoder
from streamrl.weight_sync.manifest import Pair
from streamrl.weight_sync.tensors import Version

_HINT: Final = "learner and engine must load the same model (model.path)"


class Control:
    """The controls of one decode loop; `fail` hears of an error that makes the engine unusable before it is raised."""

    def __init__(self, model: Any, decoder: SlotDecoder, fail: Callable[[BaseException], None]) -> None:
        self._model, self._decoder, self._fail = model, decoder, fail
        self._device: torch.device = model.device
        self._structure = ""  # what the model was found to take
        self._hold = ExitStack()
        self._asleep = False
        self.pair: Pair = (0, 0)

    def close(self) -> list[Job]:
        with self._hold, self._decoder.exclusive():
            return self._decoder.take()

    def apply(self, version: Version) -> None:
        pair = version.pair
        if pair == self.pair:
            return
        if pair < self.pair or pair[1] < self.pair[1]:
            raise WeightsError(f"version {pair} of the weights is older than {self.pair}, which is in force")
        pairs = self._match(version)
        with self._decoder.exclusive():
            try:
                copy_weights(pairs)
                self._decoder.swapped(version.number)
            except BaseException as error:
                self._fail(error)
                raise
            self.pair = pair

    def _match(self, version: Version) -> list[tuple[torch.Tensor, torch.Tensor]]:
        if version.structure != self._structure:
            check_weights(self._model, version.tensors)
            self._structure = version.structure
        targets = self._model.state_dict(keep_vars=True)
        return [(targets[name], values) for name, values in version.tensors.items()]

    def sleep(self, level: Literal[0, 1]) -> None:
        if not self._asleep:
            self._hold.enter_context(self._decoder.exclusive())
            self._asleep = True
        if level:
            self._decoder.release()
            self._model.to("cpu")

    def wake(self) -> None:
        self._model.to(self._device)
        self._asleep = False
        self._hold.close()


# ---- a version and the model


def check_weights(model: Any, tensors: Mapping[str, torch.Tensor]) -> None:
    """Refuse (`WeightsError`) unknown or missing names, a parameter under two names, other shapes, other kinds of type.

    All parameters must be given, a tied one under one of its names. Buffers that the model saves are optional.
    """
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
