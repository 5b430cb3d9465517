"""Export a checkpoint as a Hugging Face directory without a learner."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import torch
from safetensors import SafetensorError
from transformers import AutoConfig, AutoTokenizer, GenerationConfig, PreTrainedModel
from transformers.utils.logging import disable_progress_bar

from streamrl.atomic import whole_directory
from streamrl.config import ModelConfig, RunConfig
from streamrl.errors import CannotCreate, ConfigError, Refused
from streamrl.images.vision import auto_class, vision_of
from streamrl.learner.checkpoint import FORMAT, Checkpoints, Meta
from streamrl.learner.checkpoint_files import ShardReader, open_shards
from streamrl.learner.model_loading import load_model
from streamrl.store import ObjectStore, run_store
from streamrl.weight_sync.adapter import PREFIX, adapted, merge, write_adapter
from streamrl.weight_sync.manifest import Adapter

logger = logging.getLogger(__name__)
_FILE_BYTES: Final = 2 << 30

OnProgress = Callable[[int, int], None]  # called with bytes read and bytes in all


@dataclass(frozen=True)
class Exported:
    checkpoint: str
    files: list[str]
    bytes: int


def choose_checkpoint(checkpoints: Checkpoints, step: int | None) -> Meta:
    """The checkpoint of a step, without one the newest, compared with its checksums."""
    places = checkpoints.positions()
    fitting = [place for place in places if step is None or place[1] == step]
    if not fitting:
        steps = ", ".join(str(place[1]) for place in places) or "none"
        what = "no checkpoint" if step is None else f"no checkpoint of step {step}"
        raise ConfigError(f"{checkpoints.root} has {what}", f"steps with a checkpoint: {steps}")
    meta = checkpoints.validate(fitting[-1])
    if meta.kind != "model":
        raise Refused(f"ckpt-{meta.name} is of a recording and has no weights", "name the run that trained it")
    if meta.format != FORMAT:
        raise Refused(
            f"ckpt-{meta.name} has format {meta.format}, this version of streamrl reads {FORMAT}",
            "export it with the version of streamrl that wrote it",
        )
    return meta


def export_model(config: RunConfig, run_dir: Path, meta: Meta) -> None:
    """Write the model at the end of a run, with `learner.ema` its average too; to the directory and any store."""
    folder = Checkpoints.of(config, run_dir).fetch(meta)
    store = run_store(config.checkpoint.store, config, "checkpoint.store")
    for name, average in {"model": False, "model-ema": True}.items():
        if average and not config.learner.ema:
            continue
        export_checkpoint(config, folder, meta, run_dir / name, average=average)
        if store is not None:
            copy_model(run_dir / name, store, name)


def copy_model(folder: Path, store: ObjectStore, name: str = "") -> None:
    try:
        store.put_folder(folder, name)
    except OSError as error:
        raise CannotCreate(f"the model cannot be copied: {error}", "bring the store back and try again") from error


def export_checkpoint(
    config: RunConfig,
    folder: Path,
    meta: Meta,
    out: Path,
    *,
    average: bool = False,
    on_progress: OnProgress | None = None,
) -> Exported:
    """Write a checkpoint, or its `average`, as a Hugging Face directory; it appears whole, or what was there stays.

    An adapter is merged into the base model, which is loaded for that, and is also written to the folder `adapter`.
    """
    model, kind = _skeleton(config), "ema" if average else "weight"
    vision = vision_of(config.model)
    frozen = () if vision is None else tuple(f"{model.base_model_prefix}.{name}." for name in vision.modules)
    with open_shards(folder, meta.world) as shards:
        state, adapter = _read(config, model, shards, meta, kind=kind, frozen=frozen, on_progress=on_progress)
    disable_progress_bar()
    try:
        with whole_directory(out) as draft:
            model.save_pretrained(draft, state_dict=state, max_shard_size=_FILE_BYTES)
            _write_tokenizer(draft, config.model)
            if vision is not None:
                vision.save(draft)
            if adapter is not None:
                write_adapter(draft / "adapter", *adapter)
    except (OSError, SafetensorError) as error:
        raise CannotCreate(f"{out} cannot be written: {error}", "make room and export again") from error
    written = sorted(file.name for file in out.glob("*.safetensors"))
    return Exported(meta.name, written, sum((out / name).stat().st_size for name in written))


def _skeleton(config: RunConfig) -> PreTrainedModel:
    dtype: torch.dtype = getattr(torch, config.model.dtype)
    try:
        described = AutoConfig.from_pretrained(config.model.path)
        with torch.device("meta"):
            model: PreTrainedModel = auto_class(config.model).from_config(described, dtype=dtype)
    except (OSError, ValueError, KeyError) as error:
        raise ConfigError(
            f"model.path {config.model.path} cannot be read: {error}", "bring the model that training started from back"
        ) from error
    try:
        settings = GenerationConfig.from_pretrained(config.model.path)
        settings.validate(strict=True)  # others cannot be saved
        model.generation_config = settings
    except (OSError, ValueError) as error:
        logger.info("model exported without generation settings", extra={"error": str(error)})
    return model


def _read(
    config: RunConfig,
    model: PreTrainedModel,
    shards: ShardReader,
    meta: Meta,
    *,
    kind: str,
    frozen: tuple[str, ...],
    on_progress: OnProgress | None,
) -> tuple[dict[str, torch.Tensor], tuple[Adapter, dict[str, torch.Tensor]] | None]:
    """Whole tensors of a checkpoint by their names in `model`, which has no storage, and its adapter.

    Buffers that files of this model hold are not trained, so they come from `model.path`. So do parameters that the
    checkpoint does not have and whose names begin with one of `frozen`.
    """
    dtype: torch.dtype = getattr(torch, config.model.dtype)
    prefix = f"actor/{kind}/"
    stored = {name.removeprefix(prefix) for name in shards.names if name.startswith(prefix)}
    if not stored:
        raise ConfigError(f"ckpt-{meta.name} has no average of the weights", "learner.ema keeps one")
    shapes = {name: parameter.shape for name, parameter in model.named_parameters()}
    buffers = model.state_dict().keys() - dict(model.named_parameters(remove_duplicate=False)).keys()
    about = meta.numbers.get("lora")
    base = {name for name in shapes.keys() - stored if name.startswith(frozen)} if about is None else shapes.keys()
    loaded = load_model(config.model).state_dict() if base or buffers else {}
    if missing := sorted(shapes.keys() - stored - (base & loaded.keys())):
        raise Refused(
            f"ckpt-{meta.name} is of another model than {config.model.path}: it has no {', '.join(missing[:3])}",
            "bring the model that training started from back",
        )
    adapter, modules, values = None, {}, {}
    if about is not None:
        adapter = Adapter(**about)
        values = {name: shards.read(prefix + name) for name in sorted(stored) if name.startswith(PREFIX)}
        modules = adapted(adapter, values)
    state = {name: loaded[name] for name in buffers}
    total, done = sum(map(math.prod, shapes.values())) * dtype.itemsize, 0
    for name in shapes:
        whole = loaded[name] if name in base else shards.read(prefix + name)
        if adapter is not None and (names := modules.get(name.removesuffix(".weight"))):
            magnitude = None if names.magnitude is None else values[names.magnitude]
            whole = merge(whole, values[names.lora_a], values[names.lora_b], scale=adapter.scale, magnitude=magnitude)
        state[name] = whole.to(dtype)
        done += state[name].nbytes
        if on_progress is not None:
            on_progress(done, total)
    return state, None if adapter is None else (adapter, {name: value.to(dtype) for name, value in values.items()})


def _write_tokenizer(folder: Path, model: ModelConfig) -> None:
    source = model.tokenizer or model.path
    try:
        tokenizer = AutoTokenizer.from_pretrained(source)
        if model.chat_template is not None:
            tokenizer.chat_template = model.chat_template.read_text()
    except (OSError, ValueError, KeyError) as error:
        logger.warning("model exported without tokenizer", extra={"source": source, "error": str(error)})
        return
    tokenizer.save_pretrained(folder)
