"""From a directory to a sharded model, of which each rank reads its own rows, and the layouts of tokens that it takes.

The log-probability of a response must be that of the response alone, whatever stands beside it in a row or in a batch.
Models come with any attention: windows under any name, masks of their own, positions that depend on the longest row. So
the configuration of a model is not trusted. The model is tried, with rows that are longer than each of its windows:

```
later tokens     a sequence, and its beginning alone            differ: refused, no layout gives right numbers
padding, rows    a long and a short row in one batch            differ: one response per pass, with a warning
shared rows      several responses in one row under our mask    differ: narrower rows or none, with a warning
```
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any, Final, TypeAlias

import torch
from safetensors import SafetensorError
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel
from transformers.core_model_loading import Concatenate, MergeModulelist, WeightTransform

from streamrl.cards import check_room
from streamrl.config import ModelConfig, RunConfig
from streamrl.config.learner import LearnerConfig
from streamrl.errors import ConfigError
from streamrl.learner.batch import Limits
from streamrl.learner.model import Backbone, close, decoder_layers, exact_products, set_up_layers
from streamrl.learner.ranks import Ranks

logger = logging.getLogger(__name__)

OwnRows: TypeAlias = dict[nn.Parameter, torch.Tensor]
"""This rank's rows of parameters that are on `meta` themselves, float32 in the host's memory."""
SMALL: Final = 1 << 26
"""Models with fewer parameters are one FSDP unit and stay whole between forward and backward: memory is no concern,
while each unit costs a gather and a scatter."""
_LONGEST_SHARED_ROW: Final = 2048
"""A shared row needs a mask of width^2. Above this width the mask costs more than the shared prompts save."""
_PACKED_PER_HIDDEN: Final = 3
"""Length of packed rows, in hidden sizes. At 3, attention is a third of the work of a row, half of it wasted."""
_NARROWEST: Final = 64
"""A window below this does not narrow shared rows: such rows would save too little to be worth a trial."""
_LEAST: Final = 256
"""Least length of a trial in tokens; longer where the model has a longer window."""
_MOST: Final = 4096
"""Windows above this are not tried, because a trial would take minutes. Shared rows are never that long."""
_TRIES: Final = 3
"""Trials of a mixture of experts. One has to agree, because a rounding error may choose another expert."""
_CHEAP: Final = 2e11
"""Floating-point operations that a trial may cost; above, it runs one layer of each kind."""
_NO_LAYOUT: Final = (AttributeError, TypeError, ValueError, RuntimeError, IndexError)
"""What a model raises when it cannot take a layout."""
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
"""A number with one of these words in its name is no window, unless one of `_WINDOWS` is in the name as well."""
_MASKED: Final = ("sliding_window", "attention_chunk_size")
"""Windows of attention masks that our mask of shared rows replaces, so that such rows must fit into them."""
_BY_LENGTH: Final = ("longrope", "dynamic")
"""Rotary embeddings that change for sequences above a length."""


def load_model(config: ModelConfig, key: str = "model.path") -> PreTrainedModel:
    """Load the causal language model of a run whole, in float32 on the CPU.

    `key` of the run's configuration names the path, for messages. A model with a weight that is not finite is refused
    (ConfigError). Code that comes with a model is never executed.
    """
    model = _read(config, key)
    broken = [name for name, weight in model.named_parameters() if not bool(torch.isfinite(weight).all())]
    if broken:
        raise _not_finite(config, key, broken)
    return model


def load_rows(config: ModelConfig, ranks: Ranks, key: str = "model.path") -> tuple[PreTrainedModel, OwnRows]:
    """As `load_model`, but the model is on `meta`, and this rank reads its own rows alone. Collective.

    A model of which transformers puts rows together from several tensors of its files is read whole and cut then.
    """
    model = _read(config, key, ranks.mesh if ranks.world > 1 else None)
    if ranks.world > 1 and not all(map(_keeps_rows, getattr(model, "_weight_conversions", ()))):
        model = _read(config, key)
    rows: OwnRows = {}
    broken = []

    def keep(name: str, weight: nn.Parameter) -> nn.Parameter:
        each = -(-len(weight) // ranks.world)  # as FSDP cuts
        whole = weight.detach()
        own = whole.to_local() if isinstance(whole, DTensor) else whole[ranks.rank * each : (ranks.rank + 1) * each]
        if not bool(torch.isfinite(own).all()):
            broken.append(name)
        empty = nn.Parameter(torch.empty(weight.shape, dtype=weight.dtype, device="meta"))
        rows[empty] = own
        return empty

    _replace(model, keep)
    if ranks.all_max(len(broken)) != [0]:
        raise _not_finite(config, key, broken or ["a weight in the rows of another rank"])
    return model, rows


def _read(config: ModelConfig, key: str, mesh: DeviceMesh | None = None) -> PreTrainedModel:
    """Read a model in float32; with `mesh` its parameters are DTensors of which only this rank's rows are read."""
    try:
        with _cut_before_reading(mesh) if mesh is not None else nullcontext():
            model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(
                config.path, dtype=torch.float32, attn_implementation=config.attention
            )
    except (OSError, ValueError, KeyError, SafetensorError) as error:
        hint = f"set {key} to a directory of a Hugging Face causal language model"
        where = "exists" if Path(config.path).exists() else "does not exist"
        raise ConfigError(f"{key} {config.path} ({where}) cannot be loaded: {error}", hint) from error
    return model


def _not_finite(config: ModelConfig, key: str, names: list[str]) -> ConfigError:
    return ConfigError(
        f"{key} {config.path}: {', '.join(names[:3])} has values that are not finite",
        "take another checkpoint of this model: nothing can be sampled or learned from this one",
    )


@contextmanager
def _cut_before_reading(mesh: DeviceMesh) -> Iterator[None]:
    """Within the block transformers, which reads only the local rows of a DTensor, makes models of DTensors."""
    read = PreTrainedModel._load_pretrained_model  # noqa: SLF001

    def cut(model: PreTrainedModel, *arguments: Any, **options: Any) -> Any:
        _replace(model, lambda _, weight: nn.Parameter(distribute_tensor(weight, mesh, [Shard(0)], src_data_rank=None)))
        return read(model, *arguments, **options)

    PreTrainedModel._load_pretrained_model = staticmethod(cut)  # noqa: SLF001
    try:
        yield
    finally:
        PreTrainedModel._load_pretrained_model = staticmethod(read)  # noqa: SLF001


def _replace(module: nn.Module, change: Callable[[str, nn.Parameter], nn.Parameter]) -> None:
    """Put what `change` makes of each parameter in all its places: tied parameters stay tied."""
    made: dict[nn.Parameter, nn.Parameter] = {}
    for name, old in list(module.named_parameters(remove_duplicate=False)):
        if old not in made:
            made[old] = change(name, old)
            made[old].requires_grad_(old.requires_grad)
        path, _, key = name.rpartition(".")
        setattr(module.get_submodule(path), key, made[old])


def _keeps_rows(conversion: WeightTransform) -> bool:
    """Whether the rows of a parameter can be made of the same rows of the tensors in the files."""
    steps = [(type(step), getattr(step, "dim", None)) for step in getattr(conversion, "operations", ())]
    return steps in ([], [(MergeModulelist, 0)], [(MergeModulelist, 0), (Concatenate, 1)])


def prepare(
    model: Backbone,
    rows: OwnRows,
    config: RunConfig,
    learner: LearnerConfig,
    ranks: Ranks,
    *,
    small: int,
    exact: Iterable[nn.Module] = (),
) -> tuple[Limits, bool]:
    """Shard a model of `load_rows`, fill it and find out which rows it takes; returns that, and what `shard` returns.

    `learner` is the section as it counts for this model; `small` and `exact` are those of `shard`. Parameters that are
    not trained have the type `model.dtype`: no update needs more digits than the forward pass has. The trial is a copy
    of the model in float32 with the same rows, so that it takes no memory but that of what computes. Collective.
    """
    dtype, offload = getattr(torch, config.model.dtype), "parameters" in learner.offload
    place = torch.device("cpu") if offload else ranks.device
    # In the type of the forward pass what is not trained; else weights, gradients and moments in float32.
    trained = 8 if "optimizer" in learner.offload else 16
    sizes = ((own.numel(), trained if weight.requires_grad else dtype.itemsize) for weight, own in rows.items())
    check_room(place, sum(count * size for count, size in sizes), f"a rank's share of {config.model.path}")
    # Copies, because what safetensors maps cannot be resized; `named` and the trial share them with the model.
    named = {name: rows.pop(weight).to(place, copy=True) for name, weight in model.named_parameters() if weight in rows}
    trial = copy.deepcopy(model)
    shard(trial, ranks.mesh, torch.float32, small=small, offload=offload)
    _fill(trial, named, torch.float32)
    with torch.no_grad():
        one = torch.zeros(1, dtype=torch.int64, device=ranks.device)
        trial(input_ids=one[None], until=None, position_ids=None, positions=one, targets=one)  # FSDP sets itself up
    assert isinstance(trial, FSDPModule)
    trial.unshard()
    limits = row_limits(config, trial)
    trial.reshard()  # it lives until Python looks for cycles
    set_up_layers(model.model, learner)
    whole = shard(model, ranks.mesh, dtype, small=small, exact=exact, offload=offload)
    _fill(model, named, dtype)
    return limits, whole


def _fill(model: nn.Module, rows: Mapping[str, torch.Tensor], dtype: torch.dtype) -> None:
    """Give a sharded model on `meta` its rows; those that are not trained are cast to `dtype` and free their memory."""

    def fill(name: str, empty: nn.Parameter) -> nn.Parameter:
        if name not in rows:
            return empty
        assert isinstance(empty, DTensor)
        local = own = rows[name]
        if not empty.requires_grad and dtype != own.dtype:
            local = own.to(dtype)
            own.untyped_storage().resize_(0)
        mesh, shape, stride = empty.device_mesh, empty.shape, empty.stride()
        return nn.Parameter(DTensor.from_local(local, mesh, empty.placements, shape=shape, stride=stride))

    _replace(model, fill)


def shard(
    model: Backbone,
    mesh: DeviceMesh,
    dtype: torch.dtype,
    *,
    small: int = SMALL,
    exact: Iterable[nn.Module] = (),
    offload: bool = False,
) -> bool:
    """Shard every parameter on dimension 0 over the mesh, in place (FSDP2).

    With `dtype` bfloat16 forward and backward run in it, while weights, gradients and their reduction stay float32; the
    modules of `exact`, which do not overlap, run in float32 whatever `dtype` is. A model with fewer parameters than
    `small` becomes one unit that stays whole between forward and backward (returns True). With `offload`, shards and
    gradients lie on the host, and each unit is on the device only while it computes; on a CPU nothing changes.
    """
    policy = MixedPrecisionPolicy(param_dtype=None if dtype == torch.float32 else dtype, reduce_dtype=torch.float32)
    offload = offload and mesh.device_type != "cpu"
    place = CPUOffloadPolicy() if offload else OffloadPolicy()
    whole = not offload and sum(parameter.numel() for parameter in model.parameters()) < small
    if not whole:
        for layer in reversed(decoder_layers(model.model)):
            fully_shard(layer, mesh=mesh, mp_policy=policy, offload_policy=place, reshard_after_forward=True)
    if dtype != torch.float32:
        float32 = MixedPrecisionPolicy(param_dtype=torch.float32, reduce_dtype=torch.float32)
        for module in exact:
            fully_shard(module, mesh=mesh, mp_policy=float32, offload_policy=place, reshard_after_forward=False)
    fully_shard(model, mesh=mesh, mp_policy=policy, offload_policy=place, reshard_after_forward=False)
    assert isinstance(model, FSDPModule)
    return whole


def row_limits(config: RunConfig, model: Backbone) -> Limits:
    """Limits of rows: what the configuration allows and what the model takes; ConfigError when no layout is right."""
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
        widest = min(learner.tokens_per_microbatch, 4 * text.hidden_size, _LONGEST_SHARED_ROW, *masked)
        shared = trial.widest_shared_row(widest) if (learner.share_prompts or packed) and not alone else 0
    if packed and not shared:
        logger.warning("rows are not packed: the model does not keep to the mask of such rows%s", trial.why)
    return Limits(
        tokens=learner.tokens_per_microbatch,
        longest=longest,
        shared=shared,
        packed=min(shared, _PACKED_PER_HIDDEN * text.hidden_size) if packed else 0,
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
    """Refuse a `model.context` above the length at which the rotary embedding changes for all tokens."""
    found = getattr(text, "rope_parameters", None) or {}
    for rope in (found, *(value for value in found.values() if isinstance(value, Mapping))):
        if rope.get("rope_type") in _BY_LENGTH:
            limit = rope.get("original_max_position_embeddings") or getattr(text, "max_position_embeddings", None)
            if limit and longest > limit:
                raise ConfigError(
                    f"model.context: the {rope['rope_type']} rotary embedding of this model changes in sequences above"
                    f" {limit} tokens, so a log-probability would depend on later tokens",
                    f"set model.context to at most {limit}",
                )


def _windows(values: Mapping[str, Any]) -> set[int]:
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
    """Runs a model, on the CPU and in float32, on the same sequences in several layouts.

    `why` is ": " and the error of the model in the last layout that failed; empty when the numbers differed instead.
    """

    def __init__(self, model: Backbone, longest: int, windows: Iterable[int]) -> None:
        self._model, self._longest, self.why = model, longest, ""
        self._tries = _TRIES if any("expert" in name for name in model.model.config.get_text_config().to_dict()) else 1
        self._windows = sorted(window for window in windows if window <= _MOST)
        below = max((window for window in self._windows if window < longest), default=0)
        self.longest = min(longest, max(_LEAST, below + min(below, _LEAST)))
        if not_tried := [window for window in windows if _MOST < window < longest]:
            logger.warning(
                "the trial of rows is shorter than a window of the model", extra={"windows": sorted(not_tried)}
            )

    def sees_later_tokens(self) -> bool:
        length = self.longest

        def same(ids: Callable[[int], torch.Tensor]) -> bool:
            row = ids(length)
            whole = self._alone(row)
            beginnings = {max(1, length // 2), max(1, length // 8)}
            return all(close(self._alone(row[:end]), whole[:end]) for end in beginnings)

        return not self._agrees(2 * length, same)

    def takes_padding(self) -> bool:
        lengths = self.longest, max(1, self.longest // 3)

        def same(ids: Callable[[int], torch.Tensor]) -> bool:
            rows = [ids(length) for length in lengths]
            batch = torch.stack([row[torch.arange(lengths[0]).clamp(max=len(row) - 1)] for row in rows])
            together = self._model.hidden(batch, None, None)
            return all(close(together[at, : len(row)], self._alone(row)) for at, row in enumerate(rows))

        return self._agrees(2 * sum(lengths), same)

    def widest_shared_row(self, widest: int) -> int:
        """The greatest width at which a row of several responses gives what they give alone; 0: there is none."""
        limits = [limit for limit in reversed(self._windows) if _NARROWEST <= limit < widest]
        why = ""
        for limit in (widest, *limits):
            below = max((window for window in self._windows if window < limit), default=0)
            width = max(16, min(limit, max(_LEAST, 2 * below)))
            prompt = max(1, min(width // 8, self._longest // 2))
            # Many responses, the last ones far from their prompt; and one response that fills the row.
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
        """Whether responses, the first one `first` long, and a second block give in one row what each gives alone."""
        last = max(1, min((width - prompt - first) // 3, self._longest // 2))
        responses = [min(first, self._longest - prompt)]
        while (room := width - prompt - 2 * last - sum(responses)) > 0:
            responses.append(min(max(1, width // 16), self._longest - prompt, room))

        def same(ids: Callable[[int], torch.Tensor]) -> bool:
            head, tail = ids(prompt), ids(2 * last)
            bodies = [ids(length) for length in responses]
            expected = [self._alone(torch.cat([head, body])) for body in bodies]
            sizes = [prompt, *responses, last, last]
            ends = torch.tensor(sizes).cumsum(0)
            # The prompt is seen by all responses; the second block is one sequence.
            ends[0] = ends[len(responses)]
            ends[-2] = ends[-1]
            places = [
                torch.arange(prompt),
                *(torch.arange(size) + prompt for size in responses),
                torch.arange(2 * last),
            ]
            row = torch.cat([head, *bodies, tail])[None]
            until = ends.repeat_interleave(torch.tensor(sizes))[None].to(row.device)
            together = self._model.hidden(row, until, torch.cat(places)[None].to(row.device))[0]
            parts = [expected[0][:prompt], *(states[prompt:] for states in expected), self._alone(tail)]
            return close(together, torch.cat(parts))

        return self._agrees(2 * width + prompt * len(responses), same)

    def _alone(self, row: torch.Tensor) -> torch.Tensor:
        return self._model.hidden(row[None], None, None)[0]

    @torch.no_grad()
    def _agrees(self, tokens: int, same: Callable[[Callable[[int], torch.Tensor]], bool]) -> bool:
        """Whether a trial agrees; each of the tries gets other token ids."""
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
    """Within the block a large model runs only the first layer of each kind; the others pass their input on."""
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
    """Key of a layer: everything but the values of its weights (settings, shapes, configuration)."""
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
