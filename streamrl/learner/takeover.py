"""How a learner begins: fence, the greatest valid checkpoint, refuse or resume."""

from __future__ import annotations

import asyncio
import itertools
import logging
import uuid
from dataclasses import dataclass
from pathlib import Path

from streamrl.errors import Refused
from streamrl.learner.checkpoint import FORMAT, NOWHERE, Checkpoints, Kind, Meta, parse_name
from streamrl.learner.lineage import Branch, Link, TrainedDigest, greatest_logged_epoch, read_trained, read_versions
from streamrl.queues.ledger import Ledger
from streamrl.queues.records import Fence

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Start:
    nonce: str  # fences this learner's writes
    epoch: int
    meta: Meta | None  # loaded checkpoint; None when training starts from the model of the run
    trained: list[int]  # ids in the chain of that checkpoint
    version: int  # greatest number known anywhere; the next one is above it
    branch: Branch  # versions and steps of the surviving branch

    @property
    def step(self) -> int:
        return self.meta.step if self.meta else 0

    @property
    def checkpoint(self) -> str:
        """Name of the loaded checkpoint as Redis knows it; `0-0` for none."""
        return self.meta.name if self.meta else "0-0"

    def next_checkpoint(
        self, *, step: int, version: int, digest: TrainedDigest, links: tuple[Link, Link], model: str
    ) -> Meta:
        """Meta data of a checkpoint of this learner: the lineage of the loaded one, and what was added since."""
        before = self.meta
        return Meta(
            format=FORMAT,
            epoch=self.epoch,
            step=step,
            version=version,
            chain=[*(before.chain if before else []), links[0]],
            count=digest.count,
            digest=digest.hexdigest,
            bases=[*before.bases, before.position] if before else [],
            model=model,
            record=[*(before.record if before else []), links[1]],
        )


async def take_over(ledger: Ledger, checkpoints: Checkpoints, *, kind: Kind, model: str) -> Start:
    """Fence older learners out and declare the checkpoint this one goes on from.

    Before `resume` it writes only the fence, and the cursor of a Redis that lost its data. Each call is another
    learner with a new epoch.

    Raises:
        Refused: no valid checkpoint holds the groups that Redis has retired, so they would be lost; or the weights do
            not fit the log of trained groups; or the checkpoint is of another format, kind or model.
        Fenced: another learner came in between.
    """
    nonce = uuid.uuid4().hex
    epochs = [epoch for epoch, _ in checkpoints.positions()]
    fence = await ledger.fence(nonce, max([*epochs, greatest_logged_epoch(checkpoints.folder)], default=0))
    meta = await asyncio.to_thread(checkpoints.greatest, fence.base, fence.base_epoch, fence.checkpoint)
    check_age(fence, meta, checkpoints.folder)
    if meta:
        check_fit(meta, kind, model)
    trained = read_trained(checkpoints.folder, meta.chain) if meta else []
    if meta:
        check_digest(meta, trained)
    # A Redis that lost its data would admit all trained groups again: lift its cursor to the first gap.
    known = set(trained)
    await ledger.lift(nonce, next(group_id for group_id in itertools.count() if group_id not in known))
    await ledger.resume(nonce, meta.name if meta else "0-0", fence.epoch)
    checkpoints.remove_drafts(fence.epoch)
    notes = read_versions(checkpoints.folder)
    surviving = [int(file.removeprefix("trained-").removesuffix(".log")) for file, _ in (meta.chain if meta else [])]
    branch = Branch(notes, surviving, fence.epoch, meta.step if meta else 0)
    version = max(fence.version, meta.version if meta else 0, branch.greatest)
    logger.info("learner took over", extra={"epoch": fence.epoch, "checkpoint": meta.name if meta else "none"})
    return Start(nonce, fence.epoch, meta, trained, version, branch)


def check_age(fence: Fence, meta: Meta | None, folder: Path) -> None:
    if meta is None and parse_name(fence.checkpoint) != NOWHERE:
        raise Refused(
            f"Redis retired groups for ckpt-{fence.checkpoint}, and in {folder} there is no valid checkpoint that goes"
            " on from it: going on would lose groups",
            f"bring {folder / f'ckpt-{fence.checkpoint}'} back, or start afresh with --fresh",
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


def check_digest(meta: Meta, trained: list[int]) -> None:
    """Refuse a chain whose ids are not those whose gradients the weights hold."""
    digest = TrainedDigest()
    digest.add(trained)
    if (digest.count, digest.hexdigest) != (meta.count, meta.digest):
        raise Refused(f"the log of trained groups does not fit the weights of ckpt-{meta.name}", "run `streamrl audit`")
