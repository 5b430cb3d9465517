"""AdamW on this rank's shards, with a learning rate that follows a schedule, and an average of the weights.

The optimizer works on the local tensors of the DTensors. Shards are disjoint and AdamW is element-wise, so this is
exact, and it spares the dispatch of DTensor, which costs more than the arithmetic when the model is small. The only
thing that ranks must agree on is the gradient norm, whose squares simply add up.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from torch.distributed.tensor import DTensor

from streamrl.config.learner import LearnerConfig
from streamrl.errors import Refused
from streamrl.learner.offload import Offload
from streamrl.learner.schedule import learning_rate, updates_per_step

_MOMENTS = ("exp_avg", "exp_avg_sq")
_AVERAGE = "ema"
_SKIPPED = "updates_before_moments"
"""Updates that the moments have not seen; above 0 only where earlier code rolled the weights of this run back."""
_COUNTERS = frozenset({"updates", _SKIPPED, "updates_of_head_alone", "updates_of_head_alone_before_moments"})
"""Counters that checkpoints hold; earlier code wrote those of the head, which are 0 in a checkpoint that fits."""


class ShardedAdamW:
    """AdamW (Loshchilov and Hutter, arXiv 1711.05101) with its state made at once, so that it can always be saved.

    With `ema` there is also an exponential average of the weights, in float32, that begins at the first weights:
    `average = d average + (1 - d) weights` after every update, where d to the power of the updates of a step is `ema`.

    Args:
        parameters: sharded parameters by name; the same order on every rank. Their local tensors must not be replaced.
        config: learning rate and its schedule, betas, weight decay, decay of the average.
        offload: moments and average lie on the host but for the time of an update.

    Attributes:
        updates: updates applied so far; the learning rate is a function of it.
    """

    def __init__(self, parameters: Mapping[str, DTensor], config: LearnerConfig, *, offload: bool = False) -> None:
        self.updates = 0
        self._config = config
        self._parameters = dict(parameters)
        # A rank has no rows of a parameter with fewer rows than ranks.
        locals_ = {name: parameter.to_local().detach() for name, parameter in parameters.items()}
        self._shards = {name: shard for name, shard in locals_.items() if shard.numel()}
        self._average = {name: shard.clone() for name, shard in self._shards.items()} if config.ema else {}
        self._decay = config.ema ** (1 / updates_per_step(config))
        self._skipped = 0
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

    @property
    def lr(self) -> float:
        """Learning rate of the next update, as the schedule says."""
        return learning_rate(self._config, self.updates)

    @torch.no_grad()
    def squared_norm(self) -> torch.Tensor:
        """Sum of squares of this rank's gradients, float64, shape (); the global one is the sum over ranks.

        It hands the gradients over from the sharded parameters to the shards; a parameter without one counts as zero.
        """
        for name, shard in self._shards.items():
            gradient = self._parameters[name].grad
            if gradient is None:
                shard.grad = torch.zeros_like(shard)
            else:
                assert isinstance(gradient, DTensor)
                shard.grad = gradient.to_local()
        norms = torch._foreach_norm(self._gradients())  # noqa: SLF001  as torch.nn.utils.clip_grad_norm_ does
        return torch.stack(norms).double().square().sum()

    @torch.no_grad()
    def step(self, scale: float, lr_scale: float = 1.0) -> float:
        """Multiply the gradients by `scale`, update, forget the gradients; return the learning rate that was used.

        `squared_norm` comes first.

        Args:
            scale: of the gradients, the same on all ranks.
            lr_scale: factor on the learning rate of this update alone, at least 0, the same on all ranks.
        """
        rate = self.lr * lr_scale
        torch._foreach_mul_(self._gradients(), scale)
        self._adamw.param_groups[0]["lr"] = rate
        with self._at_hand():
            self._adamw.step()
            if self._average:
                torch._foreach_lerp_(list(self._average.values()), list(self._shards.values()), 1 - self._decay)
        self.updates += 1
        self.zero()
        return rate

    def zero(self) -> None:
        """Forget the gradients."""
        for parameter in self._parameters.values():
            parameter.grad = None
        for shard in self._shards.values():
            shard.grad = None

    def state(self) -> dict[str, torch.Tensor]:
        """Copies on the CPU of weights, moments, average and update counter of this rank, by flat name."""
        counters = {"updates": self.updates} | ({_SKIPPED: self._skipped} if self._skipped else {})
        tensors = {name: torch.tensor(count, dtype=torch.int64) for name, count in counters.items()}
        with self._at_hand():
            for name, tensor in self.live().items():
                tensors[name] = tensor.detach().to("cpu", copy=True)
        return tensors

    @torch.no_grad()
    def load(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Put back what `state` returned, bit for bit; gradients are forgotten.

        An average that the run does not keep is left out; one that was not kept begins at the loaded weights.

        Raises:
            Refused: names, shapes or types are not those of this model on this number of ranks. Nothing is changed.
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
                self._begin_average()
        self.updates, self._skipped = int(tensors["updates"]), int(tensors.get(_SKIPPED, 0))
        for shard in self._shards.values():
            # The bias correction counts the updates that the moments have seen.
            self._adamw.state[shard]["step"].fill_(self.updates - self._skipped)
        self.zero()

    @contextmanager
    @torch.no_grad()
    def averaged(self) -> Iterator[None]:
        """Within the block the weights are their average (with `ema` only); afterwards they are what they were."""
        with self._at_hand():
            self._swap()
            try:
                yield
            finally:
                self._swap()

    @contextmanager
    def _at_hand(self) -> Iterator[None]:
        """Moments and average on the device; afterwards they are where they were."""
        away = self._offload.away
        self._offload.to_device()
        try:
            yield
        finally:
            if away:
                self._offload.to_host()

    def _swap(self) -> None:
        for name, average in self._average.items():
            shard = self._shards[name]
            weights = shard.clone()
            shard.copy_(average)
            average.copy_(weights)

    def _begin_average(self) -> None:
        for name, tensor in self._average.items():
            tensor.copy_(self._shards[name])

    def live(self) -> dict[str, torch.Tensor]:
        """This rank's weights, moments and average themselves, by flat name. What is offloaded has no storage."""
        weights = {f"weight/{name}": shard for name, shard in self._shards.items()}
        moments = {
            f"{moment}/{name}": self._adamw.state[shard][moment]
            for moment in _MOMENTS
            for name, shard in self._shards.items()
        }
        return weights | moments | {f"{_AVERAGE}/{name}": tensor for name, tensor in self._average.items()}

    def _gradients(self) -> list[torch.Tensor]:
        return [shard.grad for shard in self._shards.values() if shard.grad is not None]
