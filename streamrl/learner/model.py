"""Any Hugging Face causal language model, unmodified, as a module that gives log-probabilities.

Everything from token ids to log-probabilities happens inside `LogProbModel.forward`, so that the output layer is used
while FSDP holds the whole parameters. Logits, the largest tensor of training, exist for one chunk of tokens at a time;
when there is more than one chunk, each is recomputed in the backward pass.

Before a model is sharded, its layers may be set to recompute or compile, and its output layer to float32. Each replaces
the `forward` of some modules, so parameters keep their names and FSDP its hooks, outside of what is compiled.
"""

from __future__ import annotations

import copy
import functools
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Final, TypeAlias

import torch
from torch import nn
from torch.nn.attention.flex_attention import BlockMask
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint
from transformers import AttentionInterface, PreTrainedModel
from transformers.masking_utils import AttentionMaskInterface, sdpa_mask
from transformers.utils import is_torch_flex_attn_available
from typing_extensions import override

from streamrl.config.learner import LearnerConfig
from streamrl.errors import ConfigError
from streamrl.images.vision import Vision

_LOG_ZERO = -1e4  # stands for log 0: finite, and its `exp` is 0
Tensors: TypeAlias = dict[str, torch.Tensor]
Head = Callable[[torch.Tensor], torch.Tensor]  # hidden states of shape (n, hidden) to logits of shape (n, vocabulary)


def token_logprobs(
    head: Head,
    hidden: torch.Tensor,
    targets: torch.Tensor,
    *,
    temperature: float,
    chunk: int,
    entropy: bool = False,
    entropy_gradient: bool = False,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The log-probability of each target, and the entropy of each distribution in nats; float32, shape (n,).

    `hidden` are the states that predict the targets, shape (n, hidden). An entropy with a gradient costs as much again.
    """
    count = hidden.shape[0]
    compute: Callable[..., tuple[torch.Tensor, torch.Tensor | None]] = functools.partial(
        _chunk, head, temperature=temperature, entropy=entropy, entropy_gradient=entropy_gradient
    )
    if count > chunk and torch.is_grad_enabled():
        compute = functools.partial(checkpoint, compute, use_reentrant=False, preserve_rng_state=False)
    starts = range(0, count, chunk)
    parts = [compute(hidden[start : start + chunk], targets[start : start + chunk]) for start in starts]
    if len(parts) == 1:
        return parts[0]
    logprobs = torch.cat([logprob for logprob, _ in parts])
    return logprobs, torch.cat([part for _, part in parts if part is not None]) if entropy else None


def _chunk(
    head: Head,
    hidden: torch.Tensor,
    targets: torch.Tensor,
    *,
    temperature: float,
    entropy: bool,
    entropy_gradient: bool,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    logits = head(hidden).float()
    if temperature != 1:
        logits = logits / temperature
    logprobs = torch.log_softmax(logits, dim=-1)
    # Not a gather and a view of it: FSDP hangs its backward hook on the result, and an in-place change would lose it.
    chosen = -torch.nn.functional.nll_loss(logprobs, targets, reduction="none")
    if not entropy:
        return chosen, None
    known = logprobs if entropy_gradient else logprobs.detach()
    # 0 * log 0 would be undefined for a token that the model rules out.
    return chosen, -(known.exp() * known.clamp(min=_LOG_ZERO)).sum(dim=-1)


logger = logging.getLogger(__name__)
_RECOMPILES = 64
"""Variants of one layer: one row or many, with or without mask, with or without gradient, kinds of attention."""


def decoder_layers(model: PreTrainedModel) -> list[nn.Module]:
    """The repeated layers of a model, the units of FSDP: what Hugging Face says must not be split.

    Not those that see images: a rank whose rows show none does not run them, so their weights are gathered with the
    rest of the model.
    """
    names = set(getattr(model, "_no_split_modules", None) or ())
    text = model.get_decoder() if hasattr(model.config, "vision_config") else model
    return [module for module in text.modules() if type(module).__name__ in names]


def set_up_layers(model: PreTrainedModel, config: LearnerConfig) -> None:
    """Apply `compile`, `checkpoint_activations` and `head_float32`, before the model is sharded."""
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


def compile_layers(layers: list[nn.Module], backend: str | Callable[..., Any] = "inductor") -> None:
    """Compile each layer, with changing shapes, backward and forward pass together, so that errors come at once."""
    from torch._dynamo import config as dynamo
    from torch._functorch import config as functorch

    dynamo.recompile_limit = max(_RECOMPILES, dynamo.recompile_limit)
    functorch.force_non_lazy_backward_lowering = True
    for layer in layers:
        layer.forward = torch.compile(layer.forward, dynamic=True, backend=backend)


class _Float32Product(torch.autograd.Function):
    """`hidden weight^T` of bfloat16 matrices in float32, without a float32 copy of the weight; CUDA only."""

    @staticmethod
    def forward(ctx: Any, hidden: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(hidden, weight)
        return torch.mm(hidden, weight.t(), out_dtype=torch.float32)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        hidden, weight = ctx.saved_tensors
        gradient = gradients[0].to(hidden.dtype)
        return gradient @ weight, gradient.t() @ hidden if ctx.needs_input_grad[1] else None


def _float32_head(model: PreTrainedModel) -> None:
    """Let the output layer give logits in float32 that were never rounded to the type of the model."""
    head = model.get_output_embeddings()
    if type(head) is not nn.Linear:
        raise ConfigError(
            f"learner.head_float32: the output layer of {type(model).__name__} is a {type(head).__name__}",
            "set learner.head_float32 to false",
        )

    def forward(hidden: torch.Tensor) -> torch.Tensor:
        if hidden.is_cuda and hidden.dtype == torch.bfloat16:
            product: torch.Tensor = _Float32Product.apply(hidden.flatten(0, -2), head.weight)  # type: ignore[no-untyped-call]
            logits = product.view(*hidden.shape[:-1], -1)
        else:
            logits = nn.functional.linear(hidden.float(), head.weight.float())
        return logits if head.bias is None else logits + head.bias.float()

    head.forward = forward  # type: ignore[method-assign, assignment]


class _Hidden:
    """Hidden states and nothing else; other fields that a model reads (router logits, cross attentions) are None."""

    def __init__(self, last_hidden_state: torch.Tensor) -> None:
        self.last_hidden_state = last_hidden_state

    def __getattr__(self, name: str) -> None:
        if name.startswith("_"):
            raise AttributeError(name)

    def __getitem__(self, place: int) -> torch.Tensor:
        return (self.last_hidden_state,)[place]


class _PassThrough(nn.Module):
    @property
    def decoder(self) -> _PassThrough:
        """Some models (OPT) call `model.decoder` and not `model`."""
        return self

    def forward(self, *_: Any, inputs_embeds: torch.Tensor, **__: Any) -> _Hidden:
        return _Hidden(inputs_embeds)


class Backbone(nn.Module):
    """A Hugging Face model over rows of tokens that may hold several responses to one prompt.

    `vision` is its image side, if it has one.
    """

    def __init__(self, model: PreTrainedModel, vision: Vision | None = None) -> None:
        super().__init__()
        self.model = model.eval()  # dropout would make the importance ratios random
        self.vision = vision
        self.flex = False  # whether the model was set up for block masks

    def hidden(
        self,
        input_ids: torch.Tensor,
        visible_until: torch.Tensor | None,
        position_ids: torch.Tensor | None,
        pixels: Tensors | None = None,
        unseen: Tensors | None = None,
    ) -> torch.Tensor:
        """Last hidden states, shape (rows, width, hidden). For the arguments see `LogProbModel.forward`."""
        extra: dict[str, Any] = {} if position_ids is None else {"position_ids": position_ids}
        if visible_until is not None:
            dtype = self.model.get_input_embeddings().weight.dtype
            extra["attention_mask"] = block_mask(visible_until) if self.flex else dense_mask(visible_until, dtype)
        base = self.model.base_model
        outputs = base(input_ids=input_ids, use_cache=False, **extra, **(pixels or {}))
        hidden: torch.Tensor = outputs.last_hidden_state
        if unseen is not None:
            features = tree_leaves(base.get_image_features(**unseen, return_dict=True).to_tuple())
            hidden = hidden + sum(feature.sum() for feature in features) * 0
        return hidden

    def states(
        self,
        input_ids: torch.Tensor,
        visible_until: torch.Tensor | None,
        position_ids: torch.Tensor | None,
        positions: torch.Tensor,
        **images: Tensors | None,
    ) -> torch.Tensor:
        """Those at the places that predict the targets, shape (n, hidden)."""
        return self.hidden(input_ids, visible_until, position_ids, **images).flatten(0, 1).index_select(0, positions)

    def check(self) -> None:
        """Refuse a model whose results are not what they are taken for; its parameters are gathered."""

    @property
    def vocabulary(self) -> int:
        """Rows of the input embedding; token ids are below."""
        return int(self.model.config.get_text_config().vocab_size)


class LogProbModel(Backbone):
    """Log-probabilities of sampled tokens; `temperature` is that of the engines' softmax.

    The model's own `forward` turns hidden states into logits, with its layers replaced by a pass-through, so output
    layer, soft caps and scales are always the model's.
    """

    def __init__(self, model: PreTrainedModel, *, temperature: float, chunk: int, vision: Vision | None = None) -> None:
        super().__init__(model, vision)
        self.temperature = temperature
        self.chunk = chunk
        head = copy.copy(model)
        head._modules = dict(model._modules)  # noqa: SLF001  (the copy must not change the original)
        head._modules[model.base_model_prefix] = _PassThrough()  # noqa: SLF001
        self._head = (head,)  # in a tuple, so that its modules are not registered a second time

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self._head[0](inputs_embeds=hidden[None], use_cache=False).logits[0]
        return logits

    def forward(
        self,
        *,
        input_ids: torch.Tensor,
        visible_until: torch.Tensor | None,
        position_ids: torch.Tensor | None,
        positions: torch.Tensor,
        targets: torch.Tensor | None,
        entropy: bool = False,
        entropy_gradient: bool = False,
        **images: Tensors | None,
    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor | None]:
        """Log-probabilities of `targets`, and entropies when asked for; float32, shape (n,). Tensors: see `Microbatch`.

        `visible_until` and `position_ids` are None where rows are not shared: without a mask attention takes its fast
        kernels. Without `targets`, the hidden states that predict them, shape (n, hidden). Of `images`, `pixels` are
        those that the rows show, and `unseen` those of one that no row shows: its features are computed and count 0, so
        that all ranks reduce the same gradients.
        """
        states = self.states(input_ids, visible_until, position_ids, positions, **images)
        if targets is None:
            return states
        return token_logprobs(
            self._possible,
            states,
            targets,
            temperature=self.temperature,
            chunk=self.chunk,
            entropy=entropy,
            entropy_gradient=entropy_gradient,
        )

    def _possible(self, hidden: torch.Tensor) -> torch.Tensor:
        """Logits, without the tokens that stand for images: no engine samples them."""
        logits = self.logits(hidden)
        if self.vision is None:
            return logits
        return logits.index_fill(-1, torch.tensor(self.vision.forbidden, device=logits.device), -torch.inf)

    @override
    @torch.no_grad()
    def check(self) -> None:
        """Refuse a model whose own logits differ from ours, before a step is trained on wrong ratios."""
        device = self.model.get_input_embeddings().weight.device
        ids = (torch.arange(8, device=device)[None] * 7 + 3) % self.vocabulary
        with exact_products():
            try:
                ours = self.logits(self.hidden(ids, None, None)[0])
            except (AttributeError, TypeError, RuntimeError) as error:
                raise self._unknown(f"{type(error).__name__}: {error}") from error
            expected = self.model(input_ids=ids, use_cache=False).logits[0]
        # Equal up to the rounding of another order of float32 operations.
        near = 1e-4 * float(expected.abs().max())
        if ours.shape != expected.shape or not torch.allclose(ours, expected, rtol=1e-4, atol=near):
            raise self._unknown("its logits are not those of its output layer on its last hidden states")

    def _unknown(self, why: str) -> ConfigError:
        kind = type(self.model).__name__
        return ConfigError(f"{kind} cannot be trained: {why}", "name another model in model.path, or report the model")


_ROWS: Final = "streamrl_rows"
"""Name, in transformers, of attention that takes a block mask where it gets one, and else is sdpa."""
_BLOCK: Final = 128


def takes_flex(model: PreTrainedModel, device: torch.device, attention: str) -> bool:
    """Set a model up for block masks where its device has fast kernels for them; returns whether."""
    if device.type != "cuda" or attention == "eager":
        return False
    if not (is_torch_flex_attn_available() and model._supports_flex_attn):  # noqa: SLF001
        logger.warning(
            "flex attention is missing for this model or torch: rows are shared up to 2048 tokens only, under a mask of"
            " width^2, and in longer ones each response computes its prompt again"
        )
        return False
    set_rows_attention(model)
    return True


def set_rows_attention(model: PreTrainedModel) -> None:
    from transformers.integrations.flex_attention import flex_attention_forward
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    def attend(module: nn.Module, *inputs: Any, **options: Any) -> tuple[torch.Tensor, torch.Tensor | None]:
        mask = inputs[3] if len(inputs) > 3 else options["attention_mask"]
        forward = flex_attention_forward if isinstance(mask, BlockMask) else sdpa_attention_forward
        found: tuple[torch.Tensor, torch.Tensor | None] = forward(module, *inputs, **options)
        return found

    AttentionInterface.register(_ROWS, attend)
    AttentionMaskInterface.register(_ROWS, sdpa_mask)
    model.set_attn_implementation(_ROWS)


def dense_mask(until: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Additive mask, shape (rows, 1, width, width): a token sees what it continues, padding sees padding."""
    width = until.shape[1]
    columns = torch.arange(width, device=until.device)
    causal = torch.ones(width, width, dtype=torch.bool, device=until.device).tril()
    visible = causal & (columns[:, None] < until[:, None, None, :])
    return torch.zeros(visible.shape, dtype=dtype, device=until.device).masked_fill_(~visible, torch.finfo(dtype).min)


def block_mask(until: torch.Tensor) -> BlockMask:
    """The same mask for flex attention; the width is a multiple of 128."""
    rows, width = until.shape
    blocks = until.view(rows, 1, 1, width // _BLOCK, _BLOCK)
    starts = torch.arange(0, width, _BLOCK, device=until.device)[:, None]
    earlier = starts > starts.T
    whole = earlier & (blocks.amin(-1) >= starts + _BLOCK)
    some = (starts == starts.T) | (earlier & (blocks.amax(-1) > starts) & ~whole)

    def visible(row: torch.Tensor, _: torch.Tensor, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
        return (key <= query) & (query < until[row, key])

    def ordered(found: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        counts, order = found.sum(-1), found.int().argsort(dim=-1, descending=True, stable=True)
        return counts.int(), order.int()

    return BlockMask.from_kv_blocks(*ordered(some), *ordered(whole), BLOCK_SIZE=_BLOCK, mask_mod=visible)


@contextmanager
def exact_products() -> Iterator[None]:
    """Multiply float32 matrices in full precision, so that two ways can be compared."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)
