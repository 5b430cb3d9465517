"""Any Hugging Face causal language model, unmodified, as a module that gives log-probabilities.

`LogProbModel` wraps the model. Everything from token ids to log-probabilities happens inside its `forward`, so that
the output layer is used while FSDP holds the whole parameters. Parameters keep their Hugging Face names below `model.`.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from streamrl.errors import ConfigError
from streamrl.learner.logprobs import token_logprobs
from streamrl.learner.rows import BLOCK, PADDING


class _Hidden:
    """Hidden states and nothing else; whatever more a model looks for (router logits, cross attentions) is None."""

    def __init__(self, last_hidden_state: torch.Tensor) -> None:
        self.last_hidden_state = last_hidden_state

    def __getattr__(self, name: str) -> None:
        if name.startswith("_"):
            raise AttributeError(name)

    def __getitem__(self, place: int) -> torch.Tensor:
        return (self.last_hidden_state,)[place]


class _PassThrough(nn.Module):
    """Stands where the layers of a causal model stand, and returns the hidden states it is given."""

    @property
    def decoder(self) -> _PassThrough:
        """Some models (OPT) call `model.decoder` and not `model`."""
        return self

    def forward(self, *_: Any, inputs_embeds: torch.Tensor, **__: Any) -> _Hidden:
        return _Hidden(inputs_embeds)


class Backbone(nn.Module):
    """A Hugging Face model over rows of tokens that may hold several responses to one prompt.

    Args:
        model: a causal language model, or one without its output layer; it is put into evaluation mode and stays
            there, because dropout would make the importance ratios random.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        super().__init__()
        self.model = model.eval()

    def hidden(
        self, input_ids: torch.Tensor, segments: torch.Tensor | None, position_ids: torch.Tensor | None
    ) -> torch.Tensor:
        """Last hidden states, shape (rows, width, hidden). For the arguments see `LogProbModel.forward`."""
        extra: dict[str, torch.Tensor] = {}
        if segments is not None and position_ids is None:
            extra["attention_mask"] = (segments != PADDING).long()
        elif segments is not None and position_ids is not None:
            dtype = self.model.get_input_embeddings().weight.dtype
            extra = {"attention_mask": shared_mask(segments, dtype), "position_ids": position_ids}
        outputs = self.model.base_model(input_ids=input_ids, use_cache=False, **extra)
        hidden: torch.Tensor = outputs.last_hidden_state
        return hidden

    def states(
        self,
        input_ids: torch.Tensor,
        segments: torch.Tensor | None,
        position_ids: torch.Tensor | None,
        positions: torch.Tensor,
    ) -> torch.Tensor:
        """Last hidden states at the places that predict the targets, shape (n, hidden)."""
        return self.hidden(input_ids, segments, position_ids).flatten(0, 1).index_select(0, positions)

    @torch.no_grad()
    def hidden_width(self) -> int:
        """Width of the last hidden states, by a trial: some models project them."""
        return self.hidden(self._probe(), None, None).shape[-1]

    def _probe(self) -> torch.Tensor:
        """Eight token ids of the vocabulary, shape (1, 8)."""
        return (torch.arange(8, device=self.model.device)[None] * 7 + 3) % self.vocabulary

    @property
    def vocabulary(self) -> int:
        """Rows of the input embedding; token ids are below."""
        return int(self.model.config.get_text_config().vocab_size)


class LogProbModel(Backbone):
    """Log-probabilities of sampled tokens under a causal language model.

    The model's own `forward` turns hidden states into logits, with its layers replaced by a pass-through: output layer,
    soft caps and scales are then the model's, whatever they are.

    Args:
        model: the causal language model; it is put into evaluation mode and stays there, because dropout would make
            the importance ratios random.
        temperature: softmax temperature that the engines sample with.
        chunk: most tokens whose logits exist at the same time.
    """

    def __init__(self, model: PreTrainedModel, *, temperature: float, chunk: int) -> None:
        super().__init__(model)
        self.temperature = temperature
        self.chunk = chunk
        head = copy.copy(model)
        head._modules = dict(model._modules)  # noqa: SLF001  (the copy must not change the original)
        head._modules[model.base_model_prefix] = _PassThrough()  # noqa: SLF001
        self._head = (head,)  # in a tuple, so that its modules are not registered a second time

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Logits of hidden states of shape (n, hidden); shape (n, vocabulary)."""
        logits: torch.Tensor = self._head[0](inputs_embeds=hidden[None], use_cache=False).logits[0]
        return logits

    def forward(
        self,
        *,
        input_ids: torch.Tensor,
        segments: torch.Tensor | None,
        position_ids: torch.Tensor | None,
        positions: torch.Tensor,
        targets: torch.Tensor,
        entropy: bool = False,
        entropy_gradient: bool = False,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return log-probabilities, and entropies when asked for, of `targets`.

        Args:
            input_ids: shape (rows, width), padded on the right.
            segments: shape (rows, width), as in `Microbatch`; None where no row is padded or shared.
            position_ids: shape (rows, width) where rows are shared, else None.
            positions: flat index into (rows x width) of the place that predicts each target, shape (n,).
            targets: shape (n,).
            entropy: also return the entropy of the predicted distribution.
            entropy_gradient: it carries a gradient.

        Returns:
            float32 of shape (n,), and the same or None.
        """
        states = self.states(input_ids, segments, position_ids, positions)
        return self.score(states, targets, entropy=entropy, entropy_gradient=entropy_gradient)

    def score(
        self, states: torch.Tensor, targets: torch.Tensor, *, entropy: bool, entropy_gradient: bool
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """As `forward`, from the hidden states that predict the targets, shape (n, hidden)."""
        return token_logprobs(
            self.logits,
            states,
            targets,
            temperature=self.temperature,
            chunk=self.chunk,
            entropy=entropy,
            entropy_gradient=entropy_gradient,
        )

    @torch.no_grad()
    def check(self) -> None:
        """Compare our path to the logits with the model's own.

        Raises:
            ConfigError: they differ, so the model computes its logits in a way we do not know. It is refused here,
                before a step is trained on wrong ratios.
        """
        ids = self._probe()
        with exact_products():
            try:
                ours = self.logits(self.hidden(ids, None, None)[0])
            except (AttributeError, TypeError, RuntimeError) as error:
                raise self._unknown(f"{type(error).__name__}: {error}") from error
            expected = self.model(input_ids=ids, use_cache=False).logits[0]
        if not close(ours, expected):
            raise self._unknown("its logits are not those of its output layer on its last hidden states")

    def _unknown(self, why: str) -> ConfigError:
        kind = type(self.model).__name__
        return ConfigError(f"{kind} cannot be trained: {why}", "name another model in model.path, or report the model")


def shared_mask(segments: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Additive attention mask of rows with several responses, shape (rows, 1, width, width).

    A token sees what is before it in its own response and in the prompt of its block. Padding sees padding.
    """
    width = segments.shape[1]
    keys, queries = segments[:, None, None, :], segments[:, None, :, None]
    causal = torch.ones(width, width, dtype=torch.bool, device=segments.device).tril()
    visible = causal & ((keys == queries) | (keys == queries - queries % BLOCK))
    return torch.zeros(visible.shape, dtype=dtype, device=segments.device).masked_fill_(
        ~visible, torch.finfo(dtype).min
    )


@contextmanager
def exact_products() -> Iterator[None]:
    """Within the block float32 matrices are multiplied in full precision, so that two ways can be compared."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


def close(ours: torch.Tensor, expected: torch.Tensor) -> bool:
    """Equal up to the rounding of another order of float32 operations, relative to the largest value."""
    scale = float(expected.abs().max())
    return ours.shape == expected.shape and torch.allclose(ours, expected, rtol=1e-4, atol=1e-4 * scale)
