"""Training an adapter instead of all weights: LoRA and DoRA through peft, sharded by FSDP2 like everything else.

```
load_rows -> Lora(model, config, rows)   adapted modules in place, base frozen, B = 0: computes what it computed
          -> prepare(...)                adapter and base are cut along their rows, each rank has its own
```
W, A and B of a module are cut at the same rows of W and B, and a row of W + scale B A needs only its own rows of W and
B and the whole of A. So merging gathers only the A's, which are small, and no rank ever holds a merged model.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Final

import msgspec
import torch
from peft import LoraConfig, inject_adapter_in_model
from peft.tuners.lora import LoraLayer
from torch import nn
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from streamrl.config import RunConfig
from streamrl.errors import ConfigError, Refused
from streamrl.images.vision import Vision
from streamrl.learner.model_loading import OwnRows
from streamrl.learner.weight_copy import Rows
from streamrl.weight_sync.adapter import merge, names_of
from streamrl.weight_sync.manifest import Adapter

logger = logging.getLogger(__name__)
_NAME: Final = "default"
_BASE: Final = ".base_layer."


class Lora:
    """The adapter of a causal language model in training (Hu et al., arXiv 2106.09685; DoRA: arXiv 2402.09353).

    The targets of `model`, which is on `meta`, are adapted in place. All ranks draw the same A from `seed`; B is zero.
    Nothing that sees images is adapted without `learner.train_vision`.
    """

    def __init__(self, model: PreTrainedModel, config: RunConfig, rows: OwnRows, vision: Vision | None = None) -> None:
        lora = config.learner.lora
        before = {name for name, module in model.named_modules() if isinstance(module, nn.Linear)}
        kept = () if vision is None or config.learner.train_vision else vision.modules
        peft = LoraConfig(
            r=lora.rank,
            lora_alpha=lora.alpha,
            target_modules=lora.targets if isinstance(lora.targets, str) else list(lora.targets),
            exclude_modules=rf"{model.base_model_prefix}\.({'|'.join(kept)})\..*" if kept else None,
            use_dora=lora.dora,
            task_type="CAUSAL_LM",
        )
        with torch.random.fork_rng(devices=()):
            torch.manual_seed(config.seed)
            try:
                inject_adapter_in_model(peft, model)
            except ValueError as error:
                raise ConfigError(
                    f"learner.lora.targets {lora.targets}: {error}",
                    "name modules of the model, as q_proj, or take all-linear",
                ) from error
            self._layers = {name: module for name, module in model.named_modules() if isinstance(module, LoraLayer)}
            _check(model, self._layers, before)
            for layer in self._layers.values():
                # peft puts the adapter where the base is, on `meta`.
                layer.lora_A.to_empty(device="cpu")
                layer.lora_B.to_empty(device="cpu")
                layer.reset_lora_parameters(_NAME, init_lora_weights=True)
                if lora.dora:
                    base, dtype = rows[layer.get_base_layer().weight], getattr(torch, config.model.dtype)
                    magnitude = layer.lora_magnitude_vector[_NAME].weight
                    rows[magnitude] = torch.linalg.norm(base.to(dtype).float(), dim=1)
        model.requires_grad_(requires_grad=False)
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(".lora_" in name)
        self.about = Adapter(
            base=config.model.path,
            rank=lora.rank,
            alpha=lora.alpha,
            targets=_short(set(self._layers), before),
            dora=lora.dora,
        )
        logger.info("adapter", extra={"modules": len(self._layers), "rank": lora.rank, "dora": lora.dora})

    @staticmethod
    def name_of(name: str) -> str:
        """Name of a parameter of the adapted model in versions and checkpoints: as in peft, or in the base model."""
        if ".lora_" not in name:
            return name.replace(_BASE, ".")
        module, _, rest = name.partition(".lora_")
        names = names_of(module, dora=True)
        found = {"A": names.lora_a, "B": names.lora_b, "magnitude_vector": names.magnitude}[rest.partition(".")[0]]
        assert found is not None
        return found

    @contextmanager
    def disabled(self) -> Iterator[None]:
        """Within the block the model is the base: the reference policy of a run with LoRA."""
        # Not by peft's enable_adapters: it changes requires_grad too, of the sharded parameters on the way in and of
        # the gathered ones on the way out, and FSDP would never train the adapter again.
        for layer in self._layers.values():
            layer._disable_adapters = True  # noqa: SLF001
        try:
            yield
        finally:
            for layer in self._layers.values():
                layer._disable_adapters = False  # noqa: SLF001

    @torch.no_grad()
    def merged_rows(self, adapter: Mapping[str, DTensor]) -> Rows:
        """Gather what merging needs; return what merges this rank's rows, until the next update. Collective."""
        lora_a = {module: _whole(adapter[names_of(module, dora=False).lora_a]) for module in self._layers}

        @torch.no_grad()
        def rows(name: str, weight: torch.Tensor) -> torch.Tensor:
            module = name.removesuffix(".weight")
            if module not in lora_a or module == name:
                return weight
            names = names_of(module, dora=self.about.dora)
            magnitude = None if names.magnitude is None else adapter[names.magnitude].to_local()
            lora_b = adapter[names.lora_b].to_local()
            return merge(weight, lora_a[module], lora_b, scale=self.about.scale, magnitude=magnitude)

        return rows

    def state(self) -> dict[str, Any]:
        state: dict[str, Any] = msgspec.to_builtins(self.about)
        return state

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Refuse a checkpoint of another adapter; there is nothing to load."""
        ours = self.state()
        if odd := sorted(name for name in ours.keys() | state.keys() if ours.get(name) != state.get(name)):
            raise Refused(
                f"the checkpoint is of another adapter: {', '.join(odd)} differ",
                "go on with the settings of learner.lora and the model.path that wrote it",
            )


def _whole(parameter: DTensor) -> torch.Tensor:
    mesh, own = parameter.device_mesh, parameter.to_local()
    if mesh.size() == 1:
        return own.detach()
    # Rows that lie on the host are gathered on the device.
    there = parameter.detach().to(mesh.device_type)
    assert isinstance(there, DTensor)
    whole: torch.Tensor = there.full_tensor()
    return whole.to(own.device)


def _check(model: PreTrainedModel, layers: Mapping[str, Any], linear: set[str]) -> None:
    if odd := sorted(set(layers) - linear):
        raise ConfigError(
            f"learner.lora.targets: {odd[0]} is {type(layers[odd[0]].get_base_layer()).__name__}, not torch.nn.Linear",
            "name linear layers, as [q_proj, v_proj]",
        )
    owners: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        owners.setdefault(id(parameter), []).append(name.replace(_BASE, "."))
    shared = {name: names for names in owners.values() if len(names) > 1 for name in names}
    for module in layers:
        if names := shared.get(f"{module}.weight"):
            raise ConfigError(
                f"learner.lora.targets: {' and '.join(names)} are one weight, and an adapter would separate them",
                "leave them out of the targets",
            )


def _short(modules: set[str], linear: set[str]) -> list[str]:
    """Targets as engines like them: the last part of the name where all linear layers of that name are adapted."""
    last = {name.rpartition(".")[2] for name in modules}
    whole = all(name in modules for name in linear if name.rpartition(".")[2] in last)
    return sorted(last if whole else modules)
