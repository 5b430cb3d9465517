"""An engine's model under versions that are an adapter alone: each is merged into the weights it began with."""

from __future__ import annotations

from typing import Any

import torch

from streamrl.errors import WeightsError
from streamrl.producers.engines.weights import is_finite
from streamrl.weight_sync.adapter import Names, adapted, merge
from streamrl.weight_sync.manifest import Adapter
from streamrl.weight_sync.tensors import Version


class BaseWeights:
    """The weights that adapters are merged into, as they were before the first one came.

    They are kept on the host, as many as the adapter changes, so that nothing adds up from version to version: the
    weights under version N are the same whatever came before it.

    Args:
        model: that the engine decodes with.
    """

    def __init__(self, model: Any) -> None:
        self._model = model
        self._kept: dict[str, torch.Tensor] = {}
        self._replaced = False

    def match(self, version: Version) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Pair each weight that the adapter of a version changes with its new values; no weight is written.

        Returns:
            (parameter, new values) as of `match_weights`, in the parameter's type, on its device.

        Raises:
            WeightsError: modules that this model does not have, other shapes, values that are not finite, or the
                engine holds weights of a version that was no adapter.
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
            _check(module, names, version, adapter, parameters)
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
        """Whole weights were written over all of the model: no adapter can be merged any more."""
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


def _check(
    module: str, names: Names, version: Version, adapter: Adapter, parameters: dict[str, torch.nn.Parameter]
) -> None:
    weight = parameters.get(f"{module}.weight")
    if weight is None or weight.ndim != 2:
        raise WeightsError(
            f"the adapter changes {module}, which is no linear layer of this model",
            "learner and engine must load the same model (model.path)",
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
                "learner and engine must load the same model (model.path)",
            )
