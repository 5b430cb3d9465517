"""What may be done to the layers of a model before it is sharded: recompute, compile, an output layer in float32.

Each replaces the `forward` of some modules and nothing else, so parameters keep their names and FSDP its hooks, which
stay outside of what is compiled or recomputed.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel

from streamrl.config.learner import LearnerConfig
from streamrl.errors import ConfigError

logger = logging.getLogger(__name__)
_RECOMPILES = 64
"""Variants of one layer: one row or many, with or without mask, with or without gradient, kinds of attention."""


def decoder_layers(model: PreTrainedModel) -> list[nn.Module]:
    """The repeated layers of a model, the natural units of FSDP: what Hugging Face says must not be split."""
    names = set(getattr(model, "_no_split_modules", None) or ())
    return [module for module in model.modules() if type(module).__name__ in names]


def set_up_layers(model: PreTrainedModel, config: LearnerConfig) -> None:
    """Do to a model what the configuration asks for; call it once, before it is sharded.

    Args:
        model: its parameters may have any type; with `head_float32` it needs an output layer.
        config: `compile`, `checkpoint_activations` and `head_float32`.

    Raises:
        ConfigError: the model has no layers that we know, or no plain output layer, and the configuration needs them.
    """
    layers = decoder_layers(model) if config.compile or config.checkpoint_activations else []
    if not layers and (config.compile or config.checkpoint_activations):
        option = "compile" if config.compile else "checkpoint_activations"
        raise ConfigError(
            f"learner.{option}: {type(model).__name__} does not say which of its modules are layers",
            f"set learner.{option} to false",
        )
    if config.compile:
        compile_layers(layers)
    if config.checkpoint_activations:
        for layer in layers:
            layer.forward = functools.partial(checkpoint, layer.forward, use_reentrant=False, preserve_rng_state=False)
    if config.head_float32:
        _float32_head(model)


class _Fallback:
    """Whether layers are still compiled; shared by all layers of a model."""

    def __init__(self) -> None:
        self.compiled = True

    def give_up(self, error: Exception) -> None:
        """Say why, once, and go on without."""
        if self.compiled:
            # The first line names the compiler, the second one what it said.
            said = " ".join(line for line in str(error).splitlines()[:2] if line.strip())
            logger.warning(
                "layers run uncompiled: torch.compile failed; set learner.compile to false, or mend what it says",
                extra={"error": f"{type(error).__name__}: {said}"},
            )
        self.compiled = False


def compile_layers(layers: list[nn.Module], backend: str | Callable[..., Any] = "inductor") -> None:
    """Compile the forward pass of each layer, with shapes that may change.

    Whatever cannot be compiled here (no C++ or Triton compiler, an operation it does not know) runs as it is, after
    one warning. The backward pass is compiled together with the forward pass, so that it cannot fail later.
    """
    from torch._dynamo import config as dynamo
    from torch._functorch import config as functorch

    dynamo.recompile_limit = max(_RECOMPILES, dynamo.recompile_limit)
    functorch.force_non_lazy_backward_lowering = True
    state = _Fallback()
    for layer in layers:
        layer.forward = _compiled(layer.forward, state, backend)


def _compiled(eager: Callable[..., Any], state: _Fallback, backend: str | Callable[..., Any]) -> Callable[..., Any]:
    from torch._dynamo.exc import TorchDynamoException

    fast = torch.compile(eager, dynamic=True, backend=backend)

    def forward(*args: Any, **kwargs: Any) -> Any:
        if state.compiled:
            try:
                return fast(*args, **kwargs)
            except TorchDynamoException as error:
                state.give_up(error)
        return eager(*args, **kwargs)

    return forward


def _float32_head(model: PreTrainedModel) -> None:
    """Let the output layer multiply in float32: weights as they are in the forward pass, cast; logits in float32."""
    head = model.get_output_embeddings()
    if type(head) is not nn.Linear:
        raise ConfigError(
            f"learner.head_float32: the output layer of {type(model).__name__} is a {type(head).__name__}",
            "set learner.head_float32 to false",
        )

    def forward(hidden: torch.Tensor) -> torch.Tensor:
        bias = None if head.bias is None else head.bias.float()
        return nn.functional.linear(hidden.float(), head.weight.float(), bias)

    head.forward = forward  # type: ignore[method-assign, assignment]
