"""A model in training, sharded over the ranks of the learner (FSDP2): what the actor and a critic have in common.

A step is any number of backward passes, each over whatever samples have come in, and one update. What is differentiated
is a sum over tokens; the division by the size of the step comes with the update, when that size is known. So a step
gives the same weights in whatever pieces its samples came, up to the rounding of float sums.

Every method marked collective must be called by all ranks in the same order, from one thread.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from streamrl.config.learner import LearnerConfig
from streamrl.learner.batch import Microbatch
from streamrl.learner.export import full_tensors
from streamrl.learner.offload import Offload
from streamrl.learner.optimizer import ShardedAdamW
from streamrl.learner.ranks import Ranks
from streamrl.learner.results import Applied
from streamrl.learner.rows import Limits
from streamrl.learner.sharded_module import ShardedModule

logger = logging.getLogger(__name__)
_PREFIX = "model."


class Sharded(ShardedModule):
    """A module over rows of tokens, with its optimizer.

    Args:
        module: sharded by `sharding.shard`; takes the arrays of a `Microbatch` and returns tensors of shape (n,). Its
            Hugging Face model is below `model.`.
        config: learning rate and the other settings of the optimizer, clip norm.
        ranks: the ranks of this learner.
        limits: of rows and micro-batches.
        vocabulary: token ids are below.
        dtype: type of forward and backward.
        whole: the module is one FSDP unit that stays whole between forward and backward.
    """

    def __init__(
        self,
        module: nn.Module,
        config: LearnerConfig,
        ranks: Ranks,
        limits: Limits,
        *,
        vocabulary: int,
        dtype: torch.dtype,
        whole: bool,
    ) -> None:
        super().__init__(module, ranks, limits, vocabulary=vocabulary)
        self._learner, self._dtype, self._whole = config, dtype, whole
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
        self._optimizer = ShardedAdamW(self._parameters, config, offload=offload)
        there = (*self._optimizer.live().values(), *frozen)
        self._offload = Offload(tensor for tensor in there if tensor.device.type == ranks.device.type)

    @property
    def updates(self) -> int:
        """Updates applied so far."""
        return self._optimizer.updates

    @property
    def parameters(self) -> dict[str, DTensor]:
        """Sharded parameters that are trained, by Hugging Face name; tied ones appear once."""
        return dict(self._parameters)

    def discard(self) -> None:
        """Forget the accumulated gradient."""
        self._optimizer.zero()

    def to_host(self) -> None:
        """Give the device's memory of weights and moments back; nothing else may be called until `to_device`.

        Gradients of a step in progress stay where they are. Not collective; a repeat does nothing.
        """
        self._reshard()
        self._offload.to_host()

    def to_device(self) -> None:
        """Undo `to_host`; whole or not at all when the device has no room. Not collective; a repeat does nothing."""
        self._offload.to_device()

    def full_tensors(self, dtype: torch.dtype) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield Hugging Face name and whole tensor of each parameter, cast to `dtype`, as copies on the CPU.

        Collective: all ranks must go through all items; see `export.full_tensors`.
        """
        if self._whole and self._dtype in (torch.float32, dtype):
            # One gather for all, which the next forward needs anyway.
            self._fsdp.unshard()
            return (
                (name.removeprefix(_PREFIX), parameter.detach().to(device="cpu", dtype=dtype, copy=True))
                for name, parameter in self._module.named_parameters()
            )
        return full_tensors(self._parameters, dtype)

    @contextmanager
    def averaged(self) -> Iterator[None]:
        """Within the block the weights are their average (`learner.ema`). Every rank does the same."""
        with self._optimizer.averaged():
            self._reshard()
            yield
        self._reshard()

    def shard_state(self) -> dict[str, torch.Tensor]:
        """Copies on the CPU of this rank's weights, AdamW moments and update counter, by flat name.

        Copies, so training may go on while they are being written. Not collective.
        """
        return self._optimizer.state()

    def load_shard_state(self, tensors: dict[str, torch.Tensor]) -> None:
        """Put back what `shard_state` of the same rank returned, bit for bit; accumulated gradients are forgotten.

        Raises:
            Refused: it is of another model or number of ranks. Nothing is changed.
        """
        self._optimizer.load(tensors)
        self._reshard()
        self.discard()

    def _name_of(self, name: str) -> str:
        """Name of a parameter in versions and checkpoints; `name` is the one it has in the model."""
        return name

    def _backward(self, parts: Sequence[Microbatch], loss: Callable[[Microbatch], torch.Tensor]) -> None:
        """Add the gradient of the loss of all parts.

        Args:
            parts: as `_agree` returned them.
            loss: sum over the tokens of a part, shape (), from `_forward`; a dummy part needs one too, times 0.
        """
        for place, part in enumerate(parts):
            # A whole model keeps its gradients unsharded between the passes and reduces them once.
            self._fsdp.set_requires_gradient_sync(not self._whole or place == len(parts) - 1)
            torch.autograd.backward(loss(part))

    def _update(
        self, normaliser: float, sums: torch.Tensor, lr_factor: Callable[[torch.Tensor], float] | None = None
    ) -> Applied:
        """Update the weights with the accumulated gradient and forget it. Collective, one all-reduce.

        The gradient is divided by `normaliser` and clipped to `learner.clip_norm`. When its norm is not finite, the
        update is skipped and reported.

        Args:
            normaliser: of the whole step over all ranks, above 0 and the same on all ranks.
            sums: float64, shape (any,): statistics that are added up over the ranks on the way.
            lr_factor: factor of the learning rate by the sums of all ranks; None: 1.
        """
        squared = self._optimizer.squared_norm()[None].to(sums.device)
        packet = self.ranks.all_sum(torch.cat([squared, sums])).cpu()
        # FSDP averages over ranks, but the loss is a sum over all of them.
        scale = self.ranks.world / normaliser
        norm = math.sqrt(float(packet[0])) * scale
        rate, skipped = self._optimizer.lr, not math.isfinite(norm)
        if skipped:
            logger.warning("update skipped", extra={"grad_norm": norm, "update": self.updates})
            self._optimizer.zero()
        else:
            limit = self._learner.clip_norm
            factor = 1.0 if lr_factor is None else lr_factor(packet[1:])
            rate = self._optimizer.step(scale * min(1.0, limit / norm) if norm > 0 else scale, factor)
            self._reshard()
        return Applied(update=self.updates, grad_norm=norm, lr=rate, skipped=skipped, sums=packet[1:])
