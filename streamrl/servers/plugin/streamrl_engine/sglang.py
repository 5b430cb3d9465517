"""Weights into a running SGLang server: the loader behind `--custom-weight-loader`, and the hooks that make it safe.

SGLang finds `register` as an entry point, and calls `load` in the scheduler process of each rank.
"""

from __future__ import annotations

import json
import logging
import os
import sys
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch

from . import images
from .files import BadVersion, Landing, Opened, Source, gathered
from .sglang_rehearsal import check_used, rehearse
from .sglang_spans import renamed

LOADER = "streamrl_engine.sglang.load"
_COMPONENT = "sglang.srt.managers.scheduler_components.weight_updater.SchedulerWeightUpdaterManager"
_SCHEDULER = "sglang.srt.managers.scheduler.Scheduler"
_HUGGING_FACE = "sglang.srt.utils.hf_transformers.processor"
_MULTIMODAL = "sglang.srt.multimodal.processors.base_processor.BaseMultimodalProcessor"
FETCH = "streamrl_fetch "
"""With this begins the name of a setting that is none: the rest is the description of a version."""

_log = logging.getLogger(__name__)
_landing = Landing()
_rehearsed: weakref.WeakKeyDictionary[Any, str] = weakref.WeakKeyDictionary()
"""The structure that a model was found to take."""


def register() -> None:
    """Hook the scheduler's update of weights and of memory; SGLang calls this at the start of each of its processes."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    for name, hook in (
        ("update_weights_from_tensor", _update),
        ("release_memory_occupation", _memory("ReleaseMemoryOccupationReqOutput", released=False)),
        ("resume_memory_occupation", _memory("ResumeMemoryOccupationReqOutput", released=True)),
    ):
        HookRegistry.register(f"{_COMPONENT}.{name}", hook, HookType.AROUND)
    HookRegistry.register(f"{_SCHEDULER}.record_weight_version_change", renamed, HookType.AROUND)
    HookRegistry.register(f"{_SCHEDULER}.set_internal_state", _fetch, HookType.AROUND)
    if images.VARIABLE in os.environ:
        HookRegistry.register(f"{_HUGGING_FACE}.get_processor", images.same_processor, HookType.AFTER)
        HookRegistry.register(f"{_MULTIMODAL}.load_mm_data", images.by_tokens, HookType.AROUND)


def load(model: Any, named_tensors: Sequence[tuple[str, torch.Tensor]]) -> None:
    """Replace the weights of `model`; `named_tensors` is one pair, whose name describes the version (`files.Source`).

    With `forget_images` what the image side made of an image, which is kept by its hash alone, is made again.

    `BadVersion`: nothing was changed. `RuntimeError`: the weights may be half replaced, and the process must end.
    """
    problem, known, heads, copied, forget_images = "", False, {}, [], False
    try:
        described = json.loads(named_tensors[0][0])
        forget_images = described.pop("forget_images", False)
        source = _landing.bring(Source(**described), _everyone)
        opened = Opened(source)
        known = _rehearsed.get(model) == source.structure
        if not known:
            heads = {_hub_name(model, name): head for name, head in opened.heads().items()}
            copied = rehearse(model, heads)
    except BadVersion as error:
        problem = str(error)
    if problem := next(filter(None, _everyone(problem)), ""):
        raise BadVersion(problem)
    if not known:
        check_used(heads, [sum(counts) for counts in zip(*_everyone(copied), strict=True)])
        _rehearsed[model] = source.structure
    try:
        model.load_weights((_hub_name(model, name), tensor) for name, tensor in opened.tensors())
    except Exception as error:
        raise RuntimeError(f"the weights of {source.folder} may be half copied: {error}") from error
    kept = getattr(sys.modules.get("sglang.srt.managers.mm_schedule"), "embedding_cache", None)
    if forget_images and kept is not None:
        kept.clear()
    _landing.clear(keep=source)


def _hub_name(model: Any, name: str) -> str:
    """As checkpoints of Qwen2-VL have it: its loader here knows no other names, and in transformers it has others."""
    if type(model).__name__ != "Qwen2VLForConditionalGeneration":
        return name
    return name.replace("model.language_model.", "model.", 1).replace("model.visual.", "visual.", 1)


def _everyone(mine: Any) -> list[Any]:
    from sglang.srt.distributed import get_tp_group

    return gathered(mine, get_tp_group())


def _fetch(original: Callable[..., Any], scheduler: Any, request: Any) -> Any:
    """Bring a version here while the server generates; whether that has ended. No other road waits for no request."""
    name = next(iter(request.server_args), "")
    if not name.startswith(FETCH):
        return original(scheduler, request)
    from sglang.srt.managers import io_struct

    ended = _landing.begin(Source(**json.loads(name.removeprefix(FETCH))), _everyone)
    return io_struct.SetInternalStateReqOutput(updated=ended)


def _update(original: Callable[..., Any], component: Any, request: Any) -> Any:
    """One call does everything, so no session stays open for a caller that died; a refusal is an answer.

    Draft models of speculative decoding keep their weights: the version has none for them.
    """
    if request.load_format != LOADER:
        return original(component, request)
    from sglang.srt.managers import io_struct

    if hasattr(request, "selector"):
        request.selector = "target"
    elif hasattr(request, "disable_draft_model"):
        request.disable_draft_model = True
    sessions = hasattr(component, "_session")
    if sessions and component._session is None:  # noqa: SLF001 - SGLang has no other way to ask
        component.begin_weight_update(io_struct.BeginWeightUpdateReqInput(selector="target"))
    try:
        answer = original(component, request)
    except BadVersion as error:
        _log.error("weights refused: %s", error)
        # The check that the scheduler's own code skipped; all ranks refuse together.
        torch.distributed.barrier(group=component.tp_cpu_group)
        answer = io_struct.UpdateWeightsFromTensorReqOutput(success=False, message=str(error))
    if sessions:
        component.end_weight_update(io_struct.EndWeightUpdateReqInput())
    return answer


def _memory(answer: str, *, released: bool) -> Callable[..., Any]:
    """Name only what is `released` already, or only what is not: the server dies of resuming what was not released."""

    def hook(original: Callable[..., Any], component: Any, request: Any) -> Any:
        from sglang.srt.constants import GPU_MEMORY_ALL_TYPES
        from sglang.srt.managers import io_struct

        tags = request.tags or GPU_MEMORY_ALL_TYPES
        request.tags = [tag for tag in tags if (tag in component.offload_tags) == released]
        return original(component, request) if request.tags else getattr(io_struct, answer)()

    return hook
