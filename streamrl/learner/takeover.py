"""How a learner begins: fence, the greatest valid checkpoint, refuse or resume."""

from __future__ import annotations

import asyncio
import logging
import uuid
from dataclasses import dataclass
from pathlib import Path

from streamrl.errors import Refused
from streamrl.learner.checkpoint import FORMAT, NOWHERE, Checkpoints, Kind, Meta, parse_name
from streamrl.learner.lineage import Branch, Interval, greatest_version, ids_of
from streamrl.queues.ledger import Ledger
from streamrl.queues.records import Fence

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Start:
    nonce: str  # fences this learner's writes
    epoch: int
    meta: Meta | None  # loaded checkpoint; None when training starts from the model of the run
    trained: list[int]  # ids of the groups that it was trained on
    version: int  # greatest number known anywhere; the next one is above it
    branch: Branch  # versions and steps of the surviving branch

    @property
    def step(self) -> int:
        return self.meta.step if self.meta else 0

    @property
    def checkpoint(self) -> str:
        """As Redis knows it."""
        return self.meta.name if self.meta else "0-0"

    def next_checkpoint(
        self, *, step: int, version: int, trained: list[Interval], count: int, oldest: int, model: str
    ) -> Meta:
        """Meta data of a checkpoint of this learner; versions of a step before `oldest` are not trained any more."""
        before = self.meta
        return Meta(
            format=FORMAT,
            epoch=self.epoch,
            step=step,
            version=version,
            trained=trained,
            count=count,
            versions=self.branch.since(oldest),
            bases=[*before.bases, before.position] if before else [],
            model=model,
        )


async def take_over(ledger: Ledger, checkpoints: Checkpoints, run_dir: Path, *, kind: Kind, model: str) -> Start:
    """Fence older learners out and declare the checkpoint this one goes on from.

    Before `resume` it writes only the fence, a mark of its epoch beside the checkpoints, and the cursor of a Redis that
    lost its data. Each call is another learner with a new epoch.
    """
    nonce = uuid.uuid4().hex
    fence = await ledger.fence(nonce, await asyncio.to_thread(checkpoints.greatest_epoch))
    await asyncio.to_thread(checkpoints.mark_epoch, fence.epoch)
    meta = await asyncio.to_thread(checkpoints.greatest, fence.base, fence.base_epoch, fence.checkpoint)
    check_age(fence, meta, checkpoints)
    if meta:
        check_fit(meta, kind, model)
    trained = ids_of(meta.trained) if meta else []
    # A Redis that lost its data would admit all trained groups again: advance its cursor to the first gap.
    first, last = meta.trained[0] if meta and meta.trained else (0, -1)
    await ledger.advance_cursor(nonce, 0 if first else last + 1)
    await ledger.resume(nonce, meta.name if meta else "0-0", fence.epoch)
    await asyncio.to_thread(checkpoints.remove_unfinished, fence.epoch)
    branch = Branch(meta.versions if meta else {})
    version = max(fence.version, meta.version if meta else 0, greatest_version(run_dir))
    logger.info("learner took over", extra={"epoch": fence.epoch, "checkpoint": meta.name if meta else "none"})
    return Start(nonce, fence.epoch, meta, trained, version, branch)


def check_age(fence: Fence, meta: Meta | None, checkpoints: Checkpoints) -> None:
    if meta is None and parse_name(fence.checkpoint) != NOWHERE:
        raise Refused(
            f"Redis retired groups for ckpt-{fence.checkpoint}, and in {checkpoints.root} there is no valid checkpoint"
            " that goes on from it: going on would lose groups",
            f"bring {checkpoints.root}/ckpt-{fence.checkpoint} back, or start afresh with --fresh",
        )


def check_fit(meta: Meta, kind: Kind, model: str) -> None:
    name = f"ckpt-{meta.name}"
    if meta.format != FORMAT:
        raise Refused(
            f"{name} has format {meta.format}, this version of streamrl reads and writes {FORMAT}",
            "go on with the version of streamrl that wrote it, or start afresh with --fresh",
        )
    if meta.kind != kind:
        what = "a recording" if meta.kind == "recording" else "a training"
        raise Refused(
            f"{name} is of {what}: this run cannot go on as something else",
            "name another directory with --run; a recording is trained with `streamrl up --train-only`",
        )
    if meta.model != model:
        raise Refused(
            f"{name} was trained from model {meta.model}, model.path is {model}",
            "put model.path back, or start afresh with --fresh",
        )
    if meta.count != (known := len(ids_of(meta.trained))):
        raise Refused(f"{name} was trained on {meta.count} groups and names {known} of them", "run `streamrl audit`")
