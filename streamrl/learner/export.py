"""Export a checkpoint as a Hugging Face directory without a learner, one tensor at a time."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import orjson
import torch
from safetensors.torch import save_file
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, GenerationConfig, PreTrainedModel
from transformers.core_model_loading import revert_weight_conversion

from streamrl.atomic import whole_directory
from streamrl.config import ModelConfig, RunConfig
from streamrl.errors import CannotCreate, ConfigError, Refused
from streamrl.learner.checkpoint import FORMAT, Checkpoints, Meta
from streamrl.learner.checkpoint_files import ShardReader, open_shards
from streamrl.learner.model_loading import load_model
from streamrl.store import ObjectStore, run_store
from streamrl.weight_sync.adapter import PREFIX, merge, names_of, write_adapter
from streamrl.weight_sync.manifest import Adapter

logger = logging.getLogger(__name__)
_FILE_BYTES: Final = 2 << 30
"""Values in one file of the directory; as much is held in memory."""

OnProgress = Callable[[int, int], None]
"""Called with bytes written and bytes in all."""


@dataclass(frozen=True)
class Exported:
    checkpoint: str
    files: list[str]
    bytes: int


def choose_checkpoint(checkpoints: Checkpoints, step: int | None) -> Meta:
    """Choose a checkpoint (the newest without a step), read it whole and compare it with its checksums."""
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
    """Write the model at the end of a run to `RUN_DIR/model`, with `learner.ema` its average to `model-ema` as well.

    With `checkpoint.store` they are copied there, too. CannotCreate: one could not be written, or copied.
    """
    folder = Checkpoints.of(config, run_dir).fetch(meta)
    store = run_store(config.checkpoint.store, config, "checkpoint.store")
    for name, average in {"model": False, "model-ema": True}.items():
        if average and not config.learner.ema:
            continue
        export_checkpoint(config, folder, meta, run_dir / name, average=average)
        if store is not None:
            copy_model(run_dir / name, store, name)


def copy_model(folder: Path, store: ObjectStore, name: str = "") -> None:
    """Copy an exported directory to a store; CannotCreate when that fails."""
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
    """Write a checkpoint as a Hugging Face directory, in `model.dtype`; it appears whole, and replaces another.

    An adapter is merged into the base model, which is loaded for that, and is also written to the folder `adapter`.
    `average` writes the average of the weights (`learner.ema`). When the directory cannot be written (CannotCreate),
    what was there before is still there.
    """
    model = _skeleton(config)
    with open_shards(folder, meta.world) as shards:
        source = _Source(config, shards, meta, "ema" if average else "weight")
        names = [name for name, _ in model.named_parameters()]
        source.check(names)
        try:
            with whole_directory(out) as draft:
                files = _write(draft, model, source, names, on_progress)
                _write_rest(draft, model, config, files)
                source.write_adapter(draft / "adapter")
        except OSError as error:
            raise CannotCreate(f"{out} cannot be written: {error}", "make room and export again") from error
    written = [name for name in sorted(files) if name.endswith(".safetensors")]
    return Exported(meta.name, written, sum((out / name).stat().st_size for name in written))


def _skeleton(config: RunConfig) -> PreTrainedModel:
    dtype: torch.dtype = getattr(torch, config.model.dtype)
    try:
        described = AutoConfig.from_pretrained(config.model.path)
        with torch.device("meta"):
            model: PreTrainedModel = AutoModelForCausalLM.from_config(described, dtype=dtype)
    except (OSError, ValueError, KeyError) as error:
        raise ConfigError(
            f"model.path {config.model.path} cannot be read: {error}", "bring the model that training started from back"
        ) from error
    model.config.architectures = [type(model).__name__]
    return model


class _Source:
    """Whole parameters from a checkpoint, by Hugging Face name; `kind` is `weight`, or `ema` for the average."""

    def __init__(self, config: RunConfig, shards: ShardReader, meta: Meta, kind: str) -> None:
        self._config, self._shards, self._meta = config, shards, meta
        self._prefix = f"actor/{kind}/"
        self._dtype: torch.dtype = getattr(torch, config.model.dtype)
        self._stored = {name.removeprefix(self._prefix) for name in shards.names if name.startswith(self._prefix)}
        if not self._stored:
            raise ConfigError(f"ckpt-{meta.name} has no average of the weights", "learner.ema keeps one")
        about = meta.numbers.get("lora")
        self._adapter = None if about is None else Adapter(**about)
        self._base: dict[str, torch.Tensor] = {}
        if self._adapter is not None:
            self._base = dict(load_model(config.model).named_parameters())

    def check(self, names: Sequence[str]) -> None:
        there = self._stored if self._adapter is None else self._base.keys()
        if missing := sorted(set(names) - there):
            raise Refused(
                f"ckpt-{self._meta.name} is of another model than {self._config.model.path}: it has no"
                f" {', '.join(missing[:3])}",
                "bring the model that training started from back",
            )

    def read(self, name: str) -> torch.Tensor:
        whole = self._stored_tensor(name) if self._adapter is None else self._merged(name, self._adapter)
        return whole.to(self._dtype)

    def buffers(self, model: PreTrainedModel) -> dict[str, torch.Tensor]:
        """Buffers that files of this model hold; they are not trained, so they come from `model.path`."""
        parameters = {name for name, _ in model.named_parameters(remove_duplicate=False)}
        names = model.state_dict().keys() - parameters
        whole = load_model(self._config.model).state_dict() if names else {}
        return {name: whole[name].clone() for name in names}

    def write_adapter(self, folder: Path) -> None:
        if self._adapter is not None:
            names = sorted(name for name in self._stored if name.startswith(PREFIX))  # without a value head
            tensors = {name: self._stored_tensor(name).to(self._dtype) for name in names}
            write_adapter(folder, self._adapter, tensors)

    def _stored_tensor(self, name: str) -> torch.Tensor:
        return self._shards.read(self._prefix + name)

    def _merged(self, name: str, adapter: Adapter) -> torch.Tensor:
        names = names_of(name.removesuffix(".weight"), dora=adapter.dora)
        if names.low not in self._stored:
            return self._base[name].detach()
        return merge(
            self._base[name].detach(),
            self._stored_tensor(names.low),
            self._stored_tensor(names.high),
            scale=adapter.scale,
            magnitude=None if names.magnitude is None else self._stored_tensor(names.magnitude),
        )


def _write(
    draft: Path, model: PreTrainedModel, source: _Source, names: Sequence[str], on_progress: OnProgress | None
) -> dict[str, list[str]]:
    sizes = {name: parameter.numel() * parameter.element_size() for name, parameter in model.named_parameters()}
    parts = list(_parts(names, sizes))
    written, total = 0, sum(sizes.values())
    files: dict[str, list[str]] = {}
    for number, part in enumerate(parts, 1):
        file = "model.safetensors" if len(parts) == 1 else f"model-{number:05}-of-{len(parts):05}.safetensors"
        # Names as in files: transformers has others in memory for some models (fused experts).
        tensors = revert_weight_conversion(model, {name: source.read(name).contiguous() for name in part})
        if number == len(parts):
            tensors |= source.buffers(model)
        save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, draft / file, {"format": "pt"})
        files[file] = list(tensors)
        written += sum(sizes[name] for name in part)
        if on_progress is not None:
            on_progress(written, total)
    return files


def _parts(names: Sequence[str], sizes: dict[str, int]) -> Iterator[list[str]]:
    part: list[str] = []
    size = 0
    for name in names:
        if part and size + sizes[name] > _FILE_BYTES:
            yield part
            part, size = [], 0
        part.append(name)
        size += sizes[name]
    yield part


def _write_rest(draft: Path, model: PreTrainedModel, config: RunConfig, files: dict[str, list[str]]) -> None:
    model.config.save_pretrained(draft)
    try:
        GenerationConfig.from_pretrained(config.model.path).save_pretrained(draft)
    except (OSError, ValueError) as error:
        logger.info("model exported without generation settings", extra={"error": str(error)})
    _write_tokenizer(draft, config.model)
    if len(files) > 1:
        index: dict[str, Any] = {
            "metadata": {"total_size": sum((draft / file).stat().st_size for file in files)},
            "weight_map": {name: file for file, names in files.items() for name in names},
        }
        (draft / "model.safetensors.index.json").write_bytes(orjson.dumps(index, option=orjson.OPT_INDENT_2))


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
