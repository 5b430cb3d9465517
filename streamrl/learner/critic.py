"""The critic: a value function for the states in which tokens were sampled, trained beside the actor."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from streamrl.config import RunConfig
from streamrl.errors import ConfigError
from streamrl.images.vision import Vision, vision_of
from streamrl.learner.algorithms.losses import ValueSums, clipped_value_loss
from streamrl.learner.batch import Microbatch, TrainSample, sizes
from streamrl.learner.model import Backbone
from streamrl.learner.model_loading import SMALL, freeze_images, load_rows, prepare
from streamrl.learner.optimizer import UpdateStats
from streamrl.learner.ranks import Ranks
from streamrl.learner.sharding import ShardedModel, TrainableModel, check_fit
from streamrl.wire import Float32Array


class ValueHead(nn.Linear):
    """Computed in float32 whatever the type of the model is; begins at 0, so it is the same on all ranks."""

    def __init__(self, width: int) -> None:
        super().__init__(width, 1, dtype=torch.float32)
        nn.init.zeros_(self.weight)
        nn.init.zeros_(self.bias)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """Values of hidden states of shape (n, width); float32, shape (n,)."""
        # Not a view of a wider result: FSDP hangs its backward hook on what a module returns.
        return torch.addmv(self.bias, hidden.to(self.weight.dtype), self.weight[0]).float()


class ValueModel(Backbone):
    def __init__(self, model: PreTrainedModel, vision: Vision | None = None) -> None:
        super().__init__(model.base_model, vision)
        self.value_head = ValueHead(model.get_output_embeddings().weight.shape[1])

    def forward(self, *, targets: torch.Tensor | None, **rows: Any) -> torch.Tensor:
        """Value of the state before each target; float32, shape (n,). Arguments as of `LogProbModel.forward`."""
        states = self.states(**rows)
        values: torch.Tensor = states if targets is None else self.value_head(states)
        return values


class Critic(TrainableModel[ValueSums]):
    """A causal language model with a scalar head: the rows and the schedule of the actor, its own learning rate."""

    def __init__(self, config: RunConfig, ranks: Ranks, *, small: int = SMALL) -> None:
        learner, critic = config.learner, config.learner.critic
        source = config.model.model_copy(update={"path": critic.path or config.model.path})
        base, rows = load_rows(source, ranks, "learner.critic.path" if critic.path else "model.path")
        vision = vision_of(source)
        freeze_images(base, vision, learner)
        if critic.freeze == "attention":
            freeze_attention(base)
        model = ValueModel(base, vision)
        # `head_float32` is about output layers; a value head is in float32 anyway.
        passes = learner.passes * critic.updates_per_step
        own = learner.model_copy(update={"lr": critic.lr, "ema": 0.0, "head_float32": False, "passes": passes})
        limits, whole = prepare(model, rows, config, own, ranks, small=small, exact=(model.value_head,))
        self._clip = critic.clip
        super().__init__(model, own, ranks, limits, kind=ValueSums, whole=whole)

    def compute_values(self, batch: Sequence[TrainSample]) -> list[Float32Array]:
        """Value of the state before each sampled token of this rank's samples. Collective."""
        return self._compute(batch)[0]

    def accumulate(self, batch: Sequence[TrainSample]) -> None:
        """Add the gradient of the value loss of this rank's samples, which have `values` and `returns`. Collective."""
        self._backward(self._agree(batch), self._loss)

    def update_critic(self, batch: Sequence[TrainSample]) -> UpdateStats[ValueSums]:
        """One update with the samples of all ranks, divided by their tokens. Collective."""
        self.accumulate(batch)
        return self.apply_update(max(1, self._total(*sizes(batch))[0]))

    def _loss(self, part: Microbatch) -> torch.Tensor:
        values: torch.Tensor = self._forward(part)
        if not len(part.samples):
            return values.sum() * 0
        assert part.values is not None
        assert part.returns is not None
        loss = clipped_value_loss(values, self._to_device(part.values), self._to_device(part.returns), clip=self._clip)
        self._sums += loss.sums
        return loss.per_token.sum()


def freeze_attention(model: nn.Module) -> None:
    """Leave attention layers as they are; `ConfigError`: none is named so."""
    frozen = [
        parameter.requires_grad_(False)
        for name, parameter in model.named_parameters()
        if any(("attn" in part or "attention" in part) and "norm" not in part for part in name.split("."))
    ]
    if not frozen:
        raise ConfigError(
            "learner.critic.freeze attention: no parameter of the model is named attn or attention",
            "set learner.critic.freeze: none",
        )


def make_critic(config: RunConfig, ranks: Ranks, actor: ShardedModel) -> Critic:
    critic = Critic(config, ranks)
    path = config.learner.critic.path or config.model.path
    check_fit("learner.critic.path", path, critic, actor, config.model)
    return critic
