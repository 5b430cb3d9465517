"""A value function: any Hugging Face model with a scalar head on its last hidden states."""

from __future__ import annotations

import torch
from torch import nn
from transformers import PreTrainedModel

from streamrl.learner.model import Backbone


class ValueHead(nn.Linear):
    """One number for each hidden state, computed in float32 whatever the type of the model is.

    It begins at 0, so the first values are 0 on every rank and the first gradients go into the head alone.

    Args:
        width: of the hidden states.
    """

    def __init__(self, width: int) -> None:
        super().__init__(width, 1, dtype=torch.float32)
        nn.init.zeros_(self.weight)
        nn.init.zeros_(self.bias)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """Values of hidden states of shape (n, width); float32, shape (n,)."""
        # Not a view of a wider result: FSDP hangs its backward hook on what a module returns.
        return torch.addmv(self.bias, hidden.to(self.weight.dtype), self.weight[0]).float()


class ValueModel(Backbone):
    """Values of the states in which tokens were sampled.

    Args:
        model: a causal language model; its output layer is left out.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        super().__init__(model.base_model)
        self.value_head = ValueHead(self.hidden_width())

    def forward(
        self,
        *,
        input_ids: torch.Tensor,
        segments: torch.Tensor | None,
        position_ids: torch.Tensor | None,
        positions: torch.Tensor,
        targets: torch.Tensor,
    ) -> torch.Tensor:
        """Return the value of the state before each target: that of the place which predicts it; float32, shape (n,).

        For the arguments see `LogProbModel.forward`; `targets` are not used.
        """
        del targets
        values: torch.Tensor = self.value_head(self.states(input_ids, segments, position_ids, positions))
        return values
