"""When and how rank 0 makes a checkpoint: logs, shards, meta data, rename, then retire, then remove old ones."""

from __future__ import annotations

import asyncio
import logging
import shutil
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Final

import msgspec

from streamrl.config import RunConfig
from streamrl.errors import Fenced
from streamrl.learner.chain import TrainedLog, greatest_logged_epoch
from streamrl.learner.checkpoint import Checkpoints, InvalidCheckpoint, Meta, describe, shard_name
from streamrl.learner.crew import Command, Crew
from streamrl.learner.intake import Intake
from streamrl.learner.record import GroupRecord
from streamrl.learner.takeover import Start
from streamrl.queues.budget import checkpoint_due

logger = logging.getLogger(__name__)
_FIRST_PAUSE: Final = 1.0
_LONGEST_PAUSE: Final = 30.0


class Saver:
    """The checkpoints of one learner.

    A checkpoint that fails (full disk) leaves the run as it was: nothing is retired, training goes on until the hard
    cap of live groups stops admission, and it is tried again after a pause that doubles.

    Args:
        config: of the run.
        run_dir: of the run.
        start: where this learner went on.
        intake: retires.
        crew: this rank's share of the policy, and the other ranks.

    Raises:
        CannotCreate: the log or the record of this epoch cannot be made.
    """

    def __init__(self, config: RunConfig, run_dir: Path, start: Start, intake: Intake, crew: Crew) -> None:
        self._config, self._start, self._intake = config, start, intake
        self._crew, self._trainer = crew, crew.trainer
        self._checkpoints = Checkpoints(run_dir / "checkpoints")
        self._log = TrainedLog(self._checkpoints.folder, start.epoch)
        self._record = GroupRecord(run_dir, start.epoch)
        self._saved = start.step
        self._pause, self._retry_at = 0.0, 0.0

    def trained(self, gids: Iterable[int], frames: Iterable[dict[str, Any]]) -> None:
        """Write down the groups of an applied update; they count with the next checkpoint."""
        self._log.append(gids)
        for frame in frames:
            self._record.append(frame)

    @property
    def saved_step(self) -> int:
        """Step of the newest checkpoint."""
        return self._saved

    @property
    def due(self) -> bool:
        """Whether a checkpoint should be tried now."""
        config, steps = self._config, self._trainer.step - self._saved
        due = checkpoint_due(steps, config.checkpoint.every, self._intake.held, config.budget, config.hard_cap)
        return due and time.monotonic() >= self._retry_at

    async def save(self, version: int) -> bool:
        """Make a checkpoint of the present weights and retire what they were trained on; False when it failed.

        Call between two steps only. Cancelled or killed half way it leaves a draft that the next learner removes, or a
        finished checkpoint whose groups the next learner retires.

        Args:
            version: greatest version number used so far.

        Raises:
            Fenced: a newer learner has begun its log. Redis may have forgotten it, the disk has not.
        """
        if not self._intake.fresh:
            return True
        started = time.monotonic()
        meta = Meta(
            epoch=self._start.epoch,
            step=self._trainer.step,
            version=version,
            count=self._trainer.digest.count,
            digest=self._trainer.digest.hexdigest,
            bases=self._start.bases,
            world=self._trainer.ranks.world,
            model=self._config.model.path,
        )
        self._check_alone()
        try:
            saved = await self._write(meta)
        except (OSError, InvalidCheckpoint) as error:
            await asyncio.to_thread(self._withdraw, meta)
            self._pause = min(_LONGEST_PAUSE, max(_FIRST_PAUSE, 2 * self._pause))
            self._retry_at = time.monotonic() + self._pause
            logger.error(  # noqa: TRY400
                "checkpoint failed, nothing was retired",
                extra={"checkpoint": meta.name, "error": str(error), "retry_seconds": self._pause},
            )
            return False
        self._pause, self._saved = 0.0, meta.step
        self._check_alone()
        await self._intake.saved(meta.name)
        await asyncio.to_thread(self._checkpoints.remove_older, saved, self._config.checkpoint.keep)
        seconds = round(time.monotonic() - started, 3)
        logger.info("checkpoint", extra={"checkpoint": meta.name, "groups": meta.count, "seconds": seconds})
        return True

    def close(self) -> None:
        """Close the files; what is not in a checkpoint does not count."""
        self._log.close()
        self._record.close()

    def _check_alone(self) -> None:
        newer = greatest_logged_epoch(self._checkpoints.folder)
        if newer > self._start.epoch:
            raise Fenced(f"checkpoint: the learner of epoch {newer} has taken over from this one ({self._start.epoch})")

    async def _write(self, meta: Meta) -> Meta:
        link = await asyncio.to_thread(self._log.sync)
        record = await asyncio.to_thread(self._record.sync)
        draft = await asyncio.to_thread(self._checkpoints.begin, meta.position)
        place = meta.position
        if not await self._crew.order(Command.SAVE, place, lambda: self._trainer.save(draft, place)):
            raise OSError("a rank could not write its shard")
        files: Sequence[Path] = [draft / shard_name(rank, meta.world) for rank in range(meta.world)]
        shards = await asyncio.to_thread(lambda: [describe(file) for file in files])
        chain, known = [*self._start.chain, link], [*self._start.record, record]
        whole = msgspec.structs.replace(meta, chain=chain, record=known, shards=shards)
        await asyncio.to_thread(self._checkpoints.finish, whole)
        return whole

    def _withdraw(self, meta: Meta) -> None:
        """Remove what a failed checkpoint left, so that it takes no room and its name is free again."""
        shutil.rmtree(self._checkpoints.draft(meta.position), ignore_errors=True)
        shutil.rmtree(self._checkpoints.path(meta.position), ignore_errors=True)
