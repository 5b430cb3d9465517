# mypy: disable-error-code=misc
# vLLM is not installed where mypy runs.
"""New weights inside vLLM's worker processes, versions 0.32 and 0.33.

Loaded with `--worker-extension-cls streamrl_engine.vllm.WorkerExt` and
`--weight-transfer-config '{"backend":"streamrl"}'`; importing it registers the backend.

The order of calls: `/collective_rpc streamrl_check` while the server generates, until the files are here, then, paused,
`/start_weight_update`, `/update_weights`, `/finish_weight_update`. A refused check has changed nothing. After a failed
`/update_weights` the server dies in its first step instead of sampling from a mixture.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from vllm.config import set_current_vllm_config
from vllm.distributed.parallel_state import get_pp_group, get_tp_group
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload
from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info
from vllm.model_executor.model_loader.reload.meta import get_numel_loaded, restore_layer_on_meta, to_meta_tensor
from vllm.model_executor.model_loader.reload.utils import get_layer_params_buffers, get_layer_tensors
from vllm.model_executor.model_loader.weight_utils import default_weight_loader
from vllm.utils.torch_utils import set_default_torch_dtype

from .files import BadVersion, Head, Landing, Opened, Source, gathered, torch_dtype

logger = logging.getLogger(__name__)
BUSY = "busy"  # the files are on their way: the client asks again
Table = Mapping[str, Head]
_SMALL = {torch.int8, torch.float8_e4m3fn}


@dataclass
class Init(WeightTransferInitInfo): ...


@dataclass
class Update(WeightTransferUpdateInfo):
    """One whole version; `source` has the fields of `streamrl_engine.files.Source`."""

    source: dict[str, Any]


class StreamrlEngine(WeightTransferEngine[Init, Update]):
    """Loads a version from files through the model's own loaders, all of it within one call."""

    init_info_cls = Init
    update_info_cls = Update
    supports_draft_weight_update = False

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._landing = Landing()
        self._checked: Mapping[str, Any] = {}
        self._local: Source
        self._opened: Opened | None = None
        self._rehearsed = ""

    def init_transfer_engine(self, init_info: Init) -> None: ...
    def start_weight_update(self) -> None:
        # A client that dies before `update_weights` leaves a whole model.
        ...

    def finish_weight_update(self) -> None:
        # vLLM records the version's name by itself.
        ...

    def shutdown(self) -> None:
        self._landing.clear()

    def check(self, source: Mapping[str, Any]) -> str:
        """Bring the files here, in a thread, and open them; the model is not changed. Returns "", `BUSY`, or a problem.

        The first version of a structure is also shown to the model's loaders, which must take all of it.
        """
        if not self._landing.begin(Source(**source), _everyone):
            return BUSY
        return _together(lambda: self._check(source))

    def _check(self, source: Mapping[str, Any]) -> None:
        local = self._landing.bring(Source(**source), _everyone)
        opened = Opened(local)
        if local.structure != self._rehearsed:
            heads, ranks = opened.heads(), self.parallel_config.tensor_parallel_size
            ours = check_types(self.model, heads)
            rehearse(self.model, heads, ranks, strict=ours or self.vllm_config.quant_config is None)
            self._rehearsed = local.structure
        self._checked, self._local, self._opened = source, local, opened

    def update_weights(self, update_info: dict[str, Any]) -> None:
        """Replace all weights. The base class's method asks for an accelerator."""
        self.receive_weights(self.parse_update_info(update_info))

    def receive_weights(self, update_info: Update) -> None:
        """Load the version that was checked last. After a `BadVersion` the model samples no more, on no rank."""
        # Graphs do not call `forward`; without it a rank that is whole would wait in a layer for the one that is not.
        self.model.forward = self.model.compute_logits = _no_step
        if problem := _together(lambda: self._load(update_info.source)):
            # vLLM reads the ranks' answers in turn and stops at the first error, so answers of later ranks would be
            # taken as answers to the next call. Therefore only the last rank ever raises, for whichever rank it was.
            if all(group.is_last_rank for group in (get_tp_group(), get_pp_group())):
                raise BadVersion(problem)
            return
        del self.model.forward, self.model.compute_logits
        self._opened = None
        self._landing.clear(keep=self._local)

    def _load(self, source: Mapping[str, Any]) -> None:
        if source != self._checked or self._opened is None:
            raise BadVersion("this version is not the one that was checked last")
        with set_default_torch_dtype(self.model_config.dtype):  # oneDNN's int8 layers are made for it
            initialize_layerwise_reload(self.model)
            self.model.load_weights(self._opened.tensors())
            finalize_layerwise_reload(self.model, self.model_config)
        if self.device.type == "cpu":
            _repack(self.model)
        else:
            torch.accelerator.synchronize()


def _everyone(mine: Any) -> list[Any]:
    return [each for stage in gathered(gathered(mine, get_tp_group()), get_pp_group()) for each in stage]


def _together(work: Callable[[], None]) -> str:
    """Do the same on all ranks; returns the first problem that one of them has, empty when none."""
    problem = ""
    try:
        work()
    except Exception as error:
        problem = str(error) if isinstance(error, BadVersion) else f"{type(error).__name__}: {error}"
        logger.warning("refused on this rank: %s", problem, exc_info=not isinstance(error, BadVersion))
        problem = problem or type(error).__name__
    return next(filter(None, _everyone(problem)), "")


def _no_step(*_: Any, **__: Any) -> Any:
    raise RuntimeError("an update of the weights failed here: they are a mixture")


class WorkerExt:
    """Methods for `/collective_rpc`; vLLM makes it a base of its worker class."""

    weight_transfer_engine: Any
    vllm_config: Any
    _weight_update_active: bool

    def streamrl_check(self, source: dict[str, Any]) -> str:
        # The session of a client that did not come back is forgotten: vLLM would refuse the next one because of it.
        self._weight_update_active = False
        with set_current_vllm_config(self.vllm_config):
            return str(self.weight_transfer_engine.check(source))


def check_types(model: Any, heads: Table) -> bool:
    """Whether the version is quantised by us; `BadVersion`: not as the model is, whose loaders would cast it."""
    layers = [get_layerwise_info(layer).restore_metadata[0] for layer in model.modules()]
    held = {tensor.dtype for params in layers for tensor in params.values()} & _SMALL
    offered = {torch_dtype(head.dtype) for head in heads.values()} & _SMALL
    if offered != held:
        raise BadVersion(
            f"the version has {_types(offered)} weights, this server was started for {_types(held)} ones: start it with"
            " the flags of the run's weights.quantize (docs/guides/speed-and-memory.md)"
        )
    return bool(offered)


def _types(found: set[torch.dtype]) -> str:
    return ", ".join(str(each).removeprefix("torch.") for each in found) or "unquantised"


@torch.no_grad()
def rehearse(model: Any, heads: Table, ranks: int, strict: bool) -> None:
    """Let the model's own loaders load tensors of these types and shapes into nothing, and count what they took.

    A tensor may be spread over `ranks`. With `strict` (not where others quantised the model) every element of every
    parameter must be covered. `BadVersion`: an unknown name, another shape, a missing tensor, or a part of a fused one.
    """
    loaded: dict[int, int] = {}
    wanted = _parameters(model)
    with _on_nothing(model, loaded, ranks):
        try:
            model.load_weights((name, _blank(head)) for name, head in heads.items())
        except BadVersion:
            raise
        except Exception as error:  # the loaders raise whatever they like: assertions, KeyError, RuntimeError
            raise BadVersion(f"the model's loaders refuse it: {type(error).__name__}: {str(error)[:300]}") from error
    if not strict:
        return
    for names, sizes in wanted:
        # A tied parameter comes under one of its names, so the best covered counts.
        short = min(size - loaded.get(key, 0) for key, size in sizes)
        if short > 0:
            raise BadVersion(f"{names[0]} is not covered: {short} of its elements are in no tensor of the version")


def _parameters(model: torch.nn.Module) -> list[tuple[list[str], list[tuple[int, int]]]]:
    """Names of each parameter, and for each of its layers its key in the count and the elements it must get."""
    groups: dict[int, tuple[list[str], list[tuple[int, int]]]] = {}
    for prefix, layer in model.named_modules():
        params, _ = get_layer_params_buffers(layer)
        blank, _ = get_layerwise_info(layer).restore_metadata
        bias = {name: param for name, param in params.items() if name == "bias"}  # vLLM makes no template of one
        for name, template in (bias | blank).items():  # what was derived from the weights is not here
            param, size = params.get(name, template), template.numel()
            if size <= 1:
                continue  # filled, not copied, by vLLM's loaders
            if hasattr(layer, "num_embeddings_padded"):
                size = 1  # its rows are padded; its loader compares the real ones itself
            names, sizes = groups.setdefault(id(param), ([], []))
            names.append(f"{prefix}.{name}" if prefix else name)
            sizes.append((_key(layer, name), size))
    return list(groups.values())


@contextmanager
def _on_nothing(model: torch.nn.Module, loaded: dict[int, int], ranks: int) -> Iterator[None]:
    """Replace all parameters by meta tensors whose loaders only count, and put them back."""
    before: list[tuple[torch.nn.Module, Any, set[str]]] = []
    loaders: list[tuple[torch.Tensor, Any]] = []
    try:
        for layer in model.modules():
            transient = set(layer._non_persistent_buffers_set)  # noqa: SLF001 - as vLLM's own reload does
            # A weight that oneDNN has packed is None, and has to be that again.
            tensors = dict(layer._parameters), get_layer_params_buffers(layer)[1]  # noqa: SLF001
            before.append((layer, tensors, transient))
            restore_layer_on_meta(layer, get_layerwise_info(layer))
            for name, tensor in get_layer_tensors(layer).items():
                original = getattr(tensor, "weight_loader", None)
                loaders.append((tensor, original))
                tensor.weight_loader = _counting(layer, name, _plain(original), loaded, ranks)
        yield
    finally:
        for tensor, original in reversed(loaders):
            if original is None:
                del tensor.weight_loader
            else:
                tensor.weight_loader = original
        for layer, (params, buffers), transient in before:
            for name in get_layer_tensors(layer):
                delattr(layer, name)
            for name, param in params.items():
                layer.register_parameter(name, param)
            for name, buffer in buffers.items():
                layer.register_buffer(name, buffer, persistent=name not in transient)


def _plain(loader: Any) -> Any:
    # vLLM leaves its wrapper on the templates of an earlier update; outside of an update the wrapper loads nothing.
    while getattr(loader, "__name__", "") == "online_process_loader":
        loader = loader.__wrapped__
    return loader or default_weight_loader


def _counting(
    layer: torch.nn.Module, name: str, original: Callable[..., Any], loaded: dict[int, int], ranks: int
) -> Callable[..., Any]:
    signature = inspect.signature(original)

    def load(*args: Any, **kwargs: Any) -> Any:
        bound = signature.bind(*args, **kwargs)
        bound.apply_defaults()
        first = next(iter(bound.arguments))
        if not bound.arguments[first].is_meta:
            bound.arguments[first] = to_meta_tensor(bound.arguments[first])
        taken, result = get_numel_loaded(original, bound)
        offered = next((v.numel() for v in list(bound.arguments.values())[1:] if isinstance(v, torch.Tensor)), 0)
        if 0 < taken * ranks < offered and not hasattr(layer, "num_embeddings_padded"):
            raise BadVersion(f"only {taken} of {offered} elements would fit into {name} of {type(layer).__name__}")
        loaded[_key(layer, name)] = loaded.get(_key(layer, name), 0) + taken
        return result

    return load


def _key(layer: torch.nn.Module, name: str) -> int:
    return hash((id(layer), name))


def _blank(head: Head) -> torch.Tensor:
    # Memory that is never written is never allocated, so a model of any size needs no space here.
    return torch.empty(head.shape, dtype=torch_dtype(head.dtype))


def _repack(model: torch.nn.Module) -> None:
    """Pack again the layers that keep a packed copy of a weight that another layer owns (tied heads)."""
    from vllm.model_executor.layers.utils import dispatch_cpu_unquantized_gemm

    for layer in model.modules():
        weight = getattr(layer, "weight", None)
        if hasattr(layer, "cpu_linear") and isinstance(weight, torch.Tensor) and weight.numel() and weight.ndim == 2:
            dispatch_cpu_unquantized_gemm(layer, remove_weight=False)


WeightTransferEngineFactory.register_engine("streamrl", StreamrlEngine)
