"""Which rows a model can be given, found by a trial when the run starts.

A log-probability must be that of the sequence alone, whatever stands beside it. Models come with any attention: windows
under any name, masks of their own, positions that depend on the longest row. So it is not read off their configuration
but tried, with rows longer than every window in it:

```
later tokens     a sequence and its beginning                 differ: refused, no layout is right
padding, rows    a long and a short row in one batch          differ: each row alone, with a warning
shared rows      several responses in a row under our mask    differ: narrower rows, or none, with a warning
```
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Final

import torch
from torch import nn
from transformers import PreTrainedConfig

from streamrl.config import RunConfig
from streamrl.errors import ConfigError
from streamrl.learner.batch import BLOCK, PADDING, Limits
from streamrl.learner.model import Backbone, close, decoder_layers, exact_products

logger = logging.getLogger(__name__)

LONGEST_SHARED_ROW = 2048
"""A shared row needs a mask of width^2; beyond this the mask costs more than the prompts it saves."""
PACKED_PER_HIDDEN = 3
"""Length of packed rows in hidden sizes: a third of the work of a row is attention then, half of it for nothing."""
_NARROWEST: Final = 64
"""Shared rows narrower than this are not worth a trial of their own."""
_LEAST: Final = 256
"""Tokens of a trial where the configuration has no window above it."""
_MOST: Final = 4096
"""Windows above this are not tried: a trial would cost minutes. Shared rows are never that long."""
_TRIES: Final = 3
"""Trials of a mixture of experts, of which one has to agree: a rounding error may choose another expert."""
_CHEAP: Final = 2e11
"""Operations that a trial may cost with all layers; above, it runs one layer of each kind."""
_NO_LAYOUT: Final = (AttributeError, TypeError, ValueError, RuntimeError, IndexError)
"""What a model raises that does not take the arguments of a layout."""
_WINDOWS: Final = ("window", "chunk", "block", "local", "stride", "span", "sliding")
_DIMENSIONS: Final = (
    "hidden",
    "inter",
    "vocab",
    "head",
    "num_",
    "n_",
    "emb",
    "ffn",
    "inner",
    "dim",
    "rank",
    "token",
    "theta",
)
"""Numbers of a configuration with such a word in their name, and none of `_WINDOWS`, are no windows."""
_MASKED: Final = ("sliding_window", "attention_chunk_size")
"""Windows of masks that ours replaces."""
_BY_LENGTH: Final = ("longrope", "dynamic")
"""Rotary embeddings that are other ones in sequences above a length."""


def row_limits(config: RunConfig, model: Backbone) -> Limits:
    """Limits of rows: what the configuration allows and what the model takes.

    Raises:
        ConfigError: the model fails on a sequence alone, or log-probabilities depend on later tokens; no layout of
            rows gives right ones.
    """
    text = model.model.config.get_text_config()
    learner = config.learner
    longest = min(config.model.context, getattr(text, "max_position_embeddings", None) or config.model.context)
    if longest > learner.tokens_per_microbatch:
        logger.warning(
            "samples above learner.tokens_per_microbatch get a pass of their own, which that does not bound",
            extra={"longest": longest, "tokens_per_microbatch": learner.tokens_per_microbatch},
        )
    _check_rotary(text, longest)
    trial = _Trial(model, longest, _windows(text.to_dict()))
    with exact_products():
        if trial.sees_later_tokens():
            raise _refused(config, type(model.model).__name__, trial)
        alone = not trial.takes_padding()
        if alone:
            logger.warning(
                "each response is computed in a pass of its own: padding or other rows change the model%s", trial.why
            )
        packed = learner.rows == "packed"
        masked = [getattr(text, name, None) or learner.tokens_per_microbatch for name in _MASKED]
        widest = min(learner.tokens_per_microbatch, 4 * text.hidden_size, LONGEST_SHARED_ROW, *masked)
        shared = trial.widest_shared_row(widest) if (learner.share_prompts or packed) and not alone else 0
    if packed and not shared:
        logger.warning("rows are not packed: the model does not keep to the mask of such rows%s", trial.why)
    return Limits(
        tokens=learner.tokens_per_microbatch,
        longest=longest,
        shared=shared,
        packed=min(shared, PACKED_PER_HIDDEN * text.hidden_size) if packed else 0,
        share_prompts=learner.share_prompts,
        hidden=text.hidden_size,
        alone=alone,
    )


def _refused(config: RunConfig, name: str, trial: _Trial) -> ConfigError:
    if trial.why:
        return ConfigError(
            f"{name} cannot be trained: it fails on a sequence of {trial.longest} tokens{trial.why}",
            "set model.context to what the model takes, or name another in model.path" + _try_eager(config),
        )
    return ConfigError(
        f"{name} cannot be trained: what it predicts at a token depends on later tokens",
        "name a causal model in model.path" + _try_eager(config),
    )


def _try_eager(config: RunConfig) -> str:
    return ", or try model.attention: eager" if config.model.attention != "eager" else ""


def _check_rotary(text: PreTrainedConfig, longest: int) -> None:
    """Refuse sequences in which the place of a token would depend on the length of the whole.

    Raises:
        ConfigError: `model.context` goes beyond the length at which the rotary embedding becomes another one.
    """
    found = getattr(text, "rope_parameters", None) or {}
    for rope in (found, *(value for value in found.values() if isinstance(value, Mapping))):
        if rope.get("rope_type") in _BY_LENGTH:
            limit = rope.get("original_max_position_embeddings") or getattr(text, "max_position_embeddings", None)
            if limit and longest > limit:
                raise ConfigError(
                    f"model.context: the {rope['rope_type']} rotary embedding of this model is another one in sequences"
                    f" above {limit} tokens, so a log-probability would depend on tokens that come later",
                    f"set model.context to at most {limit}",
                )


def _windows(values: Mapping[str, Any]) -> set[int]:
    """All numbers of a configuration that may be windows of attention, whatever they are called."""
    found: set[int] = set()
    for key, value in values.items():
        name = str(key)
        if isinstance(value, Mapping):
            found |= _windows(value)
        elif isinstance(value, list | tuple):
            for item in value:
                found |= _windows(item if isinstance(item, Mapping) else {name: item})
        known = any(word in name for word in _WINDOWS) or not any(word in name for word in _DIMENSIONS)
        if known and isinstance(value, int) and not isinstance(value, bool) and value > 1:
            found.add(value)
    return found


class _Trial:
    """Runs a model on the same sequences in several ways.

    Attributes:
        why: ": " and the error of the model in the layout that did not agree last; empty: it gave other numbers.

    Args:
        model: on the CPU, in float32.
        longest: longest sequence.
        windows: that attention may have.
    """

    def __init__(self, model: Backbone, longest: int, windows: Iterable[int]) -> None:
        self._model, self._longest, self.why = model, longest, ""
        self._tries = _TRIES if any("expert" in name for name in model.model.config.get_text_config().to_dict()) else 1
        self._windows = sorted(window for window in windows if window <= _MOST)
        if not_tried := [window for window in windows if _MOST < window < longest]:
            logger.warning(
                "the trial of rows is shorter than a window of the model", extra={"windows": sorted(not_tried)}
            )

    @property
    def longest(self) -> int:
        """Tokens of the longest sequence that is tried."""
        return self._length(self._longest)

    def sees_later_tokens(self) -> bool:
        """Whether the hidden states of a beginning are others than in the whole sequence, or there are none."""
        length = self.longest

        def same(ids: Callable[[int], torch.Tensor]) -> bool:
            row = ids(length)
            whole = self._alone(row)
            beginnings = {max(1, length // 2), max(1, length // 8)}
            return all(close(self._alone(row[:end]), whole[:end]) for end in beginnings)

        return not self._agrees(2 * length, same)

    def takes_padding(self) -> bool:
        """Whether rows of unlike lengths give in one batch what they give alone."""
        lengths = self.longest, max(1, self.longest // 3)

        def same(ids: Callable[[int], torch.Tensor]) -> bool:
            rows = [ids(length) for length in lengths]
            batch = torch.zeros(2, lengths[0], dtype=torch.long, device=rows[0].device)
            segments = torch.full_like(batch, PADDING)
            for place, row in enumerate(rows):
                batch[place, : len(row)], segments[place, : len(row)] = row, 0
            together = self._model.hidden(batch, segments, None)
            return all(close(together[at, : len(row)], self._alone(row)) for at, row in enumerate(rows))

        return self._agrees(2 * sum(lengths), same)

    def widest_shared_row(self, widest: int) -> int:
        """The longest row with several responses that gives what they give alone; 0: none does."""
        limits = [limit for limit in reversed(self._windows) if _NARROWEST <= limit < widest]
        why = ""
        for limit in (widest, *limits):
            below = max((window for window in self._windows if window < limit), default=0)
            width = max(16, min(limit, max(_LEAST, 2 * below)))
            prompt = max(1, min(width // 8, self._longest // 2))
            # Many responses, far from their prompt; and one that fills the row.
            if self._shares(width, prompt, 5 * width // 8) and self._shares(width, 1, width - 3):
                if limit < widest:
                    logger.warning(
                        "rows with several responses are narrower: wider ones change what the model computes%s", why
                    )
                return limit
            why = self.why
        logger.warning(
            "prompts are not shared: the model does not keep to the mask of rows with several responses%s", why
        )
        return 0

    def _shares(self, width: int, prompt: int, first: int) -> bool:
        """Whether a row of several responses, the first one of that length, and of a second block is as each alone."""
        last = max(1, min((width - prompt - first) // 3, self._longest // 2))
        responses = [min(first, self._longest - prompt)]
        while (room := width - prompt - 2 * last - sum(responses)) > 0:
            responses.append(min(max(1, width // 16), self._longest - prompt, room))

        def same(ids: Callable[[int], torch.Tensor]) -> bool:
            head, tail = ids(prompt), ids(2 * last)
            bodies = [ids(length) for length in responses]
            expected = [self._alone(torch.cat([head, body])) for body in bodies]
            sizes = [prompt, *responses, last, last]
            numbers = torch.tensor([*range(len(responses) + 1), BLOCK, BLOCK + 1])
            places = [
                torch.arange(prompt),
                *(torch.arange(size) + prompt for size in responses),
                torch.arange(2 * last),
            ]
            row = torch.cat([head, *bodies, tail])[None]
            segments = numbers.repeat_interleave(torch.tensor(sizes))[None].to(row.device)
            together = self._model.hidden(row, segments, torch.cat(places)[None].to(row.device))[0]
            parts = [expected[0][:prompt], *(states[prompt:] for states in expected), self._alone(tail)]
            return close(together, torch.cat(parts))

        return self._agrees(2 * width + prompt * len(responses), same)

    def _length(self, limit: int) -> int:
        below = max((window for window in self._windows if window < limit), default=0)
        return min(limit, max(_LEAST, below + min(below, _LEAST)))

    def _alone(self, row: torch.Tensor) -> torch.Tensor:
        """Hidden states of one sequence with nothing beside it, shape (tokens, hidden)."""
        return self._model.hidden(row[None], None, None)[0]

    @torch.no_grad()
    def _agrees(self, tokens: int, same: Callable[[Callable[[int], torch.Tensor]], bool]) -> bool:
        """Whether one of some trials agrees; each gets other ids."""
        device = self._model.model.device
        with _few_layers(self._model, tokens):
            for seed in range(self._tries):
                random = torch.Generator().manual_seed(seed)

                def ids(count: int, random: torch.Generator = random) -> torch.Tensor:
                    return torch.randint(self._model.vocabulary, (count,), generator=random).to(device)

                try:
                    if same(ids):
                        return True
                except _NO_LAYOUT as error:
                    self.why = f": {type(error).__name__}: {error}"
                    return False
        self.why = ""
        return False


@contextmanager
def _few_layers(model: Backbone, tokens: int) -> Iterator[None]:
    """Within the block a large model has only the first of its layers of each kind: what one does, all of them do."""
    layers = decoder_layers(model.model)
    work = 2.0 * tokens * sum(parameter.numel() for parameter in model.model.parameters())
    kinds = [_kind(layer, place, len(layers), model) for place, layer in enumerate(layers)] if work > _CHEAP else []
    first = {kind: kinds.index(kind) for kind in kinds}
    left_out = [layers[place] for place, kind in enumerate(kinds) if first[kind] != place]
    kept = [layers[place] for place in first.values()]
    rest: dict[type, tuple[Any, ...] | None] = {}

    def note(module: nn.Module, _: Any, output: Any) -> None:
        rest[type(module)] = tuple(output[1:]) if isinstance(output, tuple) else None

    def pass_on(kind: type) -> Callable[..., Any]:
        def forward(*args: Any, **kwargs: Any) -> Any:
            hidden = args[0] if args else kwargs["hidden_states"]
            return hidden if rest[kind] is None else (hidden, *(rest[kind] or ()))

        return forward

    hooks = [layer.register_forward_hook(note) for layer in kept]
    for layer in left_out:
        layer.forward = pass_on(type(layer))
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()
        for layer in left_out:
            del layer.forward


def _kind(layer: nn.Module, place: int, count: int, model: Backbone) -> str:
    """What tells a layer from others but its weights: settings of all of its modules, shapes, and its configuration."""
    lists = [value for value in model.model.config.get_text_config().to_dict().values() if isinstance(value, list)]
    facts: list[object] = [value[place] for value in lists if len(value) == count]
    for name, module in layer.named_modules():
        facts += [name, type(module).__name__]
        facts += sorted(
            f"{key}={value}"
            for key, value in vars(module).items()
            if isinstance(value, int | float | str) and not any(word in key for word in ("idx", "index", "layer_"))
        )
    return repr([facts, [parameter.shape for parameter in layer.parameters()]])
