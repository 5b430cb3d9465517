"""A model whose parameters are spread over the ranks of the learner (FSDP2): from samples to updated weights.

```
model_loading.prepare -> ShardedModel   lays samples out in rows and runs them: the reference policy
                         TrainableModel   with gradients and an optimizer: the actor and a critic
```
A step is any number of backward passes and one update. What is differentiated is a sum over tokens; the division by the
size of the step comes with the update, so a step gives the same weights however its samples were divided into passes,
up to the rounding of float sums. All ranks call collective methods in the same order, from one thread.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Generic

import numpy as np
import torch
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from transformers import AutoTokenizer

from streamrl.config import ModelConfig
from streamrl.config.learner import LearnerConfig
from streamrl.errors import ConfigError
from streamrl.images.encoded import known
from streamrl.learner.batch import Microbatch, RowLimits, TrainSample, dummy, pack
from streamrl.learner.model import Backbone, Tensors
from streamrl.learner.optimizer import Offload, ShardedAdamW, SumsT, UpdateStats
from streamrl.learner.ranks import Ranks
from streamrl.learner.rows import checked, dense
from streamrl.wire import Float32Array

logger = logging.getLogger(__name__)

_PREFIX = "model."


class ShardedModel:
    def __init__(self, module: Backbone, ranks: Ranks, limits: RowLimits) -> None:
        self.ranks, self.vocabulary, self.vision = ranks, module.vocabulary, module.vision
        self._module = module
        sees = () if module.vision is None else map(module.model.base_model.get_submodule, module.vision.modules)
        trained = any(parameter.requires_grad for each in sees for parameter in each.parameters())
        self._reduces_images = trained and ranks.world > 1
        # FSDP finishes its set-up in the first forward; only then are the local tensors the ones that will stay.
        states = partial(self._forward, targets=None)
        self.limits = checked(limits, states, ranks, module)
        if limits.packed and not self.limits.shared:
            module.flex = False
            self.limits = checked(dense(limits), states, ranks, module)
        self._fsdp.unshard()
        module.check()
        self._reshard()

    def check_samples(self, batch: Sequence[TrainSample]) -> None:
        """Raise a ValueError when a sample does not fit the model. Not collective."""
        for sample in batch:
            if sample.width > self.limits.longest:
                where = "" if sample.tree is None else " on one branch of an episode"
                raise ValueError(
                    f"group {sample.group_id}: {sample.width} tokens{where}, the model takes {self.limits.longest}"
                )
            if not self.limits.shared and sample.tree is not None and len(sample.tree.branches) > 1:
                raise ValueError(
                    f"group {sample.group_id}: an episode of {len(sample.tree.branches)} branches needs rows of several"
                    " lengths in one pass, and padding changes what this model computes"
                )
            observed = [] if sample.tree is None else [sample.tree.observed_ids]
            ids = np.concatenate([sample.prompt, sample.tokens, *observed])
            if ids.min() < 0 or ids.max() >= self.vocabulary:
                raise ValueError(f"group {sample.group_id}: a token id is not in the vocabulary of the model")
            self._check_images(sample)

    def _check_images(self, sample: TrainSample) -> None:
        """The engine counted the tokens of each image as this model does, or its pixels would not fit between them."""
        if self.vision is None:
            return
        if set(self.vision.forbidden) & set(sample.tokens.tolist()):
            raise ValueError(f"group {sample.group_id}: a token that stands for an image was sampled")
        pieces = [(sample.prompt, sample.images)]
        if sample.tree is not None:
            pieces += zip(sample.tree.observed, sample.tree.media, strict=True)
        for ids, names in pieces:
            shown = [known(name, sample.blobs[name]) for name in names]
            self.vision.spans(ids.tolist(), [image.size for image in shown])

    def _reshard(self) -> None:
        for module in self._module.modules():
            if isinstance(module, FSDPModule):
                module.reshard()

    @property
    def _fsdp(self) -> FSDPModule:
        assert isinstance(self._module, FSDPModule)
        return self._module

    def _agree(self, batch: Sequence[TrainSample]) -> list[Microbatch]:
        """Lay out this rank's batch, up to the passes of the busiest rank. Collective."""
        parts = pack(batch, self.limits)
        (passes,) = self.ranks.all_max(len(parts))
        return parts + [dummy()] * (passes - len(parts))

    def _forward(self, part: Microbatch, **options: Any) -> Any:
        placed = part.shared or (part.images and part.position_ids.ndim == 3)
        return self._module(
            input_ids=self._to_device(part.input_ids),
            visible_until=self._to_device(part.visible_until) if part.shared else None,
            position_ids=self._to_device(part.position_ids) if placed else None,
            positions=self._to_device(part.positions),
            **self._images(part),
            **{"targets": self._to_device(part.targets), **options},
        )

    def _images(self, part: Microbatch) -> dict[str, Tensors]:
        if self.vision is None or not (part.images or (self._reduces_images and torch.is_grad_enabled())):
            return {}
        smallest = self.vision.smallest
        shown = part.images or [(smallest.sha256, smallest.data)]
        pixels = [self.vision.pixels(name, data) for name, data in shown]
        joined = {key: self._to_device(array) for key, array in self.vision.joined(pixels).items()}
        return {"pixels" if part.images else "unseen": joined}

    @torch.no_grad()
    def _compute(self, batch: Sequence[TrainSample], results: int = 1, **options: Any) -> list[list[Float32Array]]:
        """Results of the module without gradient: for each an array per sample, shape (sampled tokens,). Collective."""
        found = [[np.zeros(0, dtype=np.float32) for _ in batch] for _ in range(results)]
        for part in self._agree(batch):
            values = self._forward(part, **options)
            for array, column in zip(values if isinstance(values, tuple) else (values,), found, strict=False):
                if array is not None:
                    part.deal_out(array.cpu().numpy(), column)
        return found

    def _to_device(self, array: np.ndarray[Any, Any]) -> torch.Tensor:
        return torch.from_numpy(array).to(self.ranks.device, non_blocking=True)


_PROBE = "Two plus 34 is thirty-six; naïve?"


def check_fit(key: str, path: str, module: ShardedModel, actor: ShardedModel, model: ModelConfig) -> None:
    """Refuse a second model that takes shorter sequences, fewer token ids or other ones than the policy."""
    if module.limits.longest < actor.limits.longest:
        raise ConfigError(
            f"{key} {path} takes {module.limits.longest} tokens, the policy {actor.limits.longest}",
            f"lower model.context to {module.limits.longest}, or name a model that takes longer sequences",
        )
    if module.vocabulary < actor.vocabulary:
        raise ConfigError(
            f"{key} {path} knows {module.vocabulary} tokens, the policy {actor.vocabulary}",
            "name a model with the tokenizer of model.path",
        )
    if (actor.vision and actor.vision.fingerprint) != (module.vision and module.vision.fingerprint):
        raise ConfigError(
            f"{key} {path} makes other pixels of an image than the policy, or takes none",
            "name a model with the image processor of model.path",
        )
    module.vision = actor.vision  # so that each image is processed once for both
    if path == model.path:
        return
    ours, theirs = _probe_ids(model.tokenizer or model.path), _probe_ids(path)
    if ours is not None and theirs is not None and ours != theirs:
        raise ConfigError(
            f"{key} {path} has another tokenizer than the policy: the same ids would be other words to it",
            "name a model with the tokenizer of model.path",
        )


def _probe_ids(path: str) -> list[int] | None:
    """What a tokenizer makes of a sentence; None when there is none."""
    folder, reason = Path(path), "it has none"
    try:
        # Where a directory has no tokenizer, transformers would make up an empty one.
        if not folder.is_dir() or [*folder.glob("tokenizer*"), *folder.glob("vocab*")]:
            ids: list[int] = AutoTokenizer.from_pretrained(path).encode(_PROBE, add_special_tokens=False)
            return ids
    except (OSError, ValueError, KeyError) as error:
        reason = str(error)
    logger.info("tokenizers not compared", extra={"path": path, "reason": reason})
    return None


class TrainableModel(ShardedModel, Generic[SumsT]):
    """`kind` are the statistics that `_backward` adds up; `whole`: one FSDP unit that stays gathered."""

    def __init__(
        self,
        module: Backbone,
        config: LearnerConfig,
        ranks: Ranks,
        limits: RowLimits,
        *,
        kind: type[SumsT],
        whole: bool,
    ) -> None:
        super().__init__(module, ranks, limits)
        self._whole, self._kind = whole, kind
        self._sums = torch.zeros(len(kind.names()), dtype=torch.float64, device=ranks.device)
        self._fsdp.set_reshard_after_backward(not whole)
        named = {
            self._name_of(name.removeprefix(_PREFIX)): parameter
            for name, parameter in module.named_parameters()
            if isinstance(parameter, DTensor)
        }
        self._parameters = {name: parameter for name, parameter in named.items() if parameter.requires_grad}
        self._frozen = {name: parameter for name, parameter in named.items() if not parameter.requires_grad}
        frozen = (parameter.to_local() for parameter in self._frozen.values())
        # On a CPU there is no other memory to go to.
        offload = "optimizer" in config.offload and ranks.device.type != "cpu"
        self._optimizer = ShardedAdamW(self._parameters, config, ranks, offload=offload)
        there = (*self._optimizer.live().values(), *frozen)
        moving = (tensor for tensor in there if tensor.device.type == ranks.device.type)
        self._offload = Offload(moving, keep=ranks.device.type != "cpu")

    @property
    def parameters(self) -> dict[str, DTensor]:
        """Sharded parameters that are trained, by Hugging Face name; tied ones appear once."""
        return dict(self._parameters)

    def apply_update(self, size: int) -> UpdateStats[SumsT]:
        """Update the weights with the accumulated gradient, divided by `size`, at least 1. Collective.

        A norm that is not finite skips the update; without any gradient AdamW moves on its momentum.
        """
        stats = self._optimizer.step(size, self._sums, self._kind, self._lr_factor)
        self._reshard()
        self._sums.zero_()
        return stats

    def discard(self) -> None:
        self._optimizer.zero()
        self._sums.zero_()

    def to_host(self) -> None:
        """Free the device's memory of weights and moments; the gradients of a step in progress stay."""
        self._reshard()
        self._offload.to_host()

    def to_device(self) -> None:
        self._offload.to_device()

    def shard_state(self) -> dict[str, torch.Tensor]:
        """Copies, so training may go on while they are written; on CUDA valid until the next call."""
        return self._optimizer.state()

    def load_shard_state(self, tensors: dict[str, torch.Tensor]) -> None:
        self._optimizer.load(tensors)
        self._reshard()
        self.discard()

    def _total(self, *counts: int) -> list[int]:
        """The sums of counts over the ranks. Collective."""
        totals: list[int] = self.ranks.all_sum(torch.tensor(counts, device=self.ranks.device)).tolist()
        return totals

    def _lr_factor(self, trained: SumsT) -> float:
        del trained
        return 1.0

    def _name_of(self, name: str) -> str:
        return name

    def _backward(self, parts: Sequence[Microbatch], loss: Callable[[Microbatch], torch.Tensor]) -> None:
        """Add the gradient of a loss, a sum over the tokens of a part; a dummy part needs one too, times 0."""
        for place, part in enumerate(parts):
            # A whole model keeps its gradients unsharded between the passes and reduces them once.
            self._fsdp.set_requires_gradient_sync(not self._whole or place == len(parts) - 1)
            torch.autograd.backward(loss(part))
