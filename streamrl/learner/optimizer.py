"""AdamW on this rank's shards, with a learning rate that follows a schedule, and an average of the weights.

The optimizer works on the local tensors of the DTensors: shards are disjoint and AdamW is element-wise, so this is
exact, and it avoids the dispatch of DTensor, which costs more than the arithmetic when the model is small.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Generic, TypeVar, cast

import torch
from torch.distributed.tensor import DTensor

from streamrl.config.learner import LearnerConfig
from streamrl.errors import Refused
from streamrl.learner.algorithms.tokens import Sums
from streamrl.learner.ranks import Ranks

logger = logging.getLogger(__name__)
SumsT = TypeVar("SumsT", bound=Sums)


class Offload:
    """The storages of some tensors, on their device or, as copies, in the host's memory; views of them stay valid.

    While they are on the host their storages have no bytes and must not be touched. `keep` holds the host's memory for
    the next time, page-locked for a CUDA device. `constant` ones are copied there once.
    """

    def __init__(self, tensors: Iterable[torch.Tensor], *, keep: bool = False, constant: bool = False) -> None:
        storages = {storage.data_ptr(): storage for storage in (tensor.untyped_storage() for tensor in tensors)}
        self._storages = [storage for storage in storages.values() if storage.nbytes()]
        self._copies: list[torch.UntypedStorage] | None = None
        self._keep, self._constant = keep or constant, constant
        self._kept: list[torch.UntypedStorage] = []

    @property
    def away(self) -> bool:
        return self._copies is not None

    def to_host(self) -> None:
        """Whole or not at all; a repeat does nothing."""
        if self._copies is not None:
            return
        copies = self._kept or [self._room(storage) for storage in self._storages]
        if not (self._constant and self._kept):
            for storage, copy in zip(self._storages, copies, strict=True):
                copy.copy_(storage)
        if self._keep:
            self._kept = copies
        for storage in self._storages:
            storage.resize_(0)
        self._copies = copies

    def to_device(self) -> None:
        """Whole or not at all (a device without room); a repeat does nothing."""
        if self._copies is None:
            return
        grown = []
        try:
            for storage, copy in zip(self._storages, self._copies, strict=True):
                grown.append(storage)
                storage.resize_(copy.nbytes())
                storage.copy_(copy)
        except BaseException:
            for storage in grown:
                storage.resize_(0)
            raise
        self._copies = None

    def _room(self, storage: torch.UntypedStorage) -> torch.UntypedStorage:
        locked = self._keep and storage.device.type == "cuda"
        return torch.empty(storage.nbytes(), dtype=torch.uint8, pin_memory=locked).untyped_storage()


def updates_per_step(config: LearnerConfig) -> int:
    return config.passes * config.mini_batches


def learning_rate(config: LearnerConfig, updates: int) -> float:
    """Rate of the next update after so many: linear warm-up from `lr / warmup` to `lr`, then the schedule.

    With x from 0 at the end of the warm-up to 1 after `steps` steps it is `lr` (constant), `lr (1 - (1 - floor) x)`
    (linear), or `lr (floor + (1 - floor) (1 + cos(pi x)) / 2)` (cosine, Loshchilov and Hutter, arXiv 1608.03983).
    """
    each = updates_per_step(config)
    warmup = config.warmup_steps * each
    if updates < warmup:
        return config.lr * (updates + 1) / warmup
    if config.schedule == "constant" or config.steps is None:
        return config.lr
    span = config.steps * each - warmup
    passed = min(1.0, (updates - warmup) / span) if span > 0 else 1.0
    share = 1 - passed if config.schedule == "linear" else (1 + math.cos(math.pi * passed)) / 2
    return config.lr * (config.lr_floor + (1 - config.lr_floor) * share)


_MOMENTS = ("exp_avg", "exp_avg_sq")
_AVERAGE = "ema"
_SKIPPED = "updates_before_moments"
"""Updates that the moments have not seen; above 0 only where earlier code rolled the weights of this run back."""
_COUNTERS = frozenset({"updates", _SKIPPED, "updates_of_head_alone", "updates_of_head_alone_before_moments"})
"""Counters that checkpoints hold; earlier code wrote those of the head, which are 0 in a checkpoint that fits."""


@dataclass(frozen=True, kw_only=True, slots=True)
class UpdateStats(Generic[SumsT]):
    """The same on all ranks."""

    update: int  # updates applied so far, this one included unless it was skipped
    loss: float  # sum of the loss over the tokens of the update, divided by its size
    grad_norm: float  # of the gradient of that loss before clipping; may be infinite or nan when skipped
    lr: float
    skipped: bool  # the gradient norm was not finite, so weights and optimizer are as before
    trained: SumsT  # sums over the tokens that had a gradient, of all ranks


class ShardedAdamW:
    """AdamW (Loshchilov and Hutter, arXiv 1711.05101) with its state made at once, so that it can always be saved.

    With `ema` there is also an average of the weights: `average = d average + (1 - d) weights` after every update,
    where d to the power of the updates of a step is `ema`. With `offload`, moments and average are on the device only
    during an update. The local tensors of the parameters must not be replaced.
    """

    def __init__(
        self, parameters: Mapping[str, DTensor], config: LearnerConfig, ranks: Ranks, *, offload: bool = False
    ) -> None:
        self.updates = 0
        self._config, self._ranks = config, ranks
        self._parameters = dict(parameters)
        # A rank has no rows of a parameter with fewer rows than ranks.
        locals_ = {name: parameter.to_local().detach() for name, parameter in parameters.items()}
        self._shards = {name: shard for name, shard in locals_.items() if shard.numel()}
        self._average = {name: shard.clone() for name, shard in self._shards.items()} if config.ema else {}
        self._decay = config.ema ** (1 / updates_per_step(config))
        self._skipped = 0
        self._pinned: dict[str, torch.Tensor] = {}
        self._adamw = torch.optim.AdamW(
            list(self._shards.values()),
            lr=config.lr,
            betas=config.betas,
            weight_decay=config.weight_decay,
            fused=next(iter(self._shards.values())).device.type in ("cpu", "cuda"),
        )
        for shard in self._shards.values():
            moments = {moment: torch.zeros_like(shard) for moment in _MOMENTS}
            self._adamw.state[shard] = {"step": torch.zeros((), device=shard.device), **moments}
        away = [tensor for name, tensor in self.live().items() if not name.startswith("weight/")] if offload else []
        self._offload = Offload(away, keep=True)
        self._offload.to_host()

    @torch.no_grad()
    def step(
        self, size: int, sums: torch.Tensor, kind: type[SumsT], lr_factor: Callable[[SumsT], float]
    ) -> UpdateStats[SumsT]:
        """Update the weights with the gradient, divided by `size` and clipped, and forget it. Collective.

        `sums` are those of this rank in the order of `kind.names()`; `lr_factor` sees those of all ranks.
        """
        packet = self._ranks.all_sum(torch.cat([self._squared_norm()[None].to(sums.device), sums])).cpu()
        trained = kind.from_tensor(packet[1:])
        # FSDP averages over ranks, but the loss is a sum over all of them.
        scale = self._ranks.world / size
        norm = math.sqrt(float(packet[0])) * scale
        rate, skipped = learning_rate(self._config, self.updates), not math.isfinite(norm)
        if skipped:
            logger.warning("update skipped", extra={"grad_norm": norm, "update": self.updates})
        else:
            rate *= lr_factor(trained)
            clipped = scale * min(1.0, self._config.clip_norm / norm) if norm > 0 else scale
            torch._foreach_mul_(self._gradients(), clipped)
            self._adamw.param_groups[0]["lr"] = rate
            with self._at_hand():
                self._adamw.step()
                if self._average:
                    torch._foreach_lerp_(list(self._average.values()), list(self._shards.values()), 1 - self._decay)
            self.updates += 1
        self.zero()
        return UpdateStats(
            update=self.updates, loss=trained.loss / size, grad_norm=norm, lr=rate, skipped=skipped, trained=trained
        )

    def _squared_norm(self) -> torch.Tensor:
        """Of this rank's gradients, which it moves to the shards; a missing gradient counts as zero."""
        for name, shard in self._shards.items():
            gradient = self._parameters[name].grad
            shard.grad = torch.zeros_like(shard) if gradient is None else cast("DTensor", gradient).to_local()
        norms = torch._foreach_norm(self._gradients())  # noqa: SLF001  as torch.nn.utils.clip_grad_norm_ does
        return torch.stack(norms).double().square().sum()

    def zero(self) -> None:
        for parameter in self._parameters.values():
            parameter.grad = None
        for shard in self._shards.values():
            shard.grad = None

    def state(self) -> dict[str, torch.Tensor]:
        """Copies on the CPU of what this rank has, by flat name; of a CUDA device valid until the next call."""
        counters = {"updates": self.updates} | ({_SKIPPED: self._skipped} if self._skipped else {})
        tensors = {name: torch.tensor(count, dtype=torch.int64) for name, count in counters.items()}
        with self._at_hand():
            for name, tensor in self.live().items():
                if tensor.device.type != "cuda":
                    tensors[name] = tensor.detach().clone()
                    continue
                if name not in self._pinned:
                    self._pinned[name] = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
                tensors[name] = self._pinned[name].copy_(tensor.detach(), non_blocking=True)
            self._ranks.finish()
        return tensors

    @torch.no_grad()
    def load(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Put back what `state` returned, bit for bit. Refused, without effect, when it does not fit.

        An average that the run does not keep is left out; one that was not kept begins at the loaded weights.
        """
        live = self.live()
        expected = {name: (tuple(tensor.shape), tensor.dtype) for name, tensor in live.items()}
        found = {
            name: (tuple(tensor.shape), tensor.dtype)
            for name, tensor in tensors.items()
            if name not in _COUNTERS and (self._average or not name.startswith(f"{_AVERAGE}/"))
        }
        begins = self._average and not any(name.startswith(f"{_AVERAGE}/") for name in found)
        if begins:
            expected = {name: kind for name, kind in expected.items() if not name.startswith(f"{_AVERAGE}/")}
        if expected != found or "updates" not in tensors:
            odd = sorted(name for name in expected.keys() | found.keys() if expected.get(name) != found.get(name))
            raise Refused(
                f"the checkpoint is of another model or number of ranks: {', '.join(odd[:3]) or 'updates'} differ",
                "resume with the model and learner.ranks that wrote it",
            )
        with self._at_hand():
            for name in expected:
                live[name].copy_(tensors[name])
            if begins:
                for name, tensor in self._average.items():
                    tensor.copy_(self._shards[name])
        self.updates, self._skipped = int(tensors["updates"]), int(tensors.get(_SKIPPED, 0))
        for shard in self._shards.values():
            # The bias correction counts the updates that the moments have seen.
            self._adamw.state[shard]["step"].fill_(self.updates - self._skipped)
        self.zero()

    @contextmanager
    def _at_hand(self) -> Iterator[None]:
        away = self._offload.away
        self._offload.to_device()
        try:
            yield
        finally:
            if away:
                self._offload.to_host()

    def live(self) -> dict[str, torch.Tensor]:
        """This rank's weights, moments and average themselves, by flat name; what is offloaded has no storage."""
        weights = {f"weight/{name}": shard for name, shard in self._shards.items()}
        moments = {
            f"{moment}/{name}": self._adamw.state[shard][moment]
            for moment in _MOMENTS
            for name, shard in self._shards.items()
        }
        return weights | moments | {f"{_AVERAGE}/{name}": tensor for name, tensor in self._average.items()}

    def _gradients(self) -> list[torch.Tensor]:
        return [shard.grad for shard in self._shards.values() if shard.grad is not None]
