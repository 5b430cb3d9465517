"""Whole weights of a model in training, and its export as the learner makes it: from a checkpoint of all ranks."""

from __future__ import annotations

from pathlib import Path

import msgspec
import torch
from torch.distributed.tensor import DTensor

from streamrl.learner.checkpoint import FORMAT, Checkpoints, Meta
from streamrl.learner.checkpoint_files import RankState, WriteProgress
from streamrl.learner.export import export_checkpoint
from streamrl.learner.policy import Actor
from streamrl.learner.sharding import TrainableModel


def full_tensors(model: TrainableModel, dtype: torch.dtype = torch.float32) -> dict[str, torch.Tensor]:
    """Copies of all weights by Hugging Face name; an adapter is merged in. Collective."""
    lora = getattr(model, "lora", None)
    rows = None if lora is None else lora.merged_rows(model.parameters)
    found = {}
    for name, parameter in (model.parameters if lora is None else model._frozen).items():
        own = parameter.to_local().detach()
        whole = DTensor.from_local(
            own if rows is None else rows(name, own),
            parameter.device_mesh,
            parameter.placements,
            run_check=False,
            shape=parameter.shape,
            stride=parameter.stride(),
        )
        found[name] = whole.full_tensor().to("cpu", dtype, copy=True)
    return found


def save(folder: Path, actor: Actor) -> Meta:
    """A checkpoint of an actor at step 1. Collective."""
    ranks, checkpoints = actor.ranks, Checkpoints(folder)
    state = RankState(ranks, {"actor": actor}, {} if actor.lora is None else {"lora": actor.lora})
    meta = state.describe(Meta(format=FORMAT, epoch=1, step=1, version=1, model=actor.config.model.path))
    if ranks.rank == 0:
        checkpoints.begin(meta.position)
    ranks.all_min(1)  # it is there
    state.save(checkpoints.draft(meta.position))
    while (progress := state.saved()) is WriteProgress.WRITING:
        pass
    assert progress is WriteProgress.WRITTEN
    if ranks.rank == 0:
        meta = msgspec.structs.replace(meta, shards=state.shards)
        checkpoints.finish(meta)
    return meta


def export(actor: Actor, out: Path, *, average: bool = False) -> None:
    """The Hugging Face directory of an actor. Collective; rank 0 writes."""
    folder = out.with_name(f"{out.name}-checkpoints")
    meta = save(folder, actor)
    if actor.ranks.rank == 0:
        path = Checkpoints(folder).path(meta.position)
        export_checkpoint(actor.config, path, meta, out, average=average)
        # The next export may have other weights.
        for file in path.iterdir():
            file.unlink()
        path.rmdir()
