"""Controls of model and cache between two decode steps: swapping weights, standing still, freeing memory."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import ExitStack
from typing import Any, Final, Literal

import torch

from streamrl.errors import WeightsError
from streamrl.producers.engines.slots import Job, SlotDecoder
from streamrl.weight_sync.adapter import Names, adapted, merge
from streamrl.weight_sync.manifest import Adapter, Pair
from streamrl.weight_sync.tensors import Version

_HINT: Final = "learner and engine must load the same model (model.path)"


class Control:
    """The controls of one decode loop; `fail` hears of an error that makes the engine unusable before it is raised."""

    def __init__(self, model: Any, decoder: SlotDecoder, fail: Callable[[BaseException], None]) -> None:
        self._model = model
        self._decoder = decoder
        self._fail = fail
        self._device: torch.device = model.device
        self._base = BaseWeights(model)
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
        whole = version.adapter is None
        pairs = self._match(version) if whole else self._base.match(version)
        with self._decoder.exclusive():
            try:
                copy_weights(pairs)
                if whole:
                    self._base.replaced()
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
    missing = [
        group[0]
        for group in names.values()
        if isinstance(targets[group[0]], torch.nn.Parameter) and not any(name in tensors for name in group)
    ]
    if missing:
        raise WeightsError(f"{len(missing)} parameters of the model are missing: {_few(missing)}", _HINT)
    for group in names.values():
        present = [name for name in group if name in tensors]
        if len(present) > 1:
            raise WeightsError(f"{' and '.join(present)} are one parameter of this model", _HINT)
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


class BaseWeights:
    """The weights of `model` that adapters are merged into, as they were before the first adapter.

    They are kept on the host, as many as the adapter changes, so that rounding errors do not add up: the weights under
    version N do not depend on the versions before it.
    """

    def __init__(self, model: Any) -> None:
        self._model = model
        self._kept: dict[str, torch.Tensor] = {}
        self._replaced = False

    def match(self, version: Version) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Pair each weight that an adapter version changes with its new values; no weight is written.

        `WeightsError`: modules that this model lacks, other shapes, or the model holds weights of a version that was
        no adapter.
        """
        adapter = version.adapter
        assert adapter is not None
        if self._replaced:
            raise WeightsError(
                f"version {version.number} is an adapter, and this engine has got whole weights before",
                "an adapter belongs to the weights of model.path: start the replicas anew",
            )
        found = adapted(adapter, version.tensors)
        parameters = dict(self._model.named_parameters())
        for module, names in found.items():
            _check_adapter(module, names, version, adapter, parameters)
        if self._kept and self._kept.keys() != found.keys():
            raise WeightsError(f"version {version.number} adapts other modules than the versions before it")
        for module in found if not self._kept else ():
            self._kept[module] = parameters[f"{module}.weight"].detach().to("cpu", copy=True)
        return [
            (parameters[f"{module}.weight"], self._merged(module, names, version)) for module, names in found.items()
        ]

    def replaced(self) -> None:
        """Whole weights were written over the model, so adapters cannot be merged any more."""
        self._replaced = True
        self._kept.clear()

    def _merged(self, module: str, names: Names, version: Version) -> torch.Tensor:
        assert version.adapter is not None
        target = self._model.get_parameter(f"{module}.weight")
        tensors = version.tensors
        merged = merge(
            self._kept[module].to(target.device),
            tensors[names.low].to(target.device),
            tensors[names.high].to(target.device),
            scale=version.adapter.scale,
            magnitude=None if names.magnitude is None else tensors[names.magnitude].to(target.device),
        )
        return merged.to(target.dtype)


def _check_adapter(
    module: str, names: Names, version: Version, adapter: Adapter, parameters: dict[str, torch.nn.Parameter]
) -> None:
    weight = parameters.get(f"{module}.weight")
    if weight is None or weight.ndim != 2:
        raise WeightsError(
            f"the adapter changes {module}, which is not a linear layer of this model",
            _HINT,
        )
    rows, columns = weight.shape
    expected: dict[str, tuple[int, ...]] = {names.low: (adapter.rank, columns), names.high: (rows, adapter.rank)}
    if names.magnitude is not None:
        expected[names.magnitude] = (rows,)
    for name, shape in expected.items():
        tensor = version.tensors[name]
        if tuple(tensor.shape) != shape or not tensor.is_floating_point():
            raise WeightsError(
                f"{name} is {tensor.dtype} {tuple(tensor.shape)}, the model wants {shape}",
                _HINT,
            )
