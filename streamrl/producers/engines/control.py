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
        pairs = match_weights(self._model, version.tensors) if whole else self._base.match(version)
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


def match_weights(model: Any, tensors: Mapping[str, torch.Tensor]) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Pair each parameter or buffer of the model, each storage once, with its new values; nothing is written.

    All parameters must be given; a tied parameter needs one of its names, and several names need equal values. Buffers
    that the model saves are optional. `WeightsError` for unknown or missing names, other shapes or values that are no
    finite floating point numbers.
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
    with torch.no_grad():
        for target, values in pairs:
            target.copy_(values)


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

        `WeightsError`: modules that this model lacks, other shapes, values that are not finite, or the model holds
        weights of a version that was no adapter.
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
        pairs = [
            (parameters[f"{module}.weight"], self._merged(module, names, version)) for module, names in found.items()
        ]
        broken = [module for module, (_, values) in zip(found, pairs, strict=True) if not is_finite(values)]
        if broken:
            raise WeightsError(f"{broken[0]} is not finite with its adapter", "the training has diverged")
        return pairs

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
