"""When and how rank 0 makes a checkpoint, while training goes on.

```
between two steps: every rank copies its state to the host      (SAVE)
in the background: every rank writes and fsyncs its copy; rank 0 syncs the logs
                   all have written                              (SAVED, asked again and again)
                   meta data, rename -> retire -> remove old ones
```
"""

from __future__ import annotations

import asyncio
import logging
import shutil
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import msgspec

from streamrl.config import RunConfig
from streamrl.errors import DeadlineExceeded, Fenced, StreamrlError
from streamrl.learner.chain import TrainedLog, greatest_logged_epoch
from streamrl.learner.checkpoint import Checkpoints, InvalidCheckpoint, Meta
from streamrl.learner.crew import Command, Crew
from streamrl.learner.intake import Intake
from streamrl.learner.record import GroupRecord
from streamrl.learner.shard_files import Progress, take_notes
from streamrl.learner.takeover import Start

logger = logging.getLogger(__name__)
_FIRST_PAUSE: Final = 1.0
_LONGEST_PAUSE: Final = 30.0
_ASK_SECONDS: Final = 0.01
"""First pause between two questions whether all ranks have written; it doubles."""
_LONGEST_ASK: Final = 1.0


@dataclass(frozen=True)
class _Saving:
    """A checkpoint that is being written: its meta data but the shards, the groups it makes durable, its beginning."""

    meta: Meta
    gids: frozenset[int]
    started: float


class Saver:
    """The checkpoints of one learner, one at a time.

    A checkpoint that fails (full disk) leaves the run as it was: nothing is retired, training goes on until the hard
    cap of live groups stops admission, and it is tried again after a pause that doubles.

    Attributes:
        saved_step: step of the newest checkpoint.

    Args:
        config: of the run.
        run_dir: of the run.
        start: where this learner went on.
        intake: retires.
        crew: this rank's share of the policy, and the other ranks.
        tasks: owns the background task; an error there ends the learner.

    Raises:
        CannotCreate: the log or the record of this epoch cannot be made.
    """

    def __init__(
        self, config: RunConfig, run_dir: Path, start: Start, intake: Intake, *, crew: Crew, tasks: asyncio.TaskGroup
    ) -> None:
        self._config, self._start, self._intake = config, start, intake
        self._crew, self._trainer, self._tasks = crew, crew.trainer, tasks
        self._checkpoints = Checkpoints(run_dir / "checkpoints")
        self._log = TrainedLog(self._checkpoints.folder, start.epoch)
        self._record = GroupRecord(run_dir, start.epoch)
        self.saved_step = start.step
        self._begun = start.step
        self._running: asyncio.Task[None] | None = None
        self._pause, self._retry_at = 0.0, 0.0

    def trained(self, gids: Iterable[int], frames: Iterable[dict[str, Any]]) -> None:
        """Write down the groups of an applied update; they count with the next checkpoint."""
        self._log.append(gids)
        for frame in frames:
            self._record.append(frame)

    @property
    def due(self) -> bool:
        """Whether a checkpoint should be begun now."""
        due = self._config.checkpoint_due(self._trainer.step - self._begun, self._intake.held)
        return due and time.monotonic() >= self._retry_at

    async def begin(self, version: int) -> None:
        """Begin a checkpoint of the present weights; what they were trained on is retired when it is durable.

        Call between two steps only. It waits for the one before it first: with `checkpoint.background` as many groups
        as are trained in two intervals are held at most. Cancelled or killed half way it leaves a draft that the next
        learner removes, or a finished checkpoint whose groups the next learner retires.

        Args:
            version: greatest version number used so far.

        Raises:
            Fenced: a newer learner has begun its log. Redis may have forgotten it, the disk has not.
        """
        await self.settle()
        if not self._intake.fresh:
            return
        self._check_alone()
        saving = _Saving(self._describe(version), frozenset(self._intake.fresh), time.monotonic())
        place = saving.meta.position
        try:
            draft = await asyncio.to_thread(self._checkpoints.begin, place)
        except OSError as error:
            self._failed(saving.meta, error)
            return
        await self._crew.order(Command.SAVE, place, lambda: self._trainer.state.save(draft))
        self._begun = self._trainer.step
        self._running = self._tasks.create_task(self._complete(saving), name=f"checkpoint {saving.meta.name}")
        if not self._config.checkpoint.background:
            await self.settle()

    async def settle(self) -> None:
        """Return when no checkpoint is being written, whatever became of it; bounded by `checkpoint.deadline`."""
        if self._running is not None:
            await asyncio.wait([self._running])

    async def save(self, version: int) -> bool:
        """Make a checkpoint of the present weights now, unless there is one; False when it failed."""
        await self.begin(version)
        await self.settle()
        return not self._intake.fresh

    def close(self) -> None:
        """Close the files; what is not in a checkpoint does not count."""
        self._log.close()
        self._record.close()

    def _describe(self, version: int) -> Meta:
        start, digest = self._start, self._trainer.digest
        meta = Meta(
            epoch=start.epoch,
            step=self._trainer.step,
            version=version,
            chain=[*start.chain, self._log.mark()],
            count=digest.count,
            digest=digest.hexdigest,
            bases=start.bases,
            model=self._config.model.path,
            record=[*start.record, self._record.mark()],
        )
        return self._trainer.state.describe(meta)

    def _check_alone(self) -> None:
        newer = greatest_logged_epoch(self._checkpoints.folder)
        if newer > self._start.epoch:
            raise Fenced(f"checkpoint: the learner of epoch {newer} has taken over from this one ({self._start.epoch})")

    async def _complete(self, saving: _Saving) -> None:
        """See a checkpoint through, from the copies on the host to the removal of older ones.

        Raises:
            DeadlineExceeded: it was not written within `checkpoint.deadline`: a disk hangs, and a thread with it.
        """
        meta, deadline = saving.meta, self._config.checkpoint.deadline
        try:
            async with asyncio.timeout(deadline):
                saved = await self._write(meta)
        except InvalidCheckpoint as error:
            await self._withdraw(meta, error)
            return
        except StreamrlError:
            raise
        except TimeoutError as error:
            raise DeadlineExceeded(
                f"ckpt-{meta.name} was not written within checkpoint.deadline ({deadline:g} s)", "look at the disk"
            ) from error
        except OSError as error:
            await self._withdraw(meta, error)
            return
        self._check_alone()
        await self._intake.saved(meta.name, saving.gids)
        self._pause, self.saved_step = 0.0, meta.step
        keep, keep_every = self._config.checkpoint.keep, self._config.checkpoint.keep_every
        await asyncio.to_thread(self._checkpoints.remove_older, saved, keep, keep_every)
        seconds = round(time.monotonic() - saving.started, 3)
        logger.info("checkpoint", extra={"checkpoint": meta.name, "groups": meta.count, "seconds": seconds})

    async def _write(self, meta: Meta) -> Meta:
        await self._intake.archive.sync()
        await asyncio.to_thread(self._log.sync)
        await asyncio.to_thread(self._record.sync)
        pause = _ASK_SECONDS
        while (progress := await self._crew.ask(Command.SAVED, self._trainer.state.saved)) is Progress.WRITING:
            await asyncio.sleep(pause)
            pause = min(_LONGEST_ASK, 2 * pause)
        if progress is not Progress.WRITTEN:
            raise OSError("a rank could not write its shard")
        shards = await asyncio.to_thread(take_notes, self._checkpoints.draft(meta.position), meta.world)
        whole = msgspec.structs.replace(meta, shards=shards)
        await asyncio.to_thread(self._checkpoints.finish, whole)
        return whole

    async def _withdraw(self, meta: Meta, error: Exception) -> None:
        await asyncio.to_thread(self._remove, meta)
        self._failed(meta, error)

    def _remove(self, meta: Meta) -> None:
        """Remove what a failed checkpoint left, so that it takes no room and its name is free again."""
        shutil.rmtree(self._checkpoints.draft(meta.position), ignore_errors=True)
        shutil.rmtree(self._checkpoints.path(meta.position), ignore_errors=True)

    def _failed(self, meta: Meta, error: Exception) -> None:
        self._begun = self.saved_step
        self._pause = min(_LONGEST_PAUSE, max(_FIRST_PAUSE, 2 * self._pause))
        self._retry_at = time.monotonic() + self._pause
        logger.error(
            "checkpoint failed, nothing was retired",
            extra={"checkpoint": meta.name, "error": str(error), "retry_seconds": self._pause},
        )
